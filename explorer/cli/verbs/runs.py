"""The verbs that run a model: measure, compare, matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from explorer.cli.command import (
    COULD_NOT_RUN,
    DIFFERENT,
    EQUAL,
    STATE_MOVED,
    Output,
    RunFailed,
    answer_failure,
    print_json,
    say,
    verb,
)
from explorer.cli.options import (
    KeepOptions,
    Model,
    ModelOptions,
    PolicyName,
    StaleOption,
    StepOptions,
    chosen_policy,
    describe,
    policy_on,
)
from explorer.cli.report import document, print_comparison, print_measurement
from explorer.cli.show import print_matrix
from explorer.cli.worker import ask, check_writable, save_run_file, worker, write_file
from explorer.errors import NotSaved
from explorer.jobs.failures import failure_of
from explorer.jobs.protocol import Compare, DeriveMatrix, Measure, SaveSnapshot
from explorer.plan.policy import file as policy_file
from explorer.plan.policy.evidence import evidence_of
from explorer.record.comparison import Comparison, Verdict
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Failure, SavedFile
from explorer.record.policy import KEEP_ALL, Policy

_CODES: dict[Verdict, int] = {
    "bitwise equal": EQUAL,
    "rounding": EQUAL,
    "state moved": STATE_MOVED,
    "different": DIFFERENT,
    "not comparable": COULD_NOT_RUN,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What only a comparison has."""

    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Write the policy file with its evidence.", rich_help_panel="Output"
        ),
    ] = None
    quick: Annotated[
        bool, typer.Option("--quick", help="Gradients and buffers only: no rerun, no float64 reference, no audit.")
    ] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """What only a measurement has."""

    snapshot: Annotated[
        Path | None,
        typer.Option(
            "--snapshot",
            metavar="FILE",
            help="Also write one step for PyTorch's own memory viewer (CUDA only).",
            rich_help_panel="Output",
        ),
    ] = None


@verb
def measure(
    model: Model,
    options: ModelOptions,
    step: StepOptions,
    stale: StaleOption,
    keep: KeepOptions,
    extra: MeasureOptions,
    output: Output,
    policy: PolicyName = "keep-all",
) -> None:
    """One training step under a policy: memory, FLOPs and time."""
    ref = options.ref(model)
    spec = step.spec(ref, KEEP_ALL, seed=options.seed)
    check_writable(keep.save, extra.snapshot)
    with worker() as engine:
        chosen = chosen_policy(engine, policy, ref, seed=options.seed, allow_stale=stale.allow_stale)
        spec = msgspec.structs.replace(spec, policy=chosen)
        if extra.snapshot is not None:
            saved: SavedFile = ask(engine, SaveSnapshot(spec=spec, path=str(extra.snapshot.resolve())))
            say(f"Wrote {saved.path}. Open it at https://docs.pytorch.org/memory_viz.")
        found = ask(engine, Measure(spec=spec), keep=not keep.no_store)
    if output.json:
        print_json(document(found))
    else:
        print_measurement(found)
    with _answered(output):
        if keep.save is not None:
            save_run_file(found, keep.save)
        _raise_failed_run(found.failure)


@verb
def compare(
    model: Model,
    policy: PolicyName,
    options: ModelOptions,
    step: StepOptions,
    stale: StaleOption,
    keep: KeepOptions,
    only: CompareOptions,
    output: Output,
) -> None:
    """The step with and without a policy. Exit 0: bitwise equal or rounding; 1: different; 2: could not run;
    3: gradients equal, state moved twice."""
    ref = options.ref(model)
    baseline = step.spec(ref, KEEP_ALL, seed=options.seed)
    check_writable(keep.save, only.out)
    with worker() as engine:
        graph = describe(engine, ref, options.seed)
        candidate = msgspec.structs.replace(baseline, policy=policy_on(policy, graph, allow_stale=stale.allow_stale))
        request = Compare(baseline=baseline, candidate=candidate, full=not only.quick)
        found = ask(engine, request, keep=not keep.no_store)
    if output.json:
        print_json(document(found))
    else:
        print_comparison(found)
    with _answered(output):
        if keep.save is not None:
            save_run_file(found, keep.save)
        if only.out is not None:
            write_file(only.out, policy_text(candidate.policy, found, graph).encode())
            say(f"Wrote {only.out}.")
        _raise_failed_run(found.failure)
    raise typer.Exit(_CODES[found.verdict])


@verb
def matrix(
    model: Model,
    options: ModelOptions,
    step: StepOptions,
    stale: StaleOption,
    output: Output,
    policy: PolicyName = "all",
) -> None:
    """Which derivatives survive which kind of checkpointing; every cell is a run."""
    ref = options.ref(model)
    spec = step.spec(ref, KEEP_ALL, seed=options.seed)
    with worker() as engine:
        chosen = chosen_policy(engine, policy, ref, seed=options.seed, allow_stale=stale.allow_stale)
        found = ask(engine, DeriveMatrix(spec=msgspec.structs.replace(spec, policy=chosen)))
    if output.json:
        print_json(found)
    else:
        print_matrix(found)


def policy_text(policy: Policy, comparison: Comparison, graph: ModelGraph) -> str:
    """The policy file with what the comparison proves."""
    return policy_file.dumps(
        policy, model=graph.model, fingerprint=graph.fingerprint, evidence=evidence_of(comparison, graph)
    )


@contextmanager
def _answered(output: Output) -> Iterator[None]:
    """The answer is on stdout already: what fails from here on is told on stderr alone."""
    try:
        yield
    except RunFailed as error:  # the document holds what was recorded until the run was cut short
        answer_failure(error.failure, dataclasses.replace(output, json=False))
    except NotSaved as error:
        answer_failure(failure_of(error), dataclasses.replace(output, json=False))


def _raise_failed_run(failure: Failure | None) -> None:
    if failure is not None:
        raise RunFailed(failure)
