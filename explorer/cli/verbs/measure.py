"""`python -m explorer measure MODEL`: one training step under a policy."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Annotated

from msgspec.structs import replace
from rich.markup import escape

from explorer import slices
from explorer.cli.command import Output, RunFailed, say, verb
from explorer.cli.options import (
    KeepOptions,
    Model,
    PolicyName,
    RankStepOptions,
    bounded,
    chosen_file,
    describe,
    file_on,
    in_limits,
    in_step,
    recorded_step,
)
from explorer.cli.report import answer_forecast, answer_step
from explorer.cli.verbs.report import answer_run
from explorer.cli.worker import ask, check_writable, finish, worker
from explorer.errors import BadInput
from explorer.jobs.on_card import CountOnCard
from explorer.jobs.protocol import Measure, MeasureRanks
from explorer.jobs.run_file import with_graph
from explorer.plan.predict.baseline import keep_all_from
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.run import PipelinePlan, RunSpec
from explorer.view.text.runs import did_not_fit


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """Options of measurements alone."""

    forward_only: Annotated[bool, in_step("--forward-only", help="Forward and loss without gradients.")] = False
    own_optimizer: Annotated[
        str, in_step(metavar="FILE:CLASS", help="With --predict: an optimizer of your own, called with the parameters.")
    ] = ""
    n_stages: Annotated[
        int | None,
        bounded(PipelinePlan, "n_ranks", "--pp", panel="Ranks", help="With --predict: stages of a pipeline."),
    ] = None
    verify: Annotated[
        bool, in_step("--verify", help="With --card: torch's CUDA build takes the step on an imaginary card, too.")
    ] = False
    fit: Annotated[bool, in_limits("--fit", help="Out of memory: recompute ever more until it fits.")] = False


@verb
def measure(
    model: Model,
    step: RankStepOptions,
    keep: KeepOptions,
    extra: MeasureOptions,
    output: Output,
    policy: PolicyName = "keep-all",
) -> None:
    """One training step under a policy: memory, FLOPs and time."""
    if extra.n_stages is not None:
        n_ranks = step.n_ranks or extra.n_stages
        _check_pipeline(extra, step, keep, n_ranks)
        spec = dataclasses.replace(step, n_ranks=None).spec(model)
        shape = extra.n_stages, n_ranks // extra.n_stages
        slices.part("pipeline", "cli.pipeline").answer_predicted(spec, policy, shape, output)
        return
    check_writable(keep.save)
    if (recorded := recorded_step(model, step)) is not None:
        _answer_recorded(recorded, policy, keep, output)
        return
    spec = _spec(model, step, extra)
    with worker() as engine:
        spec = step.with_policy(spec, chosen_file(engine, policy, spec, without_data=step.predict))
        if spec.ranks is not None:
            on_ranks = ask(engine, MeasureRanks(spec=spec, without_data=step.predict), keep=not keep.no_store)
            answer_run(on_ranks, model, output)
            finish(on_ranks, None, keep.save, output)
            return
        counted = ask(engine, CountOnCard(spec=spec)).figures if extra.verify else None
        run = Measure(spec=spec, until_it_fits=extra.fit, without_data=step.predict, own_optimizer=extra.own_optimizer)
        measured: Measurement = ask(engine, run, keep=not (keep.no_store or step.predict))
        graph = None
        if not spec.policy.units or measured.refused or keep.save is not None:  # a report forecasts policies, too
            with suppress(RunFailed):
                graph = describe(engine, spec, without_data=step.predict)
    answer_step(measured, graph, output, counted)
    _say_what_did_not_fit(measured, graph)
    finish(with_graph(measured, graph), measured.failure, keep.save, output)


def _answer_recorded(step: Measurement, policy: str, keep: KeepOptions, output: Output) -> None:
    """The recorded step, or its forecast under a policy. A recorded step is not run again: its script has the model."""
    assert step.graph is not None, "step_in refuses other runs"
    chosen = file_on(policy, step.graph).policy
    if chosen.units:
        answer_forecast(step, chosen, output)
    else:
        answer_step(step, step.graph, output)
        finish(step, step.failure, keep.save, output)


def _spec(model: str, step: RankStepOptions, extra: MeasureOptions) -> RunSpec:
    """Raises BadInput for options that exclude each other."""
    spec = replace(step.spec(model), forward_only=extra.forward_only)
    if (step.predict or spec.ranks) and extra.fit:
        raise BadInput("--predict and ranks have nothing to fit.", hint="Leave --fit out.")
    if extra.verify and (not step.predict or spec.card is None or spec.ranks or extra.own_optimizer):
        raise BadInput(
            "--verify takes a step again that is predicted for a card, with an optimizer of torch.",
            hint="Add --predict --card h100, and leave --own-optimizer and --ranks out.",
        )
    if extra.own_optimizer:
        if not step.predict or spec.ranks or extra.forward_only:
            raise BadInput(
                "--own-optimizer is played in a predicted step of one process with backward.",
                hint="Add --predict, or leave --own-optimizer, --forward-only or --ranks out.",
            )
        spec = replace(spec, optimizer="none")
    return spec


def _check_pipeline(extra: MeasureOptions, step: RankStepOptions, keep: KeepOptions, n_ranks: int) -> None:
    """Raises BadInput for options that no price list of blocks knows, and for stages that do not divide the ranks."""
    split = step.fsdp or step.ddp or step.parallelize or step.n_tensor > 1 or step.card or step.allocator
    if split or not step.predict or keep.save or extra != MeasureOptions(n_stages=extra.n_stages):
        raise BadInput(
            "--pp predicts each rank from prices of whole blocks, which know no shards, buckets, cards and files.",
            hint="Give it --predict, --ranks and options of the step alone, or run the verb pipeline.",
        )
    assert extra.n_stages is not None
    if n_ranks % extra.n_stages:
        raise BadInput(f"{n_ranks} ranks are not whole pipelines of {extra.n_stages} stages.", hint="Change --ranks.")


def _say_what_did_not_fit(measured: Measurement, graph: ModelGraph | None) -> None:
    if measured.refused:
        say(f"[yellow]{escape(did_not_fit(measured, keep_all_from(measured, graph)))}[/]")
    elif measured.failure is not None and measured.failure.kind == "out of memory":
        say("--fit recomputes ever more until a run fits, and says from that one what this would need.")
