"""Lawful runs made by hand: a chain of equal blocks trained for one step, booked as an allocator would.

The step is the textbook one, so its peaks can be checked with a pencil. Block i saves `saved` bytes, hands on
`output`, and needs `scratch` while it runs forward.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec
from hypothesis import strategies as st

from explorer.record.allocations import ROLES, Allocations, Calls, Phase, PhaseSpan, Role
from explorer.record.base import column
from explorer.record.comparison import Comparison, GradientDiff
from explorer.record.graph import ModelRef
from explorer.record.measurement import AllocatorPeaks, Environment, MeasuredBlock, Measurement, Samples, Times
from explorer.record.policy import Policy
from explorer.record.run import Optimizer, RunSpec

MIB = 1024**2
HOST = Environment(
    device="cpu", device_name="test", torch_version="2.13.0", python_version="3.11", platform="Linux", n_threads=1
)


@dataclass
class Book:
    """Allocations as they happen; one tick an event."""

    rows: list[list[int]] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    ops: list[str] = field(default_factory=list)
    spans: list[PhaseSpan] = field(default_factory=list)
    calls: list[tuple[str, int, int, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    """(block, first tick, end tick, inputs, outputs)"""
    tick: int = 0

    def hold(self, role: Role, block: str, n_bytes: int) -> int:
        """Something that is there before the step."""
        return self._enter(role, block, "", (n_bytes, 0))

    def alloc(self, role: Role, block: str, n_bytes: int, op: str = "aten::mm") -> int:
        self.tick += 1
        return self._enter(role, block, op, (n_bytes, self.tick))

    def free(self, entry: int) -> None:
        self.tick += 1
        self.rows[entry][2] = self.tick

    def phase(self, phase: Phase, block: str = "") -> None:
        self._close()
        self.spans.append(PhaseSpan(phase=phase, block=block, first_tick=self.tick + 1, end_tick=self.tick + 1))

    def close(self) -> Allocations:
        self._close()
        end = self.tick + 1
        rows = [[size, born, end if died < 0 else died, *rest] for size, born, died, *rest in self.rows]
        columns = [column(values) for values in zip(*rows)] or [column() for _ in range(6)]
        names = ("n_bytes", "born", "died", "role", "block", "op")
        return Allocations(
            n_ticks=self.tick,
            blocks=tuple(self.blocks),
            ops=tuple(self.ops),
            time_ns=column(1000 * t for t in range(self.tick + 1)),
            calls=self._calls(),
            **dict(zip(names, columns)),
        )

    def _calls(self) -> Calls:
        return Calls(
            block=column(self.blocks.index(block) for block, *_ in self.calls),
            first_tick=column(first for _, first, *_ in self.calls),
            end_tick=column(end for _, _, end, *_ in self.calls),
            n_inputs=column(len(inputs) for *_, inputs, _ in self.calls),
            n_outputs=column(len(outputs) for *_, outputs in self.calls),
            entries=column(entry for *_, inputs, outputs in self.calls for entry in (*inputs, *outputs)),
        )

    def _close(self) -> None:
        if self.spans:
            last = self.spans.pop()
            if self.tick + 1 > last.first_tick:
                self.spans.append(
                    PhaseSpan(phase=last.phase, block=last.block, first_tick=last.first_tick, end_tick=self.tick + 1)
                )

    def _enter(self, role: Role, block: str, op: str, what: tuple[int, int]) -> int:
        for known, name in ((self.blocks, block), (self.ops, op)):
            if name not in known:
                known.append(name)
        self.rows.append([what[0], what[1], -1, ROLES.index(role), self.blocks.index(block), self.ops.index(op)])
        return len(self.rows) - 1


@dataclass(frozen=True)
class Chain:
    """Sizes of the textbook model, in bytes."""

    n_blocks: int = 6
    parameters: int = 3 * MIB
    saved: int = 14 * MIB
    output: int = MIB
    scratch: int = 4 * MIB
    optimizer: bool = True
    flops: int = 1_000_000_000
    n_parts: int = 2
    """Allocations that the saved bytes of a block are made of."""


def measured(chain: Chain | None = None, recompute: Collection[int] = (), *, time_scale: float = 1.0) -> Measurement:
    """One step of `chain`, the blocks in `recompute` recomputed."""
    chain = chain or Chain()
    names = [f"layers.{i}" for i in range(chain.n_blocks)]
    book = Book()
    for name in names:
        book.hold("parameter", name, chain.parameters)
        if chain.optimizer:
            book.hold("optimizer state", name, 2 * chain.parameters)
    book.hold("buffer", "norm", 1024)
    outputs = [book.hold("input", "", chain.output)]
    book.phase("forward")
    saved: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        first = book.tick
        outputs.append(_run(book, chain, name, i in recompute, saved))
        book.calls.append((name, first, book.tick, (outputs[-2],), (outputs[-1],)))
    outputs = outputs[1:]
    loss = book.alloc("saved activation", "head", chain.output, "aten::mse_loss")
    book.phase("backward")
    gradient = book.alloc("temporary", "head", chain.output, "aten::mse_loss_backward")
    book.free(loss)
    for i, name in reversed(list(enumerate(names))):
        if i in recompute:
            book.phase("recompute", name)
            saved[name] = _again(book, chain, name)
            book.phase("backward")
        book.free(outputs[i])
        grad_in = book.alloc("temporary", name, chain.output, "aten::mm_backward")
        for entry in saved.pop(name):
            book.free(entry)
        book.alloc("gradient", name, chain.parameters)
        book.free(gradient)
        gradient = grad_in
    book.free(gradient)
    if chain.optimizer:
        book.phase("optimizer")
        for name in names:
            book.free(book.alloc("temporary", name, chain.parameters, "aten::sqrt"))
    return _finish(book, chain, names, recompute, time_scale)


def compared(
    chain: Chain | None = None, recompute: Collection[int] = (0, 2, 4), *, n_gradients: int | None = None
) -> Comparison:
    """`chain` without and with a policy, every gradient bitwise equal."""
    chain = chain or Chain()
    n = chain.n_blocks if n_gradients is None else n_gradients
    return Comparison(
        baseline=measured(chain),
        candidate=measured(chain, recompute, time_scale=1.2),
        gradients=tuple(equal_gradient(f"layers.{i}.weight") for i in range(n)),
        reproducible=True,
    )


def equal_gradient(name: str) -> GradientDiff:
    return GradientDiff(
        name=name, shape=(4, 4), dtype="float32", presence="both", bitwise=True, max_abs=0.0, relative_norm=0.0,
        max_ulp=0, cosine=1.0, norm_ratio=1.0, baseline_error=1e-6, candidate_error=1e-6, noise=0.0, tiny=1e-7,
    )  # fmt: skip


def wrong_gradient(name: str, relative_norm: float = 0.4) -> GradientDiff:
    return msgspec.structs.replace(
        equal_gradient(name), bitwise=False, max_abs=0.1, relative_norm=relative_norm, max_ulp=99999, cosine=0.9,
        norm_ratio=1.1, candidate_error=relative_norm,
    )  # fmt: skip


chains = st.builds(
    Chain,
    n_blocks=st.integers(1, 8),
    parameters=st.integers(1, 40 * MIB),
    saved=st.integers(4, 40 * MIB),
    output=st.integers(1, 4 * MIB),
    scratch=st.integers(1, 8 * MIB),
    optimizer=st.booleans(),
)


@st.composite
def runs(draw: st.DrawFn) -> Measurement:
    """A chain under any policy."""
    chain = draw(chains)
    return measured(chain, draw(st.sets(st.integers(0, chain.n_blocks - 1))))


@st.composite
def logs(draw: st.DrawFn) -> Allocations:
    """Any lawful order of allocations and frees, not only that of a training step."""
    book = Book()
    open_entries = [
        book.hold(draw(st.sampled_from(ROLES)), "a", draw(st.integers(1, 1000))) for _ in range(draw(st.integers(0, 3)))
    ]
    for _ in range(draw(st.integers(0, 60))):
        if open_entries and draw(st.booleans()):
            book.free(open_entries.pop(draw(st.integers(0, len(open_entries) - 1))))
        else:
            block = draw(st.sampled_from(["", "a", "a.b", "ab", "c.0"]))
            open_entries.append(book.alloc(draw(st.sampled_from(ROLES)), block, draw(st.integers(1, 10**6))))
    return book.close()


def _run(book: Book, chain: Chain, name: str, recompute: bool, saved: dict[str, list[int]]) -> int:
    """Forward of one block; its output."""
    role: Role = "temporary" if recompute else "saved activation"
    parts = _parts(chain)
    scratch = book.alloc("temporary", name, chain.scratch, "aten::softmax")
    first = book.tick
    inside = [book.alloc(role, f"{name}.inner", part, "aten::gelu") for part in parts]
    book.calls.append((f"{name}.inner", first, book.tick, (), ()))
    output = book.alloc("saved activation", name, chain.output, "aten::add")
    book.free(scratch)
    if recompute:
        for entry in inside:
            book.free(entry)
    else:
        saved[name] = inside
    return output


def _again(book: Book, chain: Chain, name: str) -> list[int]:
    scratch = book.alloc("recomputed", name, chain.scratch, "aten::softmax")
    inside = [book.alloc("recomputed", f"{name}.inner", part, "aten::gelu") for part in _parts(chain)]
    book.free(scratch)
    return inside


def _parts(chain: Chain) -> list[int]:
    part = chain.saved // chain.n_parts
    return [part] * (chain.n_parts - 1) + [chain.saved - part * (chain.n_parts - 1)]


def _finish(book: Book, chain: Chain, names: list[str], recompute: Collection[int], time_scale: float) -> Measurement:
    again = {names[i] for i in recompute}
    kept = [name for name in names if name not in again]

    def cost(fqn: str, members: list[str]) -> MeasuredBlock:
        n_again = sum(name in again for name in members)
        saved = sum(chain.output + chain.saved * (name not in again) for name in members)
        return MeasuredBlock(
            fqn=fqn,
            n_forward=1,
            n_recompute=int(n_again > 0),
            saved_after_forward_bytes=saved,
            at_peak_bytes=0,
            forward_flops=chain.flops * len(members),
            recompute_flops=chain.flops * 3 // 4 * n_again,
            backward_flops=2 * chain.flops * len(members),
            skipped_flops=chain.flops // 4 * n_again,
            forward=_samples(2.0 * len(members)),
            recompute=_samples(1.5 * n_again) if n_again else Samples(),
        )

    inner = [cost(f"{name}.inner", [name]) for name in names]
    blocks = [cost(name, [name]) for name in names]
    leaves = [entry for pair in zip(blocks, inner) for entry in pair]
    nothing = MeasuredBlock(
        fqn="head", n_forward=1, n_recompute=0, saved_after_forward_bytes=chain.output, at_peak_bytes=0,
        forward_flops=0, recompute_flops=0, backward_flops=0, forward=_samples(0.1),
    )  # fmt: skip
    policy = Policy.recompute([name for name in names if name not in kept])
    optimizer: Optimizer = "adamw" if chain.optimizer else "none"
    return Measurement(
        spec=RunSpec(model=ModelRef(target="tests:chain"), policy=policy, optimizer=optimizer),
        environment=HOST,
        allocations=book.close(),
        phases=tuple(book.spans),
        blocks=(cost("", names), cost("layers", names), *leaves, nothing),
        times=Times(clock="process CPU time", step=_samples(30.0 * time_scale), forward=_samples(10.0)),
        loss=1.0,
    )


def _samples(middle: float) -> Samples:
    return Samples(ms=tuple(middle * (1 + wobble) for wobble in (0.0, 0.01, -0.01, 0.02, -0.02)))


def cut(run: Measurement, stop: int) -> Measurement:
    """What is left of `run` when it ended at tick `stop`."""
    log = run.allocations
    n = sum(born <= stop for born in log.born)
    names = ("n_bytes", "born", "role", "block", "op")
    return msgspec.structs.replace(
        run,
        phases=tuple(
            msgspec.structs.replace(span, end_tick=min(span.end_tick, stop + 1))
            for span in run.phases
            if span.first_tick <= stop
        ),
        allocations=msgspec.structs.replace(
            log,
            n_ticks=stop,
            time_ns=log.time_ns[: stop + 1],
            died=column(min(died, stop + 1) for died in log.died[:n]),
            **{name: getattr(log, name)[:n] for name in names},
        ),
    )


def on_cuda(run: Measurement) -> Measurement:
    """A made-up run of a caching allocator: blocks of 512 bytes and more, segments of twice that."""
    held = run.allocations.held_bytes
    allocated, reserved = column(size + 512 for size in held), column(2 * max(held) for _ in held)
    peaks = AllocatorPeaks(
        requested_peak_bytes=max(held),
        allocated_peak_bytes=max(held) + MIB,
        reserved_peak_bytes=max(reserved),
        allocated=allocated,
        reserved=reserved,
    )
    return msgspec.structs.replace(run, peaks=peaks)


def two_blocks() -> Measurement:
    """Blocks a and b are given x (1 MiB) and each make, in this order:

    h  8 MiB by mm, saved      t  4 MiB by sin, gone when the block returns      s  2 MiB by exp, saved
    y  1 MiB by add, handed on and saved by whoever is given it
    """
    book = Book()
    book.phase("forward")
    given = book.alloc("saved activation", "", MIB, "aten.embedding.default")
    saved: dict[str, list[int]] = {}
    for name in "ab":
        first = book.tick
        h = book.alloc("saved activation", name, 8 * MIB, "aten.mm.default")
        t = book.alloc("temporary", name, 4 * MIB, "aten.sin.default")
        s = book.alloc("saved activation", name, 2 * MIB, "aten.exp.default")
        y = book.alloc("saved activation", name, MIB, "aten.add.Tensor")
        book.free(t)
        book.calls.append((name, first, book.tick, (given,), (y,)))
        saved[name] = [h, s, given]
        given = y
    book.phase("backward")
    gradient = book.alloc("temporary", "", MIB, "aten.ones_like.default")
    book.free(given)
    for name in "ba":
        h, s, x = saved[name]
        inner = book.alloc("temporary", name, 2 * MIB, "aten.mul.Tensor")
        book.free(s)
        book.free(gradient)
        gradient = book.alloc("temporary", name, MIB, "aten.mm.default")
        book.free(h)
        book.free(x)
        book.free(inner)
    book.free(gradient)
    run = measured()
    return msgspec.structs.replace(run, allocations=book.close(), phases=tuple(book.spans), blocks=())
