"""From a RunSpec with a plan to stages that can run: the model's own blocks, cut along its tape.

Every process that builds the same spec gets the same stages: weights, boundaries and seeds depend on the spec alone.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from explorer.engine.bench.step import Trainee, autocast, prepare
from explorer.engine.model.load import load_for
from explorer.engine.model.loaded import Loaded, blaming, call
from explorer.engine.policy.apply import PolicyHandle, apply_policy
from explorer.engine.state.bits import tensor_leaves
from explorer.engine.state.snapshot import held_by
from explorer.errors import ExplorerError, InvalidPlan, message_of
from explorer.pipeline.engine.microbatches import KeyedRng, microbatches
from explorer.pipeline.engine.stages import StageModule, StagePart, cut_tape, divide_policy, rebuild_output, segment_of
from explorer.pipeline.engine.tape import Tape, record
from explorer.pipeline.plan.actions import Action, Rows, stage_ranks
from explorer.pipeline.plan.clock import is_checkpointed
from explorer.pipeline.plan.schedules import rows_of
from explorer.pipeline.record.step import Stage
from explorer.plan.names import is_within
from explorer.record.failure import is_out_of_memory
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import PipelinePlan, RunSpec


@dataclass
class Pipeline:
    """A model cut into stages, with its batch cut into microbatches."""

    spec: RunSpec
    plan: PipelinePlan
    rows: Rows
    trainee: Trainee
    tape: Tape
    parts: tuple[StagePart, ...]
    modules: tuple[StageModule, ...]
    batches: list[tuple[tuple[Tensor, ...], object]]
    """By microbatch: the tensors of the inputs, and the targets."""
    owners: dict[str, list[tuple[int, nn.Parameter]]]
    """By full name: each stage that holds the parameter, with the stage's handle. Tied parameters have several."""
    rng: KeyedRng
    policy: Policy
    """Policy on the whole model. Segments over several blocks are on their stages instead."""
    initial: dict[str, Tensor]
    """Buffers before the first pass, by full name."""
    under_way: Action | None = None
    """The running action, or the action that raised."""
    _handle: PolicyHandle | None = field(default=None, repr=False)

    @property
    def n_microbatches(self) -> int:
        return self.plan.n_microbatches

    @cached_property
    def rank_of(self) -> dict[int, int]:
        return stage_ranks(self.rows)

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, home in self.rank_of.items() if home == rank]

    def static_bytes(self, rank: int) -> int:
        """Parameters and buffers of the rank's stages."""
        return sum(map(self._stage_bytes, self.stages_of(rank)))

    def _stage_bytes(self, stage: int) -> int:
        """Parameters and buffers of the stage, each storage once. The last stage has those of the loss, too."""
        storages = _storages((self.modules[stage],))
        if self.parts[stage].is_last:
            of_stages = _storages(self.modules)
            of_loss = _storages(held_by(self.trainee.functions))
            storages |= {address: n_bytes for address, n_bytes in of_loss.items() if address not in of_stages}
        return sum(storages.values())

    def receive_bytes(self, rank: int) -> int:
        """Receive buffers of all microbatches, both ways, for the rank's stages."""
        parts = [self.parts[stage] for stage in self.stages_of(rank)]
        inputs = sum(meta.n_bytes for part in parts if part.stage for meta in part.metas_in)
        gradients = sum(m.n_bytes for part in parts if not part.is_last for m in part.metas_out if m.requires_grad)
        return (inputs + gradients) * self.n_microbatches

    def loss(self, sent: tuple[Tensor, ...], targets: object) -> Tensor:
        """Loss of one microbatch, from the tensors sent by the last stage."""
        return self.trainee.loss_function(rebuild_output(self.tape, sent), targets)

    @contextmanager
    def forward_of(self, microbatch: int) -> Iterator[None]:
        """Around one stage's forward: the policy is on for microbatches that are checkpointed, off for the others."""
        checkpointing = is_checkpointed(self.plan.checkpoint, microbatch, self.n_microbatches)
        for module in self.modules:
            module.checkpointing = checkpointing
        if checkpointing and self._handle is None and self.policy.units:
            self._handle = apply_policy(self.trainee.model, self.policy)
        elif not checkpointing and self._handle is not None:
            self._handle.undo()
            self._handle = None
        with autocast(self.trainee):
            yield

    def reset(self, stages: set[int]) -> None:
        """Before a pass over `stages`: no gradients, and buffers as they were at first."""
        for handles in self.owners.values():
            for stage, parameter in handles:
                if stage in stages:
                    parameter.grad = None
        with torch.no_grad():
            for name, buffer in self.buffers(stages).items():
                buffer.copy_(self.initial[name])

    def buffers(self, stages: set[int]) -> dict[str, Tensor]:
        """Buffers of the modules that run in `stages`, by full name."""
        steps = [step for part in self.parts if part.stage in stages for step in part.steps]
        tops = {step.target for step in steps if isinstance(step.target, str)}
        tops.update(*(step.paths for step in steps))
        return {name: buffer for name, buffer in self.trainee.model.named_buffers() if is_within(name, *tops)}

    def partial_gradients(self, stages: Collection[int]) -> dict[tuple[str, int], Tensor | None]:
        """By (full name, stage), sums over microbatches. Tied parameters have several stages."""
        return {
            (name, stage): None if parameter.grad is None else parameter.grad.detach().cpu()
            for name, handles in self.owners.items()
            for stage, parameter in handles
            if stage in stages
        }

    def gradients(self) -> dict[str, Tensor | None]:
        """By full name, the mean over microbatches: partial gradients of tied weights are summed in order of stages."""
        return self.summed(self.partial_gradients(range(len(self.parts))))

    def summed(self, partial: dict[tuple[str, int], Tensor | None]) -> dict[str, Tensor | None]:
        """Sums over microbatches by (full name, stage) -> the gradients of the step."""
        sums: dict[str, Tensor | None] = {}
        for name, handles in self.owners.items():
            parts = [part for stage, _ in handles if (part := partial.get((name, stage))) is not None]
            sums[name] = sum(parts[1:], parts[0].clone()).div_(self.n_microbatches) if parts else None
        return sums

    def stages(self) -> tuple[Stage, ...]:
        """The record of each stage."""
        return tuple(
            Stage(
                stage=part.stage,
                rank=self.rank_of[part.stage],
                blocks=part.blocks,
                parameter_bytes=self._stage_bytes(part.stage),
                receives=tuple(str(meta) for meta in part.metas_in) if part.stage else (),
                receive_bytes=sum(meta.n_bytes for meta in part.metas_in) if part.stage else 0,
            )
            for part in self.parts
        )


