"""Probes for hidden state: does the next step change if a block runs more often?

    clean process ─▶ model ─▶ step, which keeps the inputs of the blocks
                           ─▶ each block runs again on its inputs, all known state is put back ─▶ step

If the two steps differ, two more processes run the two steps without running a block again. If their second steps
differ from the probed one, a block remembers its calls in a file, an installed package or an iterator. Halving finds
the block. module_state.py reads state that the walk reaches; this probe finds state that the walk cannot reach.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor, nn

from explorer.engine.bench.step import Trainee, autocast, forward_backward, prepare
from explorer.engine.compare.outcome import fingerprint
from explorer.engine.compare.programs import hooked, input_gradients
from explorer.engine.device.subprocess_call import call_in_subprocess
from explorer.engine.model.separate_copy import copy_batch
from explorer.engine.policy.units import Recomputing
from explorer.engine.state.global_state import deterministic_kernels, preserve_global_state, without_tf32
from explorer.engine.state.rng import RngState
from explorer.engine.state.snapshot import SharedSnapshot, StepSnapshot
from explorer.engine.state.state_diff import read_state, same_state
from explorer.errors import Cancelled, ExplorerError, ModelFailed, said_by
from explorer.plan.names import listed
from explorer.record.allocations import Phase
from explorer.record.plan import Report
from explorer.record.run import RunSpec

FEWEST, MOST = 4, 64
"""Bounds of the runs of a block if the spec gives no number: as many runs as fit into the time of one step."""
_LEAST_S = 0.5
"""Least time for the runs of all blocks, for steps that are shorter."""

Fingerprints = Mapping[str, bytes]
Calls = list[tuple[nn.Module, object]]


@dataclass(frozen=True)
class ProbedStep:
    """Results of two steps of one model: before and after its blocks run again."""

    first: Fingerprints
    left: Fingerprints
    n_runs: int = 0
    """Runs of each block between the steps."""
    not_put_back: tuple[str, ...] = ()
    """State that the walk knows, that the runs moved and that could not be put back: the comparison covers it."""


@dataclass(frozen=True)
class ProbeResult:
    """The fields of a Comparison on hidden state."""

    n_probes: int = 0
    hidden_state: tuple[str, ...] = ()
    not_probed_because: str = ""


def probe(baseline: RunSpec, candidate: RunSpec, report: Report) -> ProbeResult:
    """The blocks of the candidate's policy with hidden state. An error becomes a sentence."""
    blocks = tuple(dict.fromkeys(block for unit in candidate.policy.units for block in unit.blocks))
    if not blocks or baseline.forward_only:
        return ProbeResult()

    def step(names: tuple[str, ...], n_runs: int = 0) -> ProbedStep:
        spec = msgspec.structs.replace(baseline, n_probes=n_runs or baseline.n_probes)
        taken = call_in_subprocess(probed_step, spec, names, blocks, report=report, what="probed for hidden state")
        if taken is None:
            raise MemoryError("the system ended its process for lack of memory")
        return taken

    try:
        probed = step(blocks)
        if probed.left == probed.first:
            return ProbeResult(probed.n_runs)
        plain = step(())
        if probed.left == plain.left:
            return ProbeResult(probed.n_runs)
        if because := probed.not_put_back and f"{listed(list(probed.not_put_back))} cannot be put back":
            return ProbeResult(not_probed_because=f"The blocks were run again without a result: {because}.")
        if step(()).left != plain.left:
            return ProbeResult(not_probed_because="Two steps of the baseline in clean processes differ.")
        while len(blocks) > 1:
            half = blocks[: len(blocks) // 2]
            blocks = half if step(half, probed.n_runs).left != plain.left else blocks[len(half) :]
    except Cancelled:
        raise
    except (ExplorerError, MemoryError, OSError) as error:
        return ProbeResult(not_probed_because=f"The probe for hidden state did not run: {said_by(error)}.")
    return ProbeResult(probed.n_runs, blocks)


def probed_step(spec: RunSpec, blocks: tuple[str, ...], kept: tuple[str, ...], report: Report) -> ProbedStep:
    """Two steps of one model. Each of `blocks` runs again in between; the first step keeps the inputs of all `kept`."""
    try:
        with preserve_global_state(), deterministic_kernels(), without_tf32():
            trainee = prepare(spec)
            return _two_steps(trainee, blocks, kept)
    except ExplorerError:
        raise
    except Exception as error:  # a block may raise anything when it runs by itself
        raise ModelFailed(said_by(error)) from error


def _two_steps(trainee: Trainee, blocks: tuple[str, ...], kept: tuple[str, ...]) -> ProbedStep:
    model, batch = trainee.model, copy_batch((trainee.inputs, trainee.targets))
    before = read_state(model, whole=True)
    replaced = [(module, vars(module).pop("forward")) for module in model.modules() if "forward" in vars(module)]
    found, start = StepSnapshot(model, lambda: None), SharedSnapshot(model)  # no walk sees into a replaced forward
    _set_forward(replaced)
    began = time.perf_counter()
    first, calls = _first_step(trainee, kept)
    seconds = max(time.perf_counter() - began, _LEAST_S)
    again = [(module, inputs) for fqn in blocks for module, inputs in calls[fqn]]
    n_runs = _run(again, trainee, seconds) if again else 0
    del calls, again
    found.restore()
    _set_forward(replaced)
    start.restore()
    trainee.inputs, trainee.targets = batch
    after = read_state(model, whole=True)
    moved = [key for key in {**before, **after} if not same_state(before.get(key), after.get(key))]
    left = _left(trainee, forward_backward(trainee))
    return ProbedStep(first, left, n_runs, tuple(f"{fqn}.{name}".lstrip(".") for fqn, name, _ in moved))


def _first_step(trainee: Trainee, fqns: tuple[str, ...]) -> tuple[Fingerprints, dict[str, Calls]]:
    """Runs the step; returns its fingerprints and, by block, each call of the first forward with copied inputs."""
    calls: dict[str, Calls] = {fqn: [] for fqn in fqns}
    modules = dict(trainee.model.named_modules())
    forward = True

    def keep(fqn: str) -> object:
        def hook(module: nn.Module, args: object, kwargs: object) -> None:
            if forward:
                calls[fqn].append((module, copy_batch((args, kwargs))))

        return hook

    def on_phase(phase: Phase) -> None:
        nonlocal forward
        forward = forward and phase == "forward"

    with hooked(*(modules[fqn].register_forward_pre_hook(keep(fqn), with_kwargs=True) for fqn in fqns)):
        loss = forward_backward(trainee, on_phase)
    return _left(trainee, loss), calls


def _run(calls: Calls, trainee: Trainee, seconds: float) -> int:
    """Runs each forward without hooks, as a recompute does, and returns the number of rounds."""
    asked, end, n = trainee.spec.n_probes, time.perf_counter() + seconds, 0
    with torch.no_grad(), autocast(trainee):
        while n < (asked or MOST) and (asked or n < FEWEST or time.perf_counter() < end):
            for module, inputs in calls:
                args, kwargs = copy_batch(inputs)
                with Recomputing((module,)):
                    module.forward(*args, **kwargs)
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
