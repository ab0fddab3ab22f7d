"""Probes for hidden state: does the next step change if the units of a policy are recomputed more often?

    clean process ─▶ model ─▶ step, which keeps the inputs of the units
                           ─▶ each unit is recomputed on its inputs, all known state is put back ─▶ step

If the two steps differ, two more processes run the two steps without a recompute. If their second steps differ from the
probed one, a unit remembers its calls in a file, an installed package or an iterator. Halving finds the unit.
state_diff.py reads state that the walk reaches; this probe finds state that the walk cannot reach.

A recompute here reaches what the policy's recompute reaches: gradients are on and the unit ends with the last tensor
that autograd saved in forward. A unit whose saved tensors no backward reads is not recomputed. Reentrant checkpointing
runs the whole unit once more than the baseline, without gradients.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map

from explorer.engine.bench.step import Trainee, autocast, forward_backward, prepare
from explorer.engine.compare.outcome import fingerprint
from explorer.engine.compare.programs import input_gradients
from explorer.engine.device.subprocess_call import call_in_subprocess
from explorer.engine.model.separate_copy import copy_batch
from explorer.engine.policy import units
from explorer.engine.policy.apply import apply_policy
from explorer.engine.policy.units import Recomputing, Wrap
from explorer.engine.state.global_state import deterministic_kernels, preserve_global_state, without_tf32
from explorer.engine.state.rng import RngState
from explorer.engine.state.snapshot import SharedSnapshot, StepSnapshot
from explorer.engine.state.state_diff import read_state, same_state
from explorer.engine.watch.scopes import without_operation
from explorer.errors import Cancelled, ExplorerError, ModelFailed, said_by
from explorer.plan.names import listed
from explorer.record.allocations import Phase
from explorer.record.plan import Report
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import RunSpec

FEWEST, MOST = 4, 64
"""Bounds of the runs of a block if the spec gives no number: as many runs as fit into the time of one step."""
_LEAST_S = 0.5
"""Least time for the runs of all blocks, for steps that are shorter."""

Fingerprints = Mapping[str, bytes]


@dataclass(frozen=True)
class ProbedStep:
    """Results of two steps of one model: before and after its units are recomputed."""

    first: Fingerprints
    left: Fingerprints
    units: tuple[str, ...] = ()
    """Units that were recomputed between the steps."""
    n_runs: int = 0
    """Recomputes of each unit."""
    not_put_back: tuple[str, ...] = ()
    """State that the walk knows, that the runs moved and that could not be put back: the comparison covers it."""


@dataclass(frozen=True)
class ProbeResult:
    """The fields of a Comparison on hidden state."""

    n_probes: int = 0
    hidden_state: tuple[str, ...] = ()
    not_probed_because: str = ""


def probe(baseline: RunSpec, candidate: RunSpec, report: Report) -> ProbeResult:
    """The units of the candidate's policy with hidden state. An error becomes a sentence."""
    if not candidate.policy.units or baseline.forward_only:
        return ProbeResult()

    def step(names: tuple[str, ...] | None, n_runs: int = 0) -> ProbedStep:
        spec = msgspec.structs.replace(candidate, n_probes=n_runs or candidate.n_probes)
        taken = call_in_subprocess(probed_step, spec, names, report=report, what="probed for hidden state")
        if taken is None:
            raise MemoryError("the system ended its process for lack of memory")
        return taken

    try:
        probed = step(None)
        if probed.left == probed.first:
            return ProbeResult(probed.n_runs)
        plain = step(())
        if probed.left == plain.left:
            return ProbeResult(probed.n_runs)
        if because := probed.not_put_back and f"{listed(list(probed.not_put_back))} cannot be put back":
            return ProbeResult(not_probed_because=f"The blocks were run again without a result: {because}.")
        if step(()).left != plain.left:
            return ProbeResult(not_probed_because="Two steps of the baseline in clean processes differ.")
        names = probed.units
        while len(names) > 1:
            half = names[: len(names) // 2]
            names = half if step(half, probed.n_runs).left != plain.left else names[len(half) :]
    except Cancelled:
        raise
    except (ExplorerError, MemoryError, OSError) as error:
        return ProbeResult(not_probed_because=f"The probe for hidden state did not run: {said_by(error)}.")
    return ProbeResult(probed.n_runs, names)


def probed_step(candidate: RunSpec, names: tuple[str, ...] | None, report: Report) -> ProbedStep:
    """Two steps of the baseline. Between them the units `names` of the candidate are recomputed; None: every unit."""
    try:
        with preserve_global_state(), deterministic_kernels(), without_tf32():
            trainee = prepare(msgspec.structs.replace(candidate, policy=KEEP_ALL))
            return _two_steps(trainee, candidate.policy, names)
    except ExplorerError:
        raise
    except Exception as error:  # a block may raise anything when it runs by itself
        raise ModelFailed(said_by(error)) from error


def _two_steps(trainee: Trainee, policy: Policy, names: tuple[str, ...] | None) -> ProbedStep:
    model, batch = trainee.model, copy_batch((trainee.inputs, trainee.targets))
    before = read_state(model, whole=True)
    replaced = [(module, vars(module).pop("forward")) for module in model.modules() if "forward" in vars(module)]
    found, start = StepSnapshot(model, lambda: None), SharedSnapshot(model)  # no walk sees into a replaced forward
    _set_forward(replaced)
    stand_in = _StandIn(trainee)
    with stand_in.recording(), apply_policy(model, policy):
        began = time.perf_counter()
        first = _left(trainee, forward_backward(trainee, stand_in.on_phase))
        seconds = max(time.perf_counter() - began, _LEAST_S)
        calls = [call for call in stand_in.calls if call.is_needed and (names is None or call.name in names)]
        n_runs = _recompute(calls, trainee, seconds) if calls else 0
    recomputed = tuple(dict.fromkeys(call.name for call in calls))
    del calls, stand_in
    found.restore()
    _set_forward(replaced)
    start.restore()
    trainee.inputs, trainee.targets = batch
    after = read_state(model, whole=True)
    moved = [key for key in {**before, **after} if not same_state(before.get(key), after.get(key))]
    left = _left(trainee, forward_backward(trainee))
    return ProbedStep(first, left, recomputed, n_runs, tuple(f"{fqn}.{name}".lstrip(".") for fqn, name, _ in moved))


class _Stop(Exception):
    """Ends a recompute at the last tensor that it has to make."""


@dataclass(eq=False)
class _Call:
    """One call of a unit in forward, with all that a recompute needs."""

    wrap: Wrap
    function: Callable[..., object]
    modules: Sequence[nn.Module]
    inputs: object
    """Copies of arguments and keyword arguments."""
    rng: RngState
    is_needed: bool
    """Whether backward reads a tensor that the call saved."""
    n_saved: int = 0

    @property
    def name(self) -> str:
        return " to ".join(dict.fromkeys((self.wrap.unit.blocks[0], self.wrap.unit.blocks[-1])))

    def recompute(self) -> None:
        """Runs the unit as its policy does in backward."""
        policy, n_left = self.wrap.policy, self.n_saved

        def pack(tensor: Tensor) -> Tensor:
            nonlocal n_left
            n_left -= 1
            if not n_left and policy.stops_early:
                raise _Stop
            return without_operation(tensor)

        self.rng.restore()
        with (
            suppress(_Stop),
            torch.set_grad_enabled(not policy.use_reentrant),
            Recomputing(self.modules),
            saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            # A copy of a copy is no leaf, so that a unit may write into its input.
            args, kwargs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, self.inputs)
            self.function(*args, **kwargs)


class _StandIn:
    """Stands in for torch.utils.checkpoint: units run without it, and their calls in the first forward are kept."""

    def __init__(self, trainee: Trainee) -> None:
        self.calls: list[_Call] = []
        self._model = trainee.model
        self._open: list[_Call] = []
        self._is_first_forward = True

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The context around a policy and its steps."""
        with_checkpoint, units._run = units._run, self._run
        try:
            yield
        finally:
            units._run = with_checkpoint

    def on_phase(self, phase: Phase) -> None:
        self._is_first_forward = self._is_first_forward and phase == "forward"

    def _run(
        self, wrap: Wrap, function: Callable[..., object], modules: Sequence[nn.Module], args: Any, kwargs: Any
    ) -> object:
        if not self._is_first_forward or wrap.unit.action == "offload" or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        call = _Call(
            wrap,
            function,
            modules,
            copy_batch((args, kwargs)),
            RngState.capture(self._model),
            wrap.policy.use_reentrant,
        )
        self.calls.append(call)
        self._open.append(call)
        try:
            with nullcontext() if len(self._open) > 1 else saved_tensors_hooks(self._pack, _unpack):
                return function(*args, **kwargs)
        finally:
            self._open.pop()

    def _pack(self, tensor: Tensor) -> tuple[tuple[_Call, ...], Tensor]:
        """A tensor of a nested unit counts for the units around it too: they make the unit's input."""
        for call in self._open:
            call.n_saved += 1
        return tuple(self._open), without_operation(tensor)


def _unpack(packed: tuple[tuple[_Call, ...], Tensor]) -> Tensor:
    for call in packed[0]:
        call.is_needed = True
    return packed[1]


def _recompute(calls: Sequence[_Call], trainee: Trainee, seconds: float) -> int:
    """Recomputes each call as often as the spec asks or time allows, and returns the number of rounds."""
    asked, end, n = trainee.spec.n_probes, time.perf_counter() + seconds, 0
    with autocast(trainee):
        while n < (asked or MOST) and (asked or n < FEWEST or time.perf_counter() < end):
            for call in reversed(calls):
                call.recompute()
            n += 1
    return n


def _left(trainee: Trainee, loss: float) -> Fingerprints:
    """Fingerprint of each tensor and generator after backward, before the optimizer, which no block influences."""
    model, batches = trainee.model, {"inputs": trainee.inputs, "targets": trainee.targets}
    tensors: Iterator[tuple[str, Tensor | None]] = itertools.chain(
        model.named_parameters(),
        model.named_buffers(),
        ((f"gradient of {name}", parameter.grad) for name, parameter in model.named_parameters()),
        ((f"gradient of {name}", gradient) for name, gradient in input_gradients(batches)),
    )
    left = {name: b"" if tensor is None else fingerprint(tensor) for name, tensor in tensors}
    return left | RngState.capture(model).positions() | {"loss": repr(loss).encode()}


def _set_forward(replaced: list[tuple[nn.Module, object]]) -> None:
    for module, forward in replaced:
        vars(module)["forward"] = forward
