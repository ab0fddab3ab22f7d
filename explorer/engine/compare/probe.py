"""Probes for hidden state: does the next step change if the units of a policy are recomputed more often?

    clean process ─▶ model ─▶ step, which keeps the inputs of the units
                           ─▶ each unit is recomputed, twice on each of several inputs ─▶ step

If the two steps differ, two more processes run each unit once on each of the same inputs, as training without a policy
does. If their second steps differ from the probed one, a unit remembers its calls in a file, an installed package or an
iterator. Halving finds the unit. Every other input is the unit's own, scaled: a history of maxima (scaling of float8)
does not move if a unit repeats equal inputs. Both sides may agree because an effect of a third call has begun on both.
The unit's own inputs are then repeated, and the other side recomputes nothing.
An effect may pass (every eighth call): the steps are equal and two recomputes are not. Real steps of baseline and
candidate then decide. Of equal units that can remember nothing (equal_units.py) one runs in full and the others twice.
Nothing is put back but tensors of the model, generators and batch: state that state_diff.py reads, and that the
recomputes move, explains a finding.

A recompute here runs where a recompute of torch runs: inside a backward, below torch.utils.checkpoint. Code that guards
itself against a recompute is then not accused. It reaches what the policy's recompute reaches: gradients are on and the
unit ends with the last tensor that autograd saved in forward. A unit whose saved tensors no backward reads is not
recomputed. Reentrant checkpointing runs the whole unit twice, without gradients and with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from msgspec.structs import replace
from torch import Tensor, nn

from explorer.engine.bench.step import Trainee, autocast, forward_backward, prepare
from explorer.engine.compare.diffs import fingerprint
from explorer.engine.compare.programs import input_gradients
from explorer.engine.compare.unit_calls import (
    CheckpointStandIn,
    Inputs,
    inside_a_recompute,
    recompute_calls,
    repeated_units,
)
from explorer.engine.device.subprocess_call import call_in_subprocess
from explorer.engine.model.equal_models import copy_batch
from explorer.engine.policy.apply import apply_policy
from explorer.engine.state.bits import storages
from explorer.engine.state.global_state import deterministic_kernels, preserve_global_state, without_tf32
from explorer.engine.state.rng import RngState
from explorer.engine.state.state_diff import State, read_state, same_state
from explorer.errors import Cancelled, ExplorerError, ModelFailed, said_by
from explorer.plan.names import Fqns, is_within
from explorer.plan.why.peak import unit_name
from explorer.record.comparison import Comparison
from explorer.record.plan import Report
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import RunSpec

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
    """Recomputes of each unit, but for `n_twice`."""
    n_twice: int = 0
    """Units that ran twice, because they can remember nothing and equal one that ran more."""
    unlike: tuple[Fqns, ...] = ()
    """Units of which two recomputes made unequal tensors."""
    moved: tuple[str, ...] = ()
    """Blocks with state that the recomputes moved, as far as the walk reads it; the empty string for shared state."""


@dataclass(frozen=True)
class ProbeResult:
    """Blocks that remember their recomputes."""

    n_probes: int = 0
    n_probed_twice: int = 0
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
            n_probed_twice=self.n_probed_twice,
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
    return ProbeResult(probed.n_runs, probed.n_twice, hidden, with_known_state=with_known_state)


def _probed_units(candidate: RunSpec, call: Callable[..., ProbedStep]) -> tuple[ProbedStep, tuple[Fqns, ...]]:
    """The probed step, and a unit whose recomputes change the next step. A model may refuse perturbed inputs."""
    try:
        probed, units = _unit_that_moves_the_step(candidate, call, "perturbed")
        if units or probed.left == probed.first:
            return probed, units
    except ModelFailed:
        pass
    return _unit_that_moves_the_step(candidate, call, "equal")


def _unit_that_moves_the_step(
    candidate: RunSpec, call: Callable[..., ProbedStep], inputs: Inputs
) -> tuple[ProbedStep, tuple[Fqns, ...]]:
    """The probed step, and a unit whose recomputes change the next step, found by halving.

    No unit if the probed step changes nothing, or if a step without recomputes ends like it.
    """

    def step(units: tuple[Fqns, ...] | None) -> ProbedStep:
        return call(probed_step, candidate, units, inputs)

    probed = step(None)
    if probed.left == probed.first:
        return probed, ()
    plain = step(()).left
    if probed.left == plain:
        return probed, ()
    if step(()).left != plain:
        raise ModelFailed("two steps of the baseline in clean processes differ")
    units = probed.units
    while len(units) > 1:
        half = units[: len(units) // 2]
        units = half if step(half).left != plain else units[len(half) :]
    return probed, units


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
    return any(not fqn or is_within(fqn, *unit) for fqn in moved)


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
    stand_in, n_probes = CheckpointStandIn(trainee), trainee.spec.n_probes
    with stand_in.recording(), apply_policy(model, policy):
        first = _left(trainee, forward_backward(trainee, stand_in.on_phase))
    calls = [call for call in stand_in.calls if call.is_needed]
    before = _known_state(model)
    with autocast(trainee):
        twice = repeated_units(calls) if chosen is None and n_probes > 2 else set[Fqns]()
        recompute = partial(recompute_calls, calls, n_probes, chosen, inputs, twice)
        unlike = inside_a_recompute(recompute, trainee.device, use_reentrant=policy.use_reentrant)
    after = _known_state(model)
    moved = dict.fromkeys(key[0] for key in {**before, **after} if not same_state(before.get(key), after.get(key)))
    recomputed = tuple(dict.fromkeys(call.unit for call in calls))
    n_runs = n_probes if calls else 0
    del calls, stand_in, recompute
    for storage, content in contents_of.items():
        storage.copy_(content)
    rng.restore()
    trainee.inputs, trainee.targets = batch
    left = _left(trainee, forward_backward(trainee))
    return ProbedStep(first, left, recomputed, n_runs, len(twice), tuple(unlike), tuple(moved))


def _known_state(model: nn.Module) -> State:
    """State that a comparison names, parameters included."""
    parameters = {name: fingerprint(parameter) for name, parameter in model.named_parameters()}
    return read_state(model, whole=True) | {
        (*name.rpartition(".")[::2], "attribute"): bits for name, bits in parameters.items()
    }


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
