"""The block graph of a model from one observed forward. Without tracing or export, every model that runs is described.

1. The unwrapped model is described; a policy is drawn on top of the graph.
2. A model can be split if its forward walks over consecutive blocks. Data written before and read after a border
   cross the border. Several tensors may cross (a U-Net's open skips). A block called on both sides prevents the cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress

import torch
from msgspec.structs import replace
from torch import nn

from explorer.engine.device.device import device_of
from explorer.engine.device.without_data import is_without_data
from explorer.engine.model.blocks import chain_of, cut_points, has_running_statistics, module_fields, repeated_as
from explorer.engine.model.conditions import autocast_of, under_conditions, unknown_names
from explorer.engine.model.equal_models import deep_copy
from explorer.engine.model.loaded import HOOKS_ARE_NEEDED, REFUSES_HOOKS, Loaded, blaming, refuse_unopenable
from explorer.engine.state.bits import tensor_leaves
from explorer.engine.state.rng import RngState
from explorer.engine.state.snapshot import SharedSnapshot
from explorer.engine.watch.block_facts import BlockNotes, Consecutive
from explorer.engine.watch.dry_rerun import DryRerun
from explorer.engine.watch.edges import edges_and_joins
from explorer.engine.watch.forward import ForwardWatch
from explorer.engine.watch.real_bytes import RealBytes
from explorer.engine.watch.rerun_traits import ArgumentsAndState, RandomNumbers, SelfCheckpointing
from explorer.engine.watch.scopes import around_backward
from explorer.engine.watch.state_changes import SharedTensors, moved_names, moved_traits, state_pictures
from explorer.errors import BadInput, ExplorerError, ModelFailed, message_of
from explorer.plan.names import is_within, lineage
from explorer.record.failure import is_out_of_memory
from explorer.record.graph import IN_TRAINING, Block, Conditions, ModelGraph, ModelRef, Trait
from explorer.record.plan import Progress, Report, silent
from explorer.record.run import Device, RunSpec


def describe(
    ref: ModelRef,
    *,
    seed: int = 0,
    device: Device = "cpu",
    conditions: Conditions = IN_TRAINING,
    report: Report = silent,
) -> ModelGraph:
    """The block graph of `ref` under `conditions`. Bytes and FLOPs are those of one forward of the example batch.

    The forward runs on `device`, or on the CPU if there is no such device or a forward does not fit. In the last case
    `note` names the reason. Raises ModelNotLoaded and ModelFailed. The random generators are restored.
    """
    from explorer.engine.model.load import load  # a step of the user's own script loads nothing

    rng = RngState.capture()
    try:
        report(Progress(what=f"loading {ref.target}", done=0, total=2))
        with RealBytes(ref.target) if is_without_data() else nullcontext():
            loaded = load(ref, seed=seed)
            report(Progress(what="watching one forward", done=1, total=2))
            where: Device = "cpu" if device == "cuda" and not torch.cuda.is_available() else device
            return describe_loaded(loaded, lambda: load(ref, seed=seed), where, conditions)
    finally:
        rng.restore()


def describe_step(model: nn.Module, step: Callable[[], object], target: str) -> ModelGraph:
    """The block graph of `model` from a user's step, which ends at its first backward after a call of the model.

    No copy is made. The caller restores the state changed by forward. Errors of the step pass through. Raises BadInput
    for a step without a backward, and for a step that does not call the model.
    """
    refuse_unopenable(model, target)
    for lets_go in (True, False):
        try:
            notes, inputs = _observe_step(model, step, lets_go=lets_go)
            break
        except ExplorerError:
            raise
        except Exception as error:  # a model that takes gradients in its forward fails if nothing is kept
            if REFUSES_HOOKS in message_of(error):
                raise BadInput("The step calls torch.func around or in the model.", hint=HOOKS_ARE_NEEDED) from error
            if not lets_go or is_out_of_memory(error):
                raise
    graph = _graph(Loaded(ModelRef(target=target), model, inputs, None, None), notes)
    types = {parameter.device.type for parameter in model.parameters()}
    return replace(graph, device="cuda" if "cuda" in types else "cpu")


class _ForwardIsOver(BaseException):
    """Ends the step. A BaseException passes every `except Exception` of the step."""


def _observe_step(model: nn.Module, step: Callable[[], object], *, lets_go: bool) -> tuple[_Notes, object]:
    inputs: list[object] = []

    def leave() -> None:
        if inputs:  # a step may begin with the backward of a different model
            raise _ForwardIsOver

    notes = _Notes(model, lets_go=lets_go)
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: inputs.append((args, kwargs)), with_kwargs=True)
    is_over = False
    try:
        with (
            hook,
            around_backward(leave, in_forward=lambda: notes.watch.scopes.is_in_block),
            torch.enable_grad(),
            notes.watch,
        ):
            step()
    except _ForwardIsOver:
        is_over = True
    if not is_over or not inputs:
        what = "did not call the model" if not inputs else "ran to its end without a backward"
        raise BadInput(
            f"The step {what}.", hint="Give a function that runs forward, loss and backward of this very model."
        )
    notes.close()
    notes.random.settle(None)
    return notes, inputs[0]


ON_CPU = "Watched on the CPU: a forward of this model does not fit on {device}."


def describe_loaded(
    loaded: Loaded, another: Callable[[], Loaded], device: Device, conditions: Conditions = IN_TRAINING
) -> ModelGraph:
    """The graph of `loaded`, whose state changes. `another` builds an equal model. Raises ModelFailed.

    One thread runs the forward, as in a step: threads that spin between small operators took four times the CPU time.
    """
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        try:
            return _watched(loaded, another, device, conditions)
        except Exception as error:
            if device == "cpu" or not is_out_of_memory(error):
                raise
        device_of(torch.device(device)).release()
        return replace(_watched(another(), another, "cpu", conditions), note=ON_CPU.format(device=device))
    finally:
        torch.set_num_threads(n_threads)


def describe_copy(
    loaded: Loaded, another: Callable[[], Loaded], device: Device, conditions: Conditions = IN_TRAINING
) -> ModelGraph:
    """As `describe_loaded`, from a copy: `loaded` does not run. `another` builds if a copy would lose state."""
    shared, copied = SharedSnapshot(loaded.model), None
    with suppress(Exception):  # a model that cannot be copied
        copied = deep_copy(loaded)
    try:
        return describe_loaded(
            another() if copied is None or copied.left_behind else copied, another, device, conditions
        )
    finally:
        shared.restore()


def graph_of_conditions(spec: RunSpec, loaded: Loaded | None = None) -> ModelGraph | None:
    """The graph under the conditions of `spec`, from a copy of `loaded` if given.

    A forecast from the run needs it where a graph of a usual training step would give false figures. None for such a
    step, and for a model that cannot be described: its run says what is wrong.
    """
    if spec.conditions == IN_TRAINING or spec.forward_only:
        return None

    def another() -> Loaded:
        from explorer.engine.model.load import load_for

        return load_for(spec)

    with suppress(Exception):
        return describe_copy(loaded or another(), another, spec.device, spec.conditions)
    return None


def _watched(loaded: Loaded, another: Callable[[], Loaded], device: Device, conditions: Conditions) -> ModelGraph:
    """The graph without tensors kept for backward, so that a model whose step does not fit can be described. A model
    that takes gradients in its forward fails so; `another` is then watched with everything kept."""
    # Tensors without data take no memory: the first attempt keeps everything.
    for lets_go in (False,) if is_without_data() else (True, False):
        rng = RngState.capture(loaded.model)
        loaded = _under(loaded, conditions, device)
        try:
            with autocast_of(conditions, device):
                notes = _observe(loaded, lets_go=lets_go)
            return replace(_graph(loaded, notes), device=device, conditions=conditions)
        except ModelFailed:
            if not lets_go:
                raise
        finally:
            rng.restore()
        loaded = another()
    raise AssertionError("the second look returns or raises")


def _under(loaded: Loaded, conditions: Conditions, device: Device) -> Loaded:
    """`loaded` under `conditions`. Frozen names that the model lacks are left to the run, which refuses them."""
    unknown = unknown_names(loaded.model, conditions.frozen)
    known = tuple(name for name in conditions.frozen if name not in unknown)
    return under_conditions(loaded, replace(conditions, frozen=known), device)


class _Notes:
    """The note-takers of one forward."""

    def __init__(self, model: nn.Module, *, lets_go: bool, reruns: bool = False) -> None:
        """`reruns`: each block runs a second time afterwards, see dry_rerun.py."""
        self.blocks, self.consecutive = BlockNotes(model), Consecutive()
        self.random, self.state, self.checkpoints = RandomNumbers(model), ArgumentsAndState(model), SelfCheckpointing()
        self.shared, self.dry = SharedTensors(model), DryRerun(model) if reruns else None
        note_takers = (self.checkpoints, self.blocks, self.consecutive, self.random, self.state, self.shared)
        self.watch = ForwardWatch(model, (*note_takers, *([self.dry] if self.dry else ())), lets_go=lets_go)
        self._model, self._state_before = model, state_pictures(model)

    def close(self) -> None:
        """Completes the notes; nothing more is watched. Raises ModelFailed if something could not be noted."""
        self.watch.check()
        self.consecutive.forget()
        self.blocks.add_up_containers()
        self._moved = moved_traits(self._model, self._state_before)
        self._moved_names = moved_names(self._model, self._state_before)

    def traits(self) -> dict[str, set[Trait]]:
        """Traits by block from operators, from the modules' kinds, and from changed state; the last two are inherited
        by ancestors."""
        facts = self.blocks.facts.items()
        takers = (self.random, self.state, self.shared)
        traits = {fqn: block.traits.union(*(taker.traits[fqn] for taker in takers)) for fqn, block in facts}
        noted: dict[Trait, Iterable[str]] = {
            "checkpoints_itself": self.checkpoints.blocks,
            "replay_draws_again": self.checkpoints.without_rng,
        }
        for trait, fqns in noted.items():
            for fqn in fqns:
                traits[fqn].add(trait)
        for fqn, module in self.blocks.modules.items():
            inherited = self._inherited(fqn)
            if has_running_statistics(module):
                inherited.add("running_statistics")
            for ancestor in lineage(fqn):
                traits[ancestor] |= inherited
            if any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__):
                traits[fqn].add("checkpointing_layer")
        for fqn, trait in list(self.dry.traits(traits)) if self.dry is not None else ():
            traits[fqn].add(trait)
        return traits

    def _inherited(self, fqn: str) -> set[Trait]:
        """Traits of moved state. An attribute that gets an equal value when its block runs again does not count."""
        traits = set(self._moved.get(fqn, ()))
        if self.dry is not None and self.dry.writes_the_same(fqn, self._moved_names.get(fqn, set())):
            traits.discard("moves_attributes")
        return traits


def _observe(loaded: Loaded, *, lets_go: bool) -> _Notes:
    notes = _Notes(loaded.model, lets_go=lets_go, reruns=not is_without_data())
    with blaming(loaded.ref, loaded.inputs, "forward"), torch.enable_grad(), notes.watch:
        output = loaded.output()
    with blaming(loaded.ref, loaded.inputs, "loss"), torch.enable_grad(), notes.watch.of_loss():
        loaded.loss(output)
    notes.close()
    notes.random.settle(_second_forward(loaded, notes.random) if notes.random.streams else None)
    if notes.dry is not None:
        notes.dry.run(lets_go=lets_go)
        if notes.dry.late_reads:
            notes.dry.settle(_second_dry_rerun(loaded, lets_go=lets_go))
    return notes


def _second_forward(loaded: Loaded, first: RandomNumbers) -> RandomNumbers | None:
    """A second forward, from the state of the generators after the first. None if the second forward fails."""
    second = RandomNumbers(loaded.model, streams=first.streams)
    try:
        with torch.no_grad(), ForwardWatch(loaded.model, [second]):
            loaded.output()
    except Exception:  # the model ran once, and a second forward is no requirement
        return None
    return second


def _second_dry_rerun(loaded: Loaded, *, lets_go: bool) -> DryRerun | None:
    """The dry rerun of a second forward. None if it fails."""
    second = DryRerun(loaded.model)
    try:
        with torch.enable_grad(), ForwardWatch(loaded.model, [second], lets_go=lets_go):
            output = loaded.output()
        loaded.loss(output)
        second.run(lets_go=lets_go)
    except Exception:  # as in _second_forward
        return None
    return second


def _graph(loaded: Loaded, notes: _Notes) -> ModelGraph:
    modules, facts, flow = notes.blocks.modules, notes.blocks.facts, notes.blocks.flow
    traits = notes.traits()
    repeats = repeated_as(modules, facts)
    shared = _sharing(modules)
    blocks = tuple(_block(fqn, notes, traits[fqn], shared.get(fqn, ()), repeats.get(fqn)) for fqn in facts)
    chain = chain_of(modules, facts)
    edges, joins = edges_and_joins(flow)
    shapes = tuple(tuple(leaf.shape) for leaf in tensor_leaves(loaded.inputs))
    dtype = next((p.dtype for p in loaded.model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    return ModelGraph(
        model=loaded.ref,
        blocks=blocks,
        edges=edges,
        joins=joins,
        cuts=cut_points(chain, facts, flow.data),
        chain=chain,
        input_shapes=shapes,
        batch=loaded.batch_text,
        dtype=str(dtype).removeprefix("torch."),
        n_parameters=sum(parameter.numel() for parameter in loaded.model.parameters()),
    )


def _block(fqn: str, notes: _Notes, traits: set[Trait], shares: tuple[str, ...], repeat_of: str | None) -> Block:
    blocks, facts = notes.blocks, notes.blocks.facts[fqn]
    return Block(
        **module_fields(fqn, blocks.modules[fqn]),
        n_calls=facts.n_calls,
        output_bytes=facts.output_bytes,
        saved_bytes=sum(facts.saved.values()),
        forward_flops=facts.flops,
        rerun_flops=facts.rerun_flops,
        op_flops=dict(facts.op_flops),
        late_op_flops=dict(facts.late_op_flops),
        rewritten_ops=tuple(sorted(notes.state.rewritten_ops[fqn])),
        last_saved_in=facts.last_saved_in,
        flops_before=facts.flops_before,
        outputs_saved_outside=blocks.saved_outside(fqn),
        inputs_saved_in=blocks.saved_in(facts.arguments),
        inputs_in_containers=blocks.in_containers(fqn),
        outputs_saved_in=blocks.saved_in(facts.returned),
        follows=notes.consecutive.follows(fqn),
        traits=tuple(sorted(traits)),
        late_reads=tuple(notes.dry.late_reads.get(fqn, {}).values()) if notes.dry is not None else (),
        moved_shared=tuple(notes.dry.moves_shared.get(fqn, ())) if notes.dry is not None else (),
        shares_parameters_with=shares,
        repeat_of=repeat_of,
    )


def _sharing(modules: dict[str, nn.Module]) -> dict[str, tuple[str, ...]]:
    """For each block, the blocks outside that share parameters with the block."""
    owners: dict[int, list[str]] = defaultdict(list)
    for fqn, module in modules.items():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)].append(fqn)
    shared: dict[str, dict[str, None]] = defaultdict(dict)
    for group in owners.values():
        for owner in group:
            for other in group:
                for block in lineage(owner):
                    if other != owner and not is_within(other, block):
                        shared[block][other] = None
    return {fqn: tuple(others) for fqn, others in shared.items()}
