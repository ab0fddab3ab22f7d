"""Hidden state that no list names: does a block that runs more often leave another step behind?

    clean process ─▶ model, one forward that keeps the inputs of the blocks ─▶ all known state put back ─▶ step
    clean process ─▶ the same, and each block runs again on its inputs      ─▶ all known state put back ─▶ step

The two steps are equal bit by bit, or a block remembers its calls in a place that no walk reaches: a file, an installed
package, a closure of torch's, an iterator. Halving finds the block. Apart from module_state.py, which reads the state
that has a name. Each step has a process of its own, because such state outlives a model.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from explorer.engine.compare.outcome import Outcome, fingerprint, take
from explorer.engine.compare.step_program import hooked
from explorer.engine.device.apart import apart
from explorer.engine.device.tf32 import without_tf32
from explorer.engine.model.loaded import call
from explorer.engine.model.twin import own_batch
from explorer.engine.policy.recompute import RunningAgain
from explorer.engine.step import Trainee, autocast, prepare
from explorer.engine.world.as_found import left_as_found
from explorer.engine.world.at_first import AtFirst
from explorer.engine.world.determinism import deterministic_kernels
from explorer.engine.world.found_step import FoundState
from explorer.engine.world.images import same_state
from explorer.engine.world.remembered import read_state
from explorer.errors import Cancelled, ExplorerError, ModelFailed, said_by
from explorer.plan.names import listed
from explorer.record.plan import Report
from explorer.record.run import RunSpec

FEWEST, MOST = 4, 64
"""Runs of a block where nothing else is asked: between the two, as many as the time of one step allows."""
_LEAST_S = 1.0
"""Time that the runs of all blocks may take even where a step is shorter."""


@dataclass(frozen=True)
class ProbedStep:
    """What one step leaves behind, after its blocks ran again."""

    left: Mapping[str, bytes]
    """Fingerprint of each tensor and generator."""
    seconds: float = 0.0
    n_runs: int = 0
    """Fewest runs of a block before the step."""
    not_put_back: tuple[str, ...] = ()
    """Names that the walk knows, moved by the runs and not put back: the comparison holds those against each other."""


def probe(baseline: RunSpec, candidate: RunSpec, report: Report) -> dict[str, Any]:
    """Fields of a Comparison: `n_probes`, `hidden_state`, `not_probed_because`. What the probe raises is a sentence."""
    blocks = tuple(dict.fromkeys(block for unit in candidate.policy.units for block in unit.blocks))
    if not blocks or baseline.forward_only:
        return {}

    def step(names: tuple[str, ...], seconds: float = 0.0) -> ProbedStep:
        taken = apart(probed_step, baseline, names, blocks, seconds, report=report, what="probed for hidden state")
        if taken is None:
            raise MemoryError("the system ended its process for lack of memory")
        return taken

    try:
        plain = step(())
        probed = step(blocks, plain.seconds)
        if probed.left == plain.left:
            return {"n_probes": probed.n_runs}
        if because := probed.not_put_back and f"{listed(list(probed.not_put_back))} cannot be put back":
            return {"not_probed_because": f"The blocks were run again without a result: {because}."}
        if step(()).left != plain.left:
            return {"not_probed_because": "Two steps of the baseline in clean processes differ."}
        while len(blocks) > 1:
            half = blocks[: len(blocks) // 2]
            blocks = half if step(half, plain.seconds).left != plain.left else blocks[len(half) :]
    except Cancelled:
        raise
    except (ExplorerError, MemoryError, OSError) as error:
        return {"not_probed_because": f"The probe for hidden state did not run: {said_by(error)}."}
    return {"n_probes": probed.n_runs, "hidden_state": blocks}


def probed_step(
    spec: RunSpec, blocks: tuple[str, ...], kept: tuple[str, ...], seconds: float, report: Report
) -> ProbedStep:
    """One step of a build of its own. Before it, each of `blocks` runs again on its inputs, which `kept` all keep.

    `seconds` is the time of a step.
    """
    try:
        with left_as_found(), deterministic_kernels(), without_tf32():
            trainee = prepare(spec)
            n_runs, not_put_back = _run_again(trainee, blocks, kept, max(seconds, _LEAST_S))
            began = time.perf_counter()
            outcome = take(trainee)
            return ProbedStep(_left(outcome), time.perf_counter() - began, n_runs, not_put_back)
    except ExplorerError:
        raise
    except Exception as error:  # whatever a block raises that runs by itself
        raise ModelFailed(said_by(error)) from error


def _run_again(
    trainee: Trainee, blocks: tuple[str, ...], kept: tuple[str, ...], seconds: float
) -> tuple[int, tuple[str, ...]]:
    """Fewest runs of a block, and the names of what could not be put back."""
    model = trainee.model
    replaced = [(module, vars(module).pop("forward")) for module in model.modules() if "forward" in vars(module)]
    found, start = FoundState(model, _nothing), AtFirst(model)  # of a replaced forward no walk sees the inside
    _set_forward(replaced)
    before = read_state(model, whole=True)
    fewest = 0
    with torch.no_grad(), autocast(trainee):
        calls = [(fqn, module, inputs) for fqn, module, inputs in _calls(trainee, kept) if fqn in blocks]
        runs = [_run(module, inputs, trainee.spec.n_probes, seconds / len(calls)) for _, module, inputs in calls]
        fewest = min(runs, default=0)
        del calls
    found.put_back()
    _set_forward(replaced)
    start.put_back()
    after = read_state(model, whole=True)
    keys = [key for key in {**before, **after} if not same_state(before.get(key), after.get(key))]
    return fewest, tuple(f"{fqn}.{name}".lstrip(".") for fqn, name, _ in keys)


def _calls(trainee: Trainee, fqns: tuple[str, ...]) -> list[tuple[str, nn.Module, Any]]:
    """Each call of the blocks in one forward, with a copy of its inputs."""
    calls: list[tuple[str, nn.Module, Any]] = []
    modules = dict(trainee.model.named_modules())

    def keep(fqn: str) -> Any:
        return lambda module, args, kwargs: calls.append((fqn, module, own_batch((args, kwargs))))

    with hooked(*(modules[fqn].register_forward_pre_hook(keep(fqn), with_kwargs=True) for fqn in fqns)):
        call(trainee.model, next(iter(trainee.microbatches()))[0])
    return calls


def _run(module: nn.Module, inputs: Any, n_asked: int, seconds: float) -> int:
    """Runs the forward alone, as a recompute does: hooks of the block itself run once in a step."""
    end, n = time.perf_counter() + seconds, 0
    while n < (n_asked or MOST) and (n_asked or n < FEWEST or time.perf_counter() < end):
        args, kwargs = own_batch(inputs)
        with RunningAgain((module,)):
            module.forward(*args, **kwargs)
        n += 1
    return n


def _left(outcome: Outcome) -> dict[str, bytes]:
    families = ("gradients", "input_gradients", "later_gradients", "buffers", "parameters")
    tensors: dict[str, Tensor | None] = {
        f"{family} {name}": tensor for family in families for name, tensor in getattr(outcome, family).items()
    }
    tensors["output"] = outcome.eval_output
    return {name: b"" if tensor is None else fingerprint(tensor) for name, tensor in tensors.items()} | outcome.rng


def _set_forward(replaced: list[tuple[nn.Module, Any]]) -> None:
    for module, forward in replaced:
        vars(module)["forward"] = forward


def _nothing() -> None:
    """A step that reaches nothing beside the model."""
