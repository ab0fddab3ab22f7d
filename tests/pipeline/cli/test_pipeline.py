"""The verb pipeline: its options, its runs, and results that ranks left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner, Result

from explorer.cli import main as cli
from explorer.errors import InvalidPlan, UnreadableFile
from explorer.pipeline.cli.pipeline import PlanOptions, plan_of, spec_of_results
from explorer.pipeline.cli.report import print_pipeline
from explorer.pipeline.plan.export import run_files, run_key, torchrun_command
from explorer.pipeline.plan.schedules import USUAL, fitting
from explorer.pipeline.record.step import JointPlan
from explorer.plan.policy import file as policy_file
from explorer.record import KEEP_ALL, ModelRef, PipelinePlan, Policy, RunSpec
from explorer.record.base import from_json, to_json
from tests.cli.conftest import engine, shared  # noqa: F401  fixtures
from tests.graphs import gpt
from tests.pipeline import pipelines

GRAPH = gpt(6)
GRAPH_CUT = (GRAPH.chain[:3], GRAPH.chain[3:])


def test_page_and_command_line_begin_with_two_stages_of_the_same_plan() -> None:
    plan = plan_of(PlanOptions(), GRAPH, KEEP_ALL, None, default=None)
    assert len(plan.stages) == 2
    assert tuple(fqn for blocks in plan.stages for fqn in blocks) == GRAPH.chain
    assert (plan.schedule, plan.n_microbatches) == (USUAL.schedule, fitting(USUAL.n_microbatches, GRAPH))


def test_a_plan_needs_its_cap_and_leaves_the_policy_open() -> None:
    assert PlanOptions().wish("all") is None
    wish = PlanOptions(plan=True, cap="2MiB", stages=3).wish("keep-all")
    assert wish is not None and wish.cap_bytes == 2 * 2**20 and len(wish.asked.stages) == 3
    for half in (PlanOptions(plan=True), PlanOptions(cap="2MiB")):
        with pytest.raises(InvalidPlan, match="belong together"):
            half.wish("keep-all")
    with pytest.raises(InvalidPlan, match="both say what is recomputed"):
        PlanOptions(plan=True, cap="2MiB").wish("all")


def test_options_win_over_the_file() -> None:
    file_plan = plan_of(PlanOptions(stages=3, microbatches=6, schedule="1F1B"), GRAPH, KEEP_ALL, None, default=None)
    plan = plan_of(PlanOptions(microbatches=8), GRAPH, KEEP_ALL, None, default=file_plan)
    assert (plan.stages, plan.schedule, plan.n_microbatches) == (file_plan.stages, "1F1B", 8)
    own = msgspec.structs.replace(
        file_plan, stages=GRAPH_CUT, n_microbatches=1, actions=(("0F0", "0B0"), ("1F0", "1B0"))
    )
    assert plan_of(PlanOptions(), GRAPH, KEEP_ALL, None, default=own).schedule_name == "own schedule"
    assert plan_of(PlanOptions(schedule="GPipe"), GRAPH, KEEP_ALL, None, default=own).schedule_name == "GPipe"
    with pytest.raises(InvalidPlan, match="0F1 is missing"):
        plan_of(PlanOptions(microbatches=2), GRAPH, KEEP_ALL, None, default=own)


@pytest.mark.parametrize("rule", ["by-parameters", "by-time", "by-memory"])
def test_every_rule_cuts(rule: str) -> None:
    options = PlanOptions(stages=4, microbatches=4, schedule="Interleaved1F1B", cuts=rule)  # type: ignore[arg-type]
    assert len(plan_of(options, GRAPH, KEEP_ALL, None, default=None).stages) == 4


def test_a_schedule_that_does_not_fit_is_refused_before_any_run() -> None:
    with pytest.raises(InvalidPlan, match="at least as many microbatches"):
        plan_of(PlanOptions(stages=4, microbatches=2, schedule="1F1B"), GRAPH, KEEP_ALL, None, default=None)


def test_the_run_script_says_all_that_torchrun_needs_and_takes_the_file_of_the_model_with_it(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("def build(): ...\n")
    plan = PipelinePlan(stages=(("a",), ("b",)), n_microbatches=2)
    spec = RunSpec(model=ModelRef(target=f"{file}:build"), plan=plan)
    files = run_files(spec)
    assert set(files) == {"run_spec.json", "run.sh", "schedule.csv", "net.py"}
    assert torchrun_command(spec, tmp_path) == f"sh {tmp_path}/run.sh"
    assert "torch.distributed.run --nproc-per-node 2" in files["run.sh"]
    assert files["schedule.csv"] == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    assert files["net.py"] == file.read_text()
    assert from_json(files["run_spec.json"], RunSpec).model.target == "net.py:build"


RAN = RunSpec(
    model=ModelRef(target="net.py:build"),
    plan=PipelinePlan(stages=(("a",), ("b",)), n_microbatches=4, schedule="1F1B"),
    policy=Policy.recompute(["a"]),
)


def opened(folder: Path, target: str = "elsewhere/net.py:build", typed: tuple[str, ...] = ()) -> RunSpec:
    (folder / "run_spec.json").write_bytes(to_json(RAN))
    return spec_of_results(folder / "results", ModelRef(target=target), typed)


def test_results_come_with_the_plan_that_ran_and_the_model_of_the_command_line(tmp_path: Path) -> None:
    spec = opened(tmp_path)
    assert (spec.plan, spec.policy) == (RAN.plan, RAN.policy)
    assert spec.model.target == "elsewhere/net.py:build"
    assert run_key(spec) == run_key(RAN)
    with pytest.raises(InvalidPlan, match="its model was net.py:build, not other.py:build"):
        opened(tmp_path, "other.py:build")
    with pytest.raises(InvalidPlan, match="--stages, --policy cannot change it"):
        opened(tmp_path, typed=("--stages", "--policy"))


def test_results_without_their_spec_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile, match="what ran there is not known"):
        spec_of_results(tmp_path / "results", RAN.model, ())


pytestmark = pytest.mark.usefixtures("shared")

TINY = "tests/browser/tiny_model.py"


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli.app, ["pipeline", TINY, "--repeats", "0", "--no-store", *arguments])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


@pytest.mark.slow
def test_the_plan_of_a_file_runs_again_unless_an_option_says_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "split [two].yaml"

    def read(*arguments: str) -> dict[str, Any]:
        return json.loads(run(*arguments, "--no-predict", "--json").stdout)

    first = read("--stages", "2", "--microbatches", "4", "--policy", "every-2", "--out", str(path))
    assert policy_file.load(str(path)).pipeline is not None
    assert first["n_splitting_equal"] == first["n_gradients"] > 0
    again = read("--policy", str(path), "--schedule", "GPipe")
    asked, plan = first["spec"]["plan"], again["spec"]["plan"]
    assert plan == {**asked, "schedule": "GPipe"} and again["spec"]["policy"] == first["spec"]["policy"]


def test_a_place_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    for option in ("--out", "--save"):
        refused = run(option, str(tmp_path), code=2).stderr
        assert "cannot be written: it is a folder" in refused and "microbatch" not in refused


def test_options_that_say_what_to_run_do_not_stand_beside_results(tmp_path: Path) -> None:
    (tmp_path / "run_spec.json").write_bytes(to_json(RAN))
    refused = run("--results", str(tmp_path), "--seed", "0", code=2).stderr
    assert "--seed, --repeats cannot change it" in refused and "--no-store" not in refused


PLAN = pipelines.planned(GRAPH)


def printed(capsys: pytest.CaptureFixture[str], cap_bytes: int | None = None, **changes: object) -> str:
    run = replace(pipelines.ran(GRAPH, RunSpec(model=GRAPH.model, plan=PLAN), n_moved=2), **changes)
    joint = None if cap_bytes is None else JointPlan(
        plan=PLAN, policy=Policy(), cap_bytes=cap_bytes, makespan_ms=1.0, rank_bytes=(1,), n_judged=1,
    )  # fmt: skip
    print_pipeline(run, joint)
    return capsys.readouterr().out


def test_every_rank_and_every_share_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    run = pipelines.ran(GRAPH, RunSpec(model=GRAPH.model, plan=PLAN), n_moved=2)
    text = printed(capsys)
    assert run.timing is not None and f"step {run.timing.makespan_ms:.1f} ms measured actions, composed" in text
    assert all(memory.peak_action in text for memory in run.memory)
    n = len(run.gradients)
    (row,) = [line.split() for line in text.splitlines() if "moved by splitting" in line]
    assert row[3:8] == [str(n - 2), "of", str(n), "0", "2"], "bitwise equal, by rounding, different"
    assert all(note in text for note in run.notes)
    assert "wall time of the ranks, links included" in printed(capsys, wall=run.composed)


def test_a_cap_is_kept_or_missed(capsys: pytest.CaptureFixture[str]) -> None:
    most = pipelines.ran(GRAPH, RunSpec(model=GRAPH.model, plan=PLAN)).fullest_bytes
    assert " kept: the fullest rank holds " in printed(capsys, cap_bytes=most)
    assert " missed: rank " in printed(capsys, cap_bytes=most - 1)


def test_a_run_without_times_prints_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, composed=None, gradients=())
    assert "step" not in text and "moved by" not in text and "2 stages" in text


def test_a_schedule_that_does_not_exist_is_one_sentence_with_the_nearest(tmp_path: Path) -> None:
    assert "Did you mean 1F1B" in run("--schedule", "1f1b", code=2).stderr
