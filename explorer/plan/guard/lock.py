"""A predicted step as a `Lock`, and the lock as a text that diffs well: one fact a line, equal siblings written once.

Nothing here depends on a clock, an address or the order of a hash, so equal steps give equal bytes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from explorer import __version__
from explorer.errors import BadInput, UnreadableFile
from explorer.plan.memory.ledger import ledger
from explorer.plan.names import above
from explorer.record.allocations import ROLES, Collective
from explorer.record.base import from_json, from_plain, to_plain
from explorer.record.bounded_file import read_text
from explorer.record.files import CollectiveBytes, Lock, LockedBlock, LockedStep, OperatorBytes
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.policy import KEEP_ALL
from explorer.record.run import RunSpec

SAVED = ROLES.index("saved activation")
_MOST_FIELDS_OF_A_LINE = 3
_LARGEST_BYTES = 64 * 1024**2
_MOST_BLOCKS = 100_000
_LONGEST_FQN = 1000
"""Limits of a lock that is read: continuous integration reads it from a pull request."""


def lock_of(run: Measurement, graph: ModelGraph, policy: str) -> Lock:
    """The lock of a predicted step on the model of `graph`; `policy` is the name under which the policy was given.

    Raises BadInput for a step that was cut short or has no timeline.
    """
    if not run.complete or run.allocations is None:
        raise BadInput("A lock needs the figures of a whole step, and this step was cut short.")
    roles = ledger(run).by_role
    step = LockedStep(
        peak_bytes=run.step_peak_bytes or 0,
        peak_phase=run.peak_phase or "",
        saved_bytes=run.saved_after_forward_bytes or 0,
        forward_flops=run.forward_flops or 0,
        recompute_flops=run.recompute_flops or 0,
        backward_flops=run.backward_flops or 0,
        at_peak={role: n_bytes for role, n_bytes in roles.items() if n_bytes},
        card_allocated_bytes=run.card.allocated_bytes if run.card else None,
        card_reserved_bytes=run.card.reserved_bytes if run.card else None,
        rank=run.rank,
        collectives=_collectives((call.kind, call) for call in run.collectives),
    )
    # A build of torch for another device (`2.13.0+cu130`) predicts the same operators.
    versions = {"explorer": __version__, "torch": run.environment.torch_version.partition("+")[0]}
    return Lock(
        packages=versions,
        policy=policy,
        run=replace(run.spec, policy=KEEP_ALL),
        inputs=tuple("x".join(map(str, shape)) for shape in graph.input_shapes),
        dtype=run.dtype,
        step=step,
        blocks=_blocks(run, graph),
    )


def _blocks(run: Measurement, graph: ModelGraph) -> dict[str, LockedBlock]:
    operators = _operators(run)
    calls: dict[str, list[tuple[str, Collective]]] = defaultdict(list)
    for call in run.collectives:
        calls[call.block].append((f"{call.phase} {call.kind}", call))
    return {
        cost.fqn: LockedBlock(
            kind=graph.by_fqn[cost.fqn].kind,
            n_forward=cost.n_forward,
            n_recompute=cost.n_recompute,
            parameter_bytes=graph.by_fqn[cost.fqn].parameter_bytes,
            saved_bytes=cost.saved_after_forward_bytes,
            forward_flops=cost.forward_flops,
            recompute_flops=cost.recompute_flops,
            backward_flops=cost.backward_flops,
            in_place=dict(sorted(cost.in_place.items())),
            operators=operators.get(cost.fqn, {}),
            collectives=_collectives(calls[cost.fqn]),
        )
        for cost in run.blocks
        if cost.fqn in graph.by_fqn
    }


def _collectives(calls: Iterable[tuple[str, Collective]]) -> dict[str, CollectiveBytes]:
    sizes: dict[str, list[int]] = defaultdict(list)
    for name, call in calls:
        sizes[name].append(call.n_bytes)
    return {name: CollectiveBytes(n=len(group), n_bytes=sum(group)) for name, group in sizes.items()}


def _operators(run: Measurement) -> dict[str, dict[str, OperatorBytes]]:
    """Results by block, in the order in which operators first allocate."""
    log = run.allocations
    assert log is not None
    phase_at = [span for span in run.phases for _ in range(span.first_tick, span.end_tick)]
    rows: dict[tuple[str, str], list[int]] = {}
    for i in sorted(range(len(log.born)), key=log.born.__getitem__):
        if not log.born[i] or log.born[i] >= len(phase_at) or phase_at[log.born[i]].phase == "recompute":
            continue
        operator = log.ops[log.op[i]] or "outside operators"
        dtype = log.dtypes[log.dtype[i]] if log.dtype else ""
        key = f"{phase_at[log.born[i]].phase} {operator} {dtype}".rstrip()
        row = rows.setdefault((log.blocks[log.block[i]], key), [0, 0, 0])
        row[0] += 1
        row[1] += log.n_bytes[i]
        row[2] += log.n_bytes[i] * (log.role[i] == SAVED)
    operators: dict[str, dict[str, OperatorBytes]] = defaultdict(dict)
    for (fqn, key), (n, n_bytes, saved) in rows.items():
        operators[fqn][key] = OperatorBytes(n=n, n_bytes=n_bytes, saved_bytes=saved)
    return operators


def dumps(lock: Lock) -> str:
    """The text of a lock file: JSON with one fact a line. `loads` returns an equal lock."""
    plain = {**to_plain(lock), "run": _stated(lock.run), "blocks": to_plain(_folded(lock.blocks))}
    plain["step"] = {name: value for name, value in plain["step"].items() if value is not None}
    if not lock.step.collectives:
        del plain["step"]["collectives"]
    return "".join(f"{line}\n" for line in _lines(plain, ""))


def loads(text: str) -> Lock:
    """Raises UnreadableFile for a text that is no lock, or a lock of another version."""
    lock = from_json(text, Lock)
    return replace(lock, blocks=_unfolded(lock.blocks))


def _unfolded(lines: dict[str, LockedBlock]) -> dict[str, LockedBlock]:
    """Every block in full. Each line of a hostile lock may double the blocks: they are counted before they are made."""
    blocks: dict[str, LockedBlock] = {}
    children: defaultdict[str, list[str]] = defaultdict(list)

    def add(fqn: str, block: LockedBlock) -> None:
        if fqn in blocks:
            raise UnreadableFile(f"{fqn} is there twice: as a line, and inside a block that is the same as another.")
        blocks[fqn] = block
        if fqn:
            children[next((name for name in above(fqn) if name in blocks), "")].append(fqn)

    for fqn, block in lines.items():
        if len(fqn) > _LONGEST_FQN:
            raise UnreadableFile(f"The name of a block has {len(fqn):,} letters; at most {_LONGEST_FQN:,} are read.")
        first = block.same_as
        if not first:
            add(fqn, block)
            continue
        if first not in blocks or first.rpartition(".")[0] != fqn.rpartition(".")[0]:
            raise UnreadableFile(f"{fqn} is the same as {first}, which is no block beside it and above its line.")
        for name in _within(first, children, most=_MOST_BLOCKS - len(blocks)):
            add(fqn + name.removeprefix(first), blocks[name])
    return blocks


def _within(fqn: str, children: Mapping[str, Sequence[str]], *, most: int) -> list[str]:
    """`fqn` and the blocks inside. Raises UnreadableFile if they are more than `most`."""
    names = [fqn]
    for name in names:
        names += children.get(name, ())
        if len(names) > most:
            raise UnreadableFile(f"The lock stands for more than {_MOST_BLOCKS:,} blocks, the most that are read.")
    return names


def load(path: Path) -> Lock:
    """The lock in a file. Raises UnreadableFile that begins with the name of the file."""
    text = read_text(path, _LARGEST_BYTES, hint="`python -m explorer lock MODEL --out FILE` writes a lock.")
    try:
        return loads(text)
    except UnreadableFile as error:
        raise UnreadableFile(f"{path}: {error.sentence}", hint="Write the lock again.") from error


def _stated(spec: RunSpec) -> dict[str, object]:
    """Fields that differ from their defaults."""
    defaults = to_plain(RunSpec(model=from_plain({"target": ""}, type(spec.model))))
    model = {name: value for name, value in to_plain(spec.model).items() if value}
    plain = {**to_plain(spec), "model": model}
    return {name: value for name, value in plain.items() if value != defaults[name]}


def _folded(blocks: dict[str, LockedBlock]) -> dict[str, LockedBlock]:
    """The blocks with a numbered sibling that equals an earlier one, blocks inside included, reduced to its name."""
    children: dict[str, list[str]] = {fqn: [] for fqn in blocks}
    for fqn in blocks:
        if fqn and (parent := next(name for name in above(fqn) if name in blocks)) is not None:
            children[parent].append(fqn)
    trees: dict[str, tuple[object, ...]] = {}

    def tree(fqn: str) -> tuple[object, ...]:
        """The figures of a block and of all blocks inside, with names relative to the block."""
        if fqn not in trees:
            inside = ((child.removeprefix(f"{fqn}."), tree(child)) for child in children[fqn])
            trees[fqn] = (repr(blocks[fqn]), *inside)
        return trees[fqn]

    def walk(fqn: str) -> Iterator[tuple[str, LockedBlock]]:
        yield fqn, blocks[fqn]
        firsts: dict[tuple[object, ...], str] = {}
        for child in children[fqn]:
            first = firsts.setdefault(tree(child), child) if child.rpartition(".")[2].isdecimal() else child
            if first == child:
                yield from walk(child)
            else:
                yield child, LockedBlock(same_as=first)

    return dict(walk(""))


def _lines(value: object, indent: str, name: str = "", end: str = "") -> Iterator[str]:
    """JSON. A short table of plain values stands on one line."""
    begin = f"{indent}{json.dumps(name, ensure_ascii=False)}: " if name or indent else ""
    entries: Iterable[object] = value.values() if isinstance(value, dict) else ()
    is_plain = indent and all(isinstance(entry, str | int) for entry in entries)
    if not isinstance(value, dict) or (is_plain and len(value) <= _MOST_FIELDS_OF_A_LINE):
        yield f"{begin}{json.dumps(value, ensure_ascii=False)}{end}"
        return
    yield f"{begin}{{"
    last = len(value) - 1
    for i, (key, entry) in enumerate(value.items()):
        yield from _lines(entry, f"{indent}  ", key, "" if i == last else ",")
    yield f"{indent}}}{end}"


def runs_again(lock: Lock, fqn: str) -> bool:
    """Whether a block runs again in backward, or all of its code does: its children with FLOPs or saved bytes."""
    if lock.blocks[fqn].n_recompute:
        return True
    inside = ((name, block) for name, block in lock.blocks.items() if name.rpartition(".")[0] == fqn)
    children = [name for name, block in inside if _works(block)]
    return bool(children) and all(runs_again(lock, child) for child in children)


def _works(block: LockedBlock) -> bool:
    return bool(block.n_forward) and bool(block.forward_flops or block.saved_bytes)
