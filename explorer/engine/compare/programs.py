"""Compares two programs over the same parameters, as `compare` compares two policies.

    reference ─▶ reference again ─▶ reference in float64 ─▶ candidate
                 └ noise floor      └ rounding

Each run is `step_program.take_steps`, from the state before the comparison.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from explorer.engine.compare.carried import carried, n_looked_at, names, unstable
from explorer.engine.compare.compare import side_by_side
from explorer.engine.compare.diffs import is_floating
from explorer.engine.compare.forwards import Forwards, forward_difference
from explorer.engine.compare.outcome import Outcome, Yardsticks, not_reproducible_because, same_gradients
from explorer.engine.compare.reference import does_not_run, epsilon_of, most_common_type, too_far
from explorer.engine.compare.same_draws import SameDraws
from explorer.engine.compare.step_program import StepProgram, hooked, put_back, take_steps
from explorer.engine.model.plain_names import plain_modules
from explorer.engine.state.snapshot import ModelSnapshot, OptimizerSnapshot
from explorer.engine.state.state_diff import State, StateKey, same_state
from explorer.engine.watch.checkpoint_error import failure_in_words
from explorer.engine.watch.uncompiled import compiler_off
from explorer.record.comparison import ForwardDiff, ParameterDiff


def judged_programs(reference: StepProgram, candidate: StepProgram) -> dict[str, Any]:
    """The fields of a Comparison. An error of the reference passes through; the candidate's becomes `failure`."""
    starts = [program.state() for program in (reference, candidate)]
    with ExitStack() as leaving:
        programs = (reference, candidate)
        models = [leaving.enter_context(ModelSnapshot(program.model, _own(program.model))) for program in programs]
        reference, candidate = (replace(program, found=models, optimizers=reference.optimizers) for program in programs)
        leaving.callback(_leave, reference.optimizers)
        base = take_steps(reference)
        with _formats() as formats:
            rerun = take_steps(reference, like=base)
        because, own = not_reproducible_because(base, rerun), unstable(base, rerun)
        fields: dict[str, Any] = {"reproducible": not because, "not_reproducible_because": because}
        epsilon = epsilon_of(base.gradients, formats)
        exact, no_reference = _in_float64(reference, base, epsilon)
        fields |= {"reference": "float64" if exact else "none", "no_reference_because": no_reference}
        try:
            cand = take_steps(candidate, lead=base)
        except Exception as error:  # a user's program may raise anything
            return {**fields, "failure": failure_in_words(error, candidate.model)}
        if not same_gradients(base, cand):
            fields |= {"forward": _forwards(reference, candidate), "untied": _untied(reference, candidate)}
    yardsticks = Yardsticks(epsilon, rerun if because else base, exact)
    apart = _of_one_alone(*starts)
    for outcome in (base, cand):
        outcome.buffers = {key: value for key, value in outcome.buffers.items() if key not in names(apart)}
    moved = {key for key in apart if any(_moves(outcome, start, key) for outcome, start in zip((base, cand), starts))}
    fields |= {"unjudged": names(own | moved), "n_carried": n_looked_at(base) - len(own | apart)}
    fields["carried"] = carried(base, cand, yardsticks, own | apart)
    fields |= side_by_side(base, cand, yardsticks)
    return fields | {"parameters": _by_themselves(fields, base), "loss_equal": _equal_losses(base, cand)}


def _forwards(reference: StepProgram, candidate: StepProgram) -> ForwardDiff | None:
    """The forward difference, from one watched step of each; None if either program is compiled or fails."""
    sides = []
    for program in (reference, candidate):
        if _is_compiled(program):
            return None
        forwards = Forwards(program.model)
        try:
            batch = put_back(program)
            with forwards.watching():
                program.step(program.model, batch)
        except Exception:  # a hook may fail in a compiled or sharded model: the verdict does not need this evidence
            return None
        sides.append(forwards)
    return forward_difference(*sides)


def _is_compiled(program: StepProgram) -> bool:
    modules = list(program.model.modules())
    return any(hasattr(thing, "_torchdynamo_orig_callable") for thing in (program.step, *modules)) or any(
        module._compiled_call_impl is not None for module in modules
    )


def _untied(*programs: StepProgram) -> tuple[str, ...]:
    """Names that share a parameter in one program alone."""
    groups: list[set[frozenset[str]]] = []
    for program in programs:
        by_identity: dict[int, list[str]] = defaultdict(list)
        for name, parameter in program.named().items():
            by_identity[id(parameter)].append(name)
        groups.append({frozenset(names) for names in by_identity.values() if len(names) > 1})
    return tuple(sorted({name for group in groups[0] ^ groups[1] for name in group}))


def _leave(optimizers: dict[int, OptimizerSnapshot]) -> None:
    for optimizer in optimizers.values():
        optimizer.close()


def _by_themselves(fields: dict[str, Any], base: Outcome) -> tuple[ParameterDiff, ...]:
    """The parameter differences with `gradients_round` corrected for optimizers that got equal gradients.

    Rounding of gradients explains a parameter difference only in a step without an optimizer of torch.
    """
    unequal = {diff.name for diff in (*fields["gradients"], *fields["later_gradients"]) if not diff.bitwise}
    return tuple(
        msgspec.structs.replace(
            diff, gradients_round=not base.stepped and diff.gradients_round and diff.name in unequal
        )
        for diff in fields["parameters"]
    )


def _equal_losses(base: Outcome, cand: Outcome) -> bool | None:
    """Whether the losses are equal; None if either step returned no loss."""
    return None if math.isnan(base.loss) or math.isnan(cand.loss) else base.loss == cand.loss


def _in_float64(reference: StepProgram, base: Outcome, epsilon: float) -> tuple[Outcome | None, str]:
    if any(hasattr(parameter, "full_tensor") for parameter in reference.model.parameters()):
        return (
            None,
            "The model is sharded: FSDP gathers parameters in the type in which it sharded them, not in float64.",
        )
    exact = replace(reference, dtype=torch.float64)
    try:
        with compiler_off(), SameDraws(most_common_type(base.gradients)):
            outcome = take_steps(exact, lead=base)
    except Exception as error:  # a type written into the step, a kernel without float64
        return None, does_not_run(error)
    because = too_far(outcome, base, epsilon)
    return (None, because) if because else (outcome, "")


@contextmanager
def _formats() -> Iterator[set[torch.dtype]]:
    """Floating types of the outputs of all modules inside: outputs show autocast, gradients do not."""
    seen: set[torch.dtype] = set()

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and is_floating(leaf))
        seen.update(leaf.dtype for leaf in leaves)

    with hooked(register_module_forward_hook(look)):
        yield seen


def _of_one_alone(one: State, other: State) -> set[StateKey]:
    """Keys that only one model has, or whose start values differ: they come from the code, not from training."""
    return {key for key in one.keys() | other.keys()
            if key not in one or key not in other or not same_state(one[key], other[key])}  # fmt: skip


def _moves(outcome: Outcome, start: State, key: StateKey) -> bool:
    return key in start and any(not same_state(start[key], state.get(key)) for state in outcome.states)


def _own(model: nn.Module) -> list[nn.Module]:
    return list({id(module): module for _, module in plain_modules(model)}.values())
