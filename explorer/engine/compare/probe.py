"""Probes for hidden state: does the next step change if the units of a policy are recomputed more often?

    clean process ─▶ model ─▶ step, which keeps the inputs of the units
                           ─▶ each unit is recomputed, twice on each of several inputs ─▶ step

If the two steps differ, two more processes run each unit once on each of the same inputs, as training without a policy
does. If their second steps differ from the probed one, a unit remembers its calls in a file, an installed package or an
iterator. Halving finds the unit. Every other input is the unit's own, scaled: a history of maxima (scaling of float8)
does not move if a unit repeats equal inputs. If both sides agree, the unit's own inputs are repeated and compared with
no recompute at all, because an effect of a third call may have begun on both sides.
An effect may pass (every eighth call): the steps are equal and two recomputes are not. Real steps of baseline and
candidate then decide. Nothing is put back but tensors of the model, generators and batch: state that state_diff.py
reads, and that the recomputes move, explains a finding.

A recompute here runs where a recompute of torch runs: inside a backward, below torch.utils.checkpoint. Code that guards
itself against a recompute is then not accused. It reaches what the policy's recompute reaches: gradients are on and the
unit ends with the last tensor that autograd saved in forward. A unit whose saved tensors no backward reads is not
recomputed. Reentrant checkpointing runs the whole unit twice, without gradients and with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from explorer.engine.bench.step import Trainee, autocast, forward_backward, prepare
from explorer.engine.compare.diffs import fingerprint
from explorer.engine.compare.programs import input_gradients
from explorer.engine.device.subprocess_call import call_in_subprocess
from explorer.engine.model.equal_models import copy_batch
from explorer.engine.policy import units
from explorer.engine.policy.apply import apply_policy
from explorer.engine.policy.units import Recomputing, Wrap
from explorer.engine.state.bits import contents, storages
from explorer.engine.state.global_state import deterministic_kernels, preserve_global_state, without_tf32
from explorer.engine.state.rng import RngState
from explorer.engine.state.state_diff import State, read_state, same_state
from explorer.engine.watch.scopes import without_operation
from explorer.errors import Cancelled, ExplorerError, ModelFailed, said_by
from explorer.plan.names import Fqns, is_within
from explorer.plan.why.peak import unit_name
from explorer.record.allocations import Phase
from explorer.record.comparison import Comparison
from explorer.record.plan import Report
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import RunSpec

_LARGEST = 4.0
"""Power of two by which the first perturbed input is scaled; later ones lie nearer to the unit's own, on both sides.

The largest and the smallest value of a window then differ between windows of any two lengths.
"""
_NOISE = 0.1

Inputs = Literal["perturbed", "equal"]
"""Whether every other input is perturbed and other units run once on each, or other units are not recomputed."""
Fingerprints = Mapping[str, bytes]
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class ProbedStep:
    """Results of two steps of one model: before and after its units are recomputed."""

    first: Fingerprints
    left: Fingerprints
    units: tuple[Fqns, ...] = ()
    """Units that were recomputed between the steps."""
    n_runs: int = 0
    """Recomputes of each unit."""
    unlike: tuple[Fqns, ...] = ()
    """Units of which two recomputes made unequal tensors."""
    moved: tuple[str, ...] = ()
    """Blocks with state that the recomputes moved, as far as the walk reads it; the empty string for shared state."""


@dataclass(frozen=True)
class ProbeResult:
    """Blocks that remember their recomputes."""

    n_probes: int = 0
    hidden_state: tuple[str, ...] = ()
    not_probed_because: str = ""
    with_known_state: tuple[str, ...] = ()
    """Blocks that remember their recomputes and hold state that the recomputes move and the walk reads."""

    def added_to(self, comparison: Comparison) -> Comparison:
        """The judged comparison with the finding. State that the verdict names explains blocks that hold it."""
        unnamed = self.with_known_state if comparison.verdict in ("bitwise equal", "rounding") else ()
        return replace(
            comparison,
            n_probes=self.n_probes,
            hidden_state=(*self.hidden_state, *unnamed),
            not_probed_because=self.not_probed_because,
        )


def probe(baseline: RunSpec, candidate: RunSpec, report: Report) -> ProbeResult:
    """The units of the candidate's policy, which has some, with hidden state. An error becomes a sentence."""
    call = partial(_in_clean_process, report=report)
    try:
        probed, units = _probed_units(candidate, call)
        units = units or _units_that_move_real_steps(baseline, candidate, probed, call)
    except Cancelled:
        raise
    except (ExplorerError, MemoryError, OSError) as error:
        return ProbeResult(not_probed_because=f"The probe for hidden state has no result: {said_by(error)}.")
    names: tuple[list[str], list[str]] = [], []
    for unit in units:
        names[_holds_any(unit, probed.moved)].append(unit_name(unit))
    hidden, with_known_state = map(tuple, names)
    return ProbeResult(probed.n_runs, hidden, with_known_state=with_known_state)


