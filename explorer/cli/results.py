"""`pipeline --results`: the plan beside the results is the plan that ran, and what is typed may not deny it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from explorer.errors import InvalidPlan
from explorer.plan.export.torchrun import spec_beside
from explorer.plan.pipeline.schedules import rows_of
from explorer.record.graph import ModelRef
from explorer.record.policy import Policy
from explorer.record.run import PipelinePlan, RunSpec

OF_THE_SPEC = (
    "seed", "device", "dtype", "autocast", "optimizer", "mode", "n_accumulation", "frozen", "n_repeats", "n_threads",
    "time_limit_s",
)  # fmt: skip


Typed = Callable[[str], bool]
"""Whether an option was given on this command line."""


def spec_of_results(results: Path, asked: RunSpec, policy: Callable[[], Policy], typed: Typed) -> RunSpec:
    """The spec that ran, on the model and the weights that were named here: a file decides nothing that is loaded.

    `policy` reads the policy that was asked for.

    Raises UnreadableFile where no spec lies there, InvalidPlan where an option that was typed says otherwise.
    """
    ran = spec_beside(results)
    faults = [*_model_faults(asked.model, ran.model, typed), *_spec_faults(asked, ran, typed)]
    if ran.plan is not None and asked.plan is not None:
        faults += _plan_faults(asked.plan, ran.plan, typed)
    if typed("policy") and policy().units != ran.policy.units:
        faults.append("--policy recomputes other blocks")
    if faults:
        raise InvalidPlan(
            f"The run in {results} was another one: {'; '.join(faults)}.",
            hint="Leave these options out: the run's own plan lies beside its results.",
        )
    named = {"target": asked.model.target, "weights": asked.model.weights}
    return msgspec.structs.replace(ran, model=msgspec.structs.replace(ran.model, **named))


def _model_faults(asked: ModelRef, ran: ModelRef, typed: Typed) -> list[str]:
    faults = []
    if _file_and_factory(asked.target) != _file_and_factory(ran.target):
        faults.append(f"its model was {ran.target}, not {asked.target}")
    if Path(asked.weights).name != Path(ran.weights).name:
        faults.append(f"its weights were {ran.weights or 'those of the factory'}: name them with --weights")
    if typed("size") and asked.size != ran.size:
        faults.append(f"--size {asked.size} is not {ran.size}")
    if typed("arguments") and asked.arguments != ran.arguments:
        was = " ".join(f"{name}={value}" for name, value in ran.arguments.items()) or "nothing"
        faults.append(f"--set was {was}")
    return faults


def _file_and_factory(target: str) -> tuple[str, str]:
    path, _, factory = target.partition(".py:")
    return (Path(path).name.removesuffix(".py"), factory) if ".py" in target else (target, "")


def _spec_faults(asked: RunSpec, ran: RunSpec, typed: Typed) -> list[str]:
    pairs = ((name, getattr(asked, name), getattr(ran, name)) for name in OF_THE_SPEC if typed(name))
    faults = [f"{name} was {there}, not {here}" for name, here, there in pairs if here != there]
    if typed("memory_limit") and asked.memory_limit_bytes != ran.memory_limit_bytes:
        faults.append(f"memory_limit was {ran.memory_limit_bytes} bytes")
    return faults


def _plan_faults(asked: PipelinePlan, ran: PipelinePlan, typed: Typed) -> list[str]:
    """`asked` is the plan of the options over that which ran."""
    faults = []
    if typed("stages") and len(asked.stages) != len(ran.stages):
        faults.append(f"it had {len(ran.stages)} stages, not {len(asked.stages)}")
    if typed("ranks") and asked.n_ranks != len(rows_of(ran)):
        faults.append(f"it had {len(rows_of(ran))} ranks, not {asked.n_ranks}")
    if typed("microbatches") and asked.n_microbatches != ran.n_microbatches:
        faults.append(f"it had {ran.n_microbatches} microbatches, not {asked.n_microbatches}")
    if typed("schedule") and (ran.actions or asked.schedule != ran.schedule):
        faults.append(f"its schedule was {ran.schedule_name}, not {asked.schedule}")
    if typed("rows") and asked.actions != ran.actions:
        faults.append(f"its schedule was {ran.schedule_name}, not that of --rows")
    for name in ("checkpoint", "keyed_rng", "deferred_batch_norm"):
        option = "unkeyed" if name == "keyed_rng" else name
        if typed(option) and getattr(asked, name) != getattr(ran, name):
            faults.append(f"{name} was {getattr(ran, name)}")
    return faults
