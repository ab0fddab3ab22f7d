"""From the options of `pipeline` to a plan: what is asked wins over what the policy file holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from explorer.cli_pipeline import PlanOptions, plan_of
from explorer.errors import InvalidPlan
from explorer.plan.export_pipeline import run_files, torchrun_command
from explorer.record import KEEP_ALL, ModelRef, PipelinePlan, RunSpec
from tests.graphs import gpt

GRAPH = gpt(6)


def test_two_stages_are_the_start() -> None:
    plan = plan_of(PlanOptions(), GRAPH, KEEP_ALL, None, kept=None)
    assert len(plan.stages) == 2
    assert tuple(fqn for blocks in plan.stages for fqn in blocks) == GRAPH.spine


def test_options_win_over_the_file() -> None:
    kept = plan_of(PlanOptions(stages=3, microbatches=6, schedule="1F1B"), GRAPH, KEEP_ALL, None, kept=None)
    plan = plan_of(PlanOptions(microbatches=8), GRAPH, KEEP_ALL, None, kept=kept)
    assert (plan.stages, plan.schedule, plan.n_microbatches) == (kept.stages, "1F1B", 8)


@pytest.mark.parametrize("rule", ["by-parameters", "by-time", "by-memory"])
def test_every_rule_cuts(rule: str) -> None:
    options = PlanOptions(stages=4, microbatches=4, schedule="Interleaved1F1B", cuts=rule)  # type: ignore[arg-type]
    assert len(plan_of(options, GRAPH, KEEP_ALL, None, kept=None).stages) == 4


def test_an_own_schedule_is_read_and_checked(tmp_path: Path) -> None:
    rows = tmp_path / "own.csv"
    rows.write_text("0F0,0B0\n1F0,1B0\n")
    plan = plan_of(PlanOptions(stages=2, microbatches=1, rows=rows), GRAPH, KEEP_ALL, None, kept=None)
    assert plan.actions == (("0F0", "0B0"), ("1F0", "1B0"))
    with pytest.raises(InvalidPlan, match="0F1 is missing"):
        plan_of(PlanOptions(stages=2, microbatches=2, rows=rows), GRAPH, KEEP_ALL, None, kept=None)


def test_a_schedule_that_does_not_fit_is_refused_before_any_run() -> None:
    with pytest.raises(InvalidPlan, match="at least as many microbatches"):
        plan_of(PlanOptions(stages=4, microbatches=2, schedule="1F1B"), GRAPH, KEEP_ALL, None, kept=None)


def test_the_run_script_says_all_that_torchrun_needs(tmp_path: Path) -> None:
    plan = PipelinePlan(stages=(("a",), ("b",)), n_microbatches=2)
    spec = RunSpec(model=ModelRef(target="m.py"), plan=plan)
    files = run_files(spec, tmp_path)
    assert set(files) == {"run_spec.json", "run.sh", "schedule.csv"}
    command = torchrun_command(spec, tmp_path)
    assert command in files["run.sh"].replace(' "$@"', "")
    assert "--nproc-per-node 2 -m explorer.engine.pipeline.rank_main" in command
    assert files["schedule.csv"] == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