def _probed_units(candidate: RunSpec, call: Callable[..., ProbedStep]) -> tuple[ProbedStep, tuple[Fqns, ...]]:
    """The probed step, and a unit whose recomputes change the next step. A model may refuse perturbed inputs."""
    try:
        probed = call(probed_step, candidate, None, "perturbed")
        if probed.left == probed.first:
            return probed, ()
        if units := _unit_that_moves_the_step(partial(call, probed_step, candidate), probed, "perturbed"):
            return probed, units
    except ModelFailed:
        pass
    probed = call(probed_step, candidate, None, "equal")
    if probed.left == probed.first:
        return probed, ()
    return probed, _unit_that_moves_the_step(partial(call, probed_step, candidate), probed, "equal")


def _unit_that_moves_the_step(
    of_units: Callable[[tuple[Fqns, ...], Inputs], ProbedStep], probed: ProbedStep, inputs: Inputs
) -> tuple[Fqns, ...]:
    """A unit whose recomputes change the next step, found by halving; empty if a step without recomputes is equal."""

    def step(units: tuple[Fqns, ...]) -> ProbedStep:
        return of_units(units, inputs)

    plain = step(()).left
    if probed.left == plain:
        return ()
    if step(()).left != plain:
        raise ModelFailed("two steps of the baseline in clean processes differ")
    units = probed.units
    while len(units) > 1:
        half = units[: len(units) // 2]
        units = half if step(half).left != plain else units[len(half) :]
    return units


def _units_that_move_real_steps(
    baseline: RunSpec, candidate: RunSpec, probed: ProbedStep, call: Callable[..., list[Fingerprints]]
) -> tuple[Fqns, ...]:
    """The units with unequal recomputes, if steps of the candidate differ from those of the baseline."""
    unlike = tuple(unit for unit in probed.unlike if not _holds_any(unit, probed.moved))
    if not unlike:
        return ()
    n_steps = probed.n_runs // 2 + 2  # a step of the candidate is two calls
    first, again, other = (call(real_steps, spec, n_steps) for spec in (baseline, baseline, candidate))
    return unlike if first == again != other else ()


def _holds_any(unit: Fqns, moved: tuple[str, ...]) -> bool:
    """Whether state of a block in the unit moved, or state that all blocks share."""
    return any(not fqn or is_within(fqn, block) for fqn in moved for block in unit)


def _in_clean_process(function: Callable[..., Kind], *arguments: object, report: Report) -> Kind:
    result = call_in_subprocess(function, *arguments, report=report, what="probed for hidden state")
    if result is None:
        raise MemoryError("the system ended its process for lack of memory")
    return result


def real_steps(spec: RunSpec, n_steps: int, report: Report) -> list[Fingerprints]:
    """What each of `n_steps` steps leaves, without an optimizer."""
    with _judged():
        trainee = prepare(spec)
        return [_left(trainee, forward_backward(trainee)) for _ in range(n_steps)]


def probed_step(candidate: RunSpec, chosen: tuple[Fqns, ...] | None, inputs: Inputs, report: Report) -> ProbedStep:
    """Two steps of the baseline. Between them the `chosen` units of the candidate are recomputed; None: every unit."""
    with _judged():
        trainee = prepare(replace(candidate, policy=KEEP_ALL))
        return _two_steps(trainee, candidate.policy, chosen, inputs)


@contextmanager
def _judged() -> Iterator[None]:
    """The settings of judged steps. A block may raise anything when it runs by itself."""
    try:
        with preserve_global_state(), deterministic_kernels(), without_tf32():
            yield
    except ExplorerError:
        raise
    except Exception as error:
        raise ModelFailed(said_by(error)) from error


def _two_steps(trainee: Trainee, policy: Policy, chosen: tuple[Fqns, ...] | None, inputs: Inputs) -> ProbedStep:
    model, batch, rng = trainee.model, copy_batch((trainee.inputs, trainee.targets)), RngState.capture(trainee.model)
    contents_of = {storage: storage.clone() for t in (*model.parameters(), *model.buffers()) for storage in storages(t)}
    stand_in = _StandIn(trainee)
    with stand_in.recording(), apply_policy(model, policy):
        first = _left(trainee, forward_backward(trainee, stand_in.on_phase))
    calls = [call for call in stand_in.calls if call.is_needed]
    before = _known_state(model)
    with autocast(trainee):
        recompute = partial(_recompute, calls, trainee.spec.n_probes, chosen, inputs)
        unlike = _inside_a_recompute(recompute, trainee.device, use_reentrant=policy.use_reentrant)
    after = _known_state(model)
    moved = dict.fromkeys(key[0] for key in {**before, **after} if not same_state(before.get(key), after.get(key)))
    recomputed = tuple(dict.fromkeys(call.unit for call in calls))
    n_runs = trainee.spec.n_probes if calls else 0
    del calls, stand_in, recompute
    for storage, content in contents_of.items():
        storage.copy_(content)
    rng.restore()
    trainee.inputs, trainee.targets = batch
    left = _left(trainee, forward_backward(trainee))
    return ProbedStep(first, left, recomputed, n_runs, tuple(unlike), tuple(moved))


def _known_state(model: nn.Module) -> State:
    """State that a comparison names, parameters included."""
    parameters = {name: fingerprint(parameter) for name, parameter in model.named_parameters()}
    return read_state(model, whole=True) | {
        (*name.rpartition(".")[::2], "attribute"): bits for name, bits in parameters.items()
    }


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
    def unit(self) -> Fqns:
        return self.wrap.unit.blocks

    def recompute(self, number: int | None = None) -> list[Tensor]:
        """Runs the unit as its policy does in backward, on perturbed inputs if a `number` is given.

        Returns sums over the bits of all tensors that the unit makes.
        """
        reentrant = self.wrap.policy.use_reentrant
        inputs = self.inputs if number is None else tree_map(partial(_perturbed, number), self.inputs)
        return [part for grad in ((False, True) if reentrant else (True,)) for part in self._run(inputs, grad)]

    def _run(self, inputs: Any, grad: bool) -> list[Tensor]:
        n_left, sums = self.n_saved, list[Tensor]()

        def pack(tensor: Tensor) -> Tensor:
            nonlocal n_left
            n_left -= 1
            sums.extend(map(_sum, contents(tensor)))
            if not n_left and self.wrap.policy.stops_early:
                raise _Stop
            return without_operation(tensor)

        self.rng.restore()
        hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
        with suppress(_Stop), torch.set_grad_enabled(grad), Recomputing(self.modules), hooks:
            # A copy of a copy is no leaf, so that a unit may write into its input.
            args, kwargs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs)
            output = self.function(*args, **kwargs)
            sums += [_sum(bits) for leaf in tree_leaves(output) if isinstance(leaf, Tensor) for bits in contents(leaf)]
        return sums