def build(spec: RunSpec, loaded: Loaded | None = None, *, chain: tuple[str, ...] | None = None) -> Pipeline:
    """Stages of `spec.plan` over a separate model. Raises InvalidPlan, and the errors of load and prepare.

    `chain` names the blocks that random numbers are keyed by (default: the blocks of the stages, in order).
    """
    plan = spec.plan
    if plan is None:
        raise InvalidPlan("The run has no pipeline plan.", hint="Choose stages, microbatches and a schedule.")
    rows = rows_of(plan)
    loaded = loaded or load_for(spec)
    trainee = prepare(replace(spec, policy=KEEP_ALL, plan=None, optimizer="none", n_accumulation=1), loaded)
    batches = microbatches(trainee, plan.n_microbatches)
    chain = chain or tuple(fqn for blocks in plan.stages for fqn in blocks)
    _check_blocks(trainee.model, plan)
    tape = _recorded(trainee, batches[0][0], chain, plan.n_microbatches)
    parts = cut_tape(tape, plan.stages)
    policy, segments = divide_policy(trainee.model, policy_of(spec), plan)
    rng = KeyedRng(spec.seed, chain, plan.keyed_rng)
    modules = tuple(StageModule(trainee.model, part, rng) for part in parts)
    for unit in segments:
        module = next(module for module in modules if unit.blocks[0] in module.part.blocks)
        segment = segment_of(trainee.model, unit, spec.policy, module.part.steps)
        module.segments[segment.index] = segment
    leaves = [(tuple(tensor_leaves(inputs)), targets) for inputs, targets in batches]
    owners = _untie(trainee.model, modules)
    initial = {name: buffer.detach().clone() for name, buffer in trainee.model.named_buffers()}
    return Pipeline(spec, plan, rows, trainee, tape, parts, modules, leaves, owners, rng, policy, initial)