def _perturbed(number: int, leaf: object) -> object:
    """A floating tensor scaled, up and down in turns, with noise; zeros and infinities stay. Other leaves unchanged."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.layout != torch.strided:
        return leaf
    power = _LARGEST / (number + 1) * (-1) ** number
    noise = torch.rand(leaf.shape, generator=torch.Generator().manual_seed(number)).to(leaf.device)
    with torch.no_grad():
        scaled = leaf * (2.0**power * (1 + _NOISE * (noise - 0.5))).to(leaf.dtype)
    return scaled.requires_grad_(leaf.requires_grad)


def _sum(bits: Tensor) -> Tensor:
    return bits.sum(dtype=torch.int32)  # overflow is no harm, and torch sums wider integers ten times slower


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
        inputs, rng = copy_batch((args, kwargs)), RngState.capture(self._model)
        call = _Call(wrap, function, modules, inputs, rng, wrap.policy.use_reentrant)
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


def _inside_a_recompute(work: Callable[[], Kind], device: torch.device, *, use_reentrant: bool) -> Kind:
    """Calls `work` where torch runs a block again: in a backward, below the functions of torch.utils.checkpoint."""
    is_forward, results = True, list[Kind]()

    def region(value: Tensor) -> Tensor:
        nonlocal is_forward
        if not is_forward:
            with torch.no_grad():  # the region's own hooks must see none of the saved tensors
                results.append(work())
        is_forward = False
        return value.sin()

    value = torch.ones((), device=device, requires_grad=True)
    checkpoint(region, value, use_reentrant=use_reentrant).backward()
    return results[0]


def _recompute(
    calls: Sequence[_Call], n_runs: int, chosen: tuple[Fqns, ...] | None, inputs: Inputs
) -> dict[Fqns, None]:
    """Recomputes each call of the `chosen` units `n_runs` times, two times in turn on the same inputs.

    Calls of other units run once on each input, or not at all if no input is perturbed. Returns the units with unequal
    recomputes of equal inputs.
    """
    first: dict[tuple[_Call, int | None], list[int]] = {}
    unlike: dict[Fqns, None] = {}
    for n in range(n_runs):
        i = n // 2
        number = i // 2 if inputs == "perturbed" and i % 2 else None
        for call in reversed(calls):
            is_chosen = chosen is None or call.unit in chosen
            if not is_chosen and (inputs == "equal" or n % 2):
                continue
            sums = [int(part) for part in call.recompute(number)]
            if first.setdefault((call, number), sums) != sums:
                unlike[call.unit] = None
    return unlike


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