def _recorded(trainee: Trainee, microbatch: object, chain: tuple[str, ...], n_microbatches: int) -> Tape:
    """The tape of one microbatch's forward.

    Raises ModelFailed if the model raises on the whole batch too, InvalidPlan if only the whole batch passes.
    """
    model, inputs = copy.deepcopy(trainee.model), copy.deepcopy(microbatch)
    try:
        return record(model, inputs, chain)
    except ExplorerError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        with blaming(trainee.spec.model, trainee.inputs, "forward"), autocast(trainee):
            call(copy.deepcopy(trainee.model), copy.deepcopy(trainee.inputs))
        if n_microbatches == 1:  # the model passes, so the recording failed
            raise
        raise InvalidPlan(
            f"The model raised {type(error).__name__} on one of {n_microbatches} microbatches: {message_of(error)}.",
            hint="Where it takes the whole batch, its size is written into the model: take it from the input instead.",
        ) from error


def policy_of(spec: RunSpec) -> Policy:
    """The policy that runs: none where the plan checkpoints no microbatch."""
    return KEEP_ALL if spec.plan is not None and spec.plan.checkpoint == "never" else spec.policy


def _storages(parts: Iterable[object]) -> dict[int, int]:
    """Bytes of the parameters and buffers of the modules among `parts`, by address."""
    storages = {}
    for part in parts:
        if isinstance(part, nn.Module):
            for tensor in (*part.parameters(), *part.buffers()):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return storages


def _check_blocks(model: nn.Module, plan: PipelinePlan) -> None:
    module_names = {name for name, _ in model.named_modules()}
    named = [fqn for blocks in plan.stages for fqn in blocks]
    if "" in named:
        raise InvalidPlan(
            f"The model is one {type(model).__name__} without modules inside: there is nothing to cut into stages.",
            hint="Open a model of several blocks.",
        )
    faults = [f"{fqn!r} is not in the model" for fqn in named if fqn not in module_names]
    faults += [f"{fqn!r} is named twice" for fqn in dict.fromkeys(named) if named.count(fqn) > 1]
    faults += [f"{a!r} lies inside {b!r}" for a in named for b in named if a.startswith(f"{b}.")]
    if faults:
        raise InvalidPlan(
            f"The stages do not fit the model: {'; '.join(faults)}.", hint="Name blocks of the chain once."
        )


def _untie(model: nn.Module, modules: tuple[StageModule, ...]) -> dict[str, list[tuple[int, nn.Parameter]]]:
    """Every stage but the first gets its own handle on a tied parameter (same bytes, gradient apart), as ranks have."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[str, list[tuple[int, nn.Parameter]]] = {name: [] for name in names.values()}
    for stage, module in enumerate(modules):
        aliases: dict[int, nn.Parameter] = {}
        for part in module.modules():
            for key, parameter in list(part._parameters.items()):
                if parameter is None or (name := names.get(id(parameter))) is None:
                    continue
                if any(other != stage for other, _ in owners[name]) and id(parameter) not in aliases:
                    alias = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
                    aliases[id(parameter)] = alias
                    owners[name].append((stage, alias))
                elif not owners[name]:
                    owners[name].append((stage, parameter))
                if id(parameter) in aliases:
                    part._parameters[key] = aliases[id(parameter)]
    return owners
