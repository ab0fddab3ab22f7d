"""Verbs that run a model: measure, compare, check, batch, graph, models, grade and run."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from explorer.cli.verbs import compare as verb
from explorer.cli.verbs import report as report_verb
from explorer.cli.verbs import run as run_verb
from explorer.cli.verbs import show as show_verb
from explorer.jobs import run_file
from explorer.jobs.client import Worker
from explorer.jobs.store import Store
from explorer.pipeline.record.step import PipelineRun
from explorer.plan.challenges import CHALLENGES, Challenge
from explorer.plan.policy import file as policy_file
from explorer.plan.predict.not_predicted import not_predicted
from explorer.plan.why.caveats import why_not_predicted
from explorer.record import ROLES, Comparison, Measurement, ModelGraph, ModelRef, Policy, Unit
from explorer.record.base import from_msgpack, from_plain
from explorer.record.files import PolicyFile
from explorer.record.plan import Forecast
from tests.cli.asked import as_record, read, run

pytestmark = pytest.mark.usefixtures("shared")


def test_measure_prints_the_record_with_its_headlines(shared: Worker, tiny: str, tmp_path: Path) -> None:
    store, saved = Store(shared.store_path), tmp_path / "one.run"
    before = {run.run_id for run in store.list()}
    document = read(
        "measure", tiny, "--policy", "every-2", "--repeats", "2", "--optimizer", "sgd", "--save", str(saved)
    )
    record = as_record(document, Measurement)
    assert record.headlines() == {name: document[name] for name in record.headlines()}
    assert record.spec.policy.blocks == ("blocks.0", "blocks.2") and record.spec.optimizer == "sgd"
    assert record.spec.n_repeats == 2
    assert document["step_peak_bytes"] > document["saved_after_forward_bytes"] > 0
    (run_id,) = {run.run_id for run in store.list()} - before
    assert store.load(run_id) == record == store.load(store.import_file(saved.read_bytes()))
    n_runs = len(store.list())
    text = run("measure", tiny, "--repeats", "2", "--no-store").stdout
    assert "Step peak" in text and "measured" in text and "keep all" in text and len(store.list()) == n_runs


def test_predicted_autocast_is_said_to_be_the_cpus(shared: Worker, tiny: str) -> None:
    asked = ("measure", tiny, "--predict", "--autocast", "bfloat16")
    assert any("Predicted by the CPU's autocast" in warning for warning in read(*asked)["warnings"])
    assert "Predicted by the CPU's autocast: CUDA's lists of operators differ" in " ".join(run(*asked).stdout.split())
    assert not any("autocast" in warning for warning in read(*asked[:3])["warnings"])


@pytest.mark.slow
def test_ranks_of_a_pipeline_are_predicted_within_its_tolerance_of_a_real_run() -> None:
    """The second pipeline copies the first. Nothing but whole blocks has a price."""
    sizes = ("n_layers=2", "width=32", "n_heads=2", "length=64", "batch=8", "vocabulary=64")
    model = ("sample_models/gpt.py", *(part for size in sizes for part in ("--set", size)), "--policy", "every-2")
    model = (*model, "--repeats", "1")
    predicted = read("measure", *model, "--predict", "--ranks", "4", "--pp", "2")
    ran = as_record(read("pipeline", *model, "--stages", "2", "--no-predict", "--cuts", "by-parameters"), PipelineRun)
    assert ran.spec.plan is not None and [tuple(part) for part in predicted["plan"]["stages"]] == [
        *ran.spec.plan.stages
    ]
    assert predicted["n_copies"] == 2 and len(predicted["ranks"]) == len(ran.memory) == 2
    for rank, measured in zip(predicted["ranks"], ran.memory):
        assert rank["peak_bytes"] == pytest.approx(measured.device_bytes, rel=0.025)
    for wrong in (("--fsdp",), ("--ranks", "3")):
        run("measure", *model, "--predict", "--pp", "2", *wrong, code=2)


def test_a_result_that_cannot_be_saved_is_printed_all_the_same(
    shared: Worker, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("an older policy")

    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    result = run("compare", tiny, "--policy", "all", "--quick", "--repeats", "0", "--out", str(path), "--json", code=2)
    assert json.loads(result.stdout)["verdict"] == "bitwise equal"
    assert "No space left on device" in result.stderr
    assert path.read_text() == "an older policy" and len(list(tmp_path.glob("policy*"))) == 1


def test_compare_and_the_policy_file_that_comes_of_it(shared: Worker, tiny: str, tmp_path: Path) -> None:
    path = str(tmp_path / "policy.yaml")
    document = read("compare", tiny, "--policy", "all", "--repeats", "2", "--out", path)
    record = as_record(document, Comparison)
    assert document["verdict"] == record.verdict == "bitwise equal"
    assert document["candidate"]["saved_after_forward_bytes"] < document["baseline"]["saved_after_forward_bytes"]
    file = policy_file.load(path)
    assert file.policy == record.candidate.spec.policy and file.evidence is not None
    assert file.evidence.verdict == "bitwise equal"
    assert file.evidence.step_peak_bytes == record.candidate.step_peak_bytes
    text = run("compare", tiny, "--policy", path, "--repeats", "2", "--quick").stdout
    assert "bitwise equal" in text and "blocks.0" in text

    checked = read("check", path, tiny)
    assert checked["fresh"] and checked["fingerprint"] == file.fingerprint
    assert "Nothing known goes wrong" in run("check", path, tiny).stdout
    assert checked["not_foretold_because"] == ""
    assert not read("check", path, tiny, "--size", "gpu", code=1)["fresh"]
    other = run("measure", tiny, "--policy", path, "--size", "gpu", "--repeats", "0")
    assert "has changed since or is another one: " in other.stderr

    exported = run("export", path, "--to", "torch").stdout
    assert "def apply_checkpointing(model" in exported and "blocks.2" in exported
    run("export", path, "--to", "torch", "--out", str(tmp_path / "applied.py"))
    assert (tmp_path / "applied.py").read_text() == exported


def test_a_difference_is_exit_code_1(shared: Worker, tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("version: 1\npolicy: {units: [blocks.0, blocks.1], preserve_rng_state: false}\n")
    document = read("compare", tiny, "--policy", str(path), "--repeats", "1", code=1)
    assert document["verdict"] == "different" and document["worst"]["name"]
    assert document["worst"]["name"] in run("compare", tiny, "--policy", str(path), "--repeats", "1", code=1).stdout
    assert any(hazard["severity"] == "error" for hazard in read("check", str(path), tiny, code=1)["hazards"])


def test_state_that_moved_twice_is_exit_code_3(shared: Worker, tmp_path: Path) -> None:
    model, out = "tests/engine/trap_nets.py:plain_counter", tmp_path / "policy.yaml"
    arguments = ("compare", model, "--policy", "all", "--repeats", "0", "--out", str(out))
    document = read(*arguments, code=3)
    assert document["verdict"] == "state moved" and document["n_bitwise_equal"] == document["n_gradients"]
    assert document["moved_twice"] == ["n_forwards of 1.trap"]
    evidence = policy_file.load(str(out)).evidence
    assert evidence is not None and evidence.verdict == "state moved"
    printed = run(*arguments, code=3).stdout
    assert "state moved twice: n_forwards of 1.trap" in printed and "(1 → 2)" in printed


NET = """
from torch import nn, randn

def build(n=4):
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(n))), randn(4, 8)
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(NET)
    return f"{tmp_path / 'net.py'}:build"


def test_a_checked_policy_file_measures_and_exports(net: str, tmp_path: Path) -> None:
    by_hand, out = tmp_path / "by_hand.yaml", tmp_path / "policy.yaml"
    by_hand.write_text("version: 1\npolicy: {units: [['0', '1'], ['2', '3']]}\n")
    run("check", str(by_hand), net, "--out", str(out))
    file = policy_file.load(out)
    assert file.policy == Policy.recompute([("0", "1"), ("2", "3")])
    assert file.fingerprint and file.blocks == {"*": 4, "*.*": 8}
    assert "(('0', '1'), 'recompute', ())" in run("export", str(out), "--to", "torch").stdout
    answer = run("compare", net, "--policy", str(out), "--repeats", "0", "--quick", "--json", "--no-store")
    assert json.loads(answer.stdout)["verdict"] == "bitwise equal"


def test_a_changed_model_and_patterns_are_told(net: str, tmp_path: Path) -> None:
    path, out = tmp_path / "policy.yaml", tmp_path / "names.yaml"
    path.write_text("version: 1\npolicy: {units: ['*']}\n")
    assert "names blocks by pattern (*)" in run("export", str(path), "--to", "torch", code=2).stderr
    assert "* stands for 4 units: 0, 1, 2 and 1 more." in run("check", str(path), net, "--out", str(out)).stderr
    document = read("check", str(out), net, "--set", "n=6", code=1)
    assert "* are 6, and were 4" in document["stale_because"] and not document["fresh"]
    assert document["read"]["file"]["policy"]["units"][0]["blocks"] == ["0"]
    fewer = run("check", str(out), net, "--set", "n=2", code=1)
    assert "has no block 2, 3" in fewer.stdout


def test_a_lock_holds_until_the_model_moves(net: str, tmp_path: Path) -> None:
    lock, table = str(tmp_path / "step.lock"), tmp_path / "moved.md"
    run("lock", net, "--policy", "all", "--out", lock)
    path = Path(net.removesuffix(":build"))
    path.write_text(f"{path.read_text()}# the same step\n")
    assert run("lock", net, "--check", lock).stdout == "The training step is as its lock says.\n"
    assert read("lock", net, "--check", lock)["moved"] is False
    path.write_text(path.read_text().replace("nn.Tanh()", "nn.Tanh(), nn.Dropout(0.5)"))
    moved = run("lock", net, "--check", lock, "--markdown", str(table), code=1)
    assert "(4 blocks) is new (Dropout)" in moved.stdout and "`0.2`" in table.read_text()
    assert "names" in run("lock", net, "--set", "n=2", "--check", lock, code=2).stderr
    refused = run("lock", net, "--policy", "sqrt", "--check", lock, code=2).stderr
    assert "--check reads the policy from" in refused and "names sqrt" in refused


SMALL = ("sample_models/mlp.py", "--set", "n_layers=2")


@pytest.mark.slow
def test_the_largest_batch_under_a_policy() -> None:
    figures = read("batch", *SMALL, "--budget", "8MiB", "--policy", "all", "--repeats", "0")
    assert figures["event_by_event"]
    assert figures["predicted_peak_bytes"] == figures["step_peak_bytes"] <= figures["budget_bytes"]
    per_batch = figures["step_peak_bytes"] / figures["largest"]
    assert figures["budget_bytes"] - figures["step_peak_bytes"] < per_batch


@pytest.mark.slow
def test_a_budget_below_a_batch_of_one_says_what_that_needs() -> None:
    refused = run("batch", "sample_models/mlp.py", "--budget", "1MiB", "--repeats", "0", code=2).stderr
    assert "Not even a batch of 1 fits in 1.0 MiB: it needs" in refused and "(predicted)" in refused


def test_the_largest_batch_for_a_card_is_granted_and_one_more_is_refused(shared: Worker) -> None:
    """The larger batch is played by itself: the answer comes from two small batches."""
    asked = [*SMALL, "--predict", "--card", "860MiB"]
    figures = read("batch", *asked)
    assert figures["refused"] is None and figures["event_by_event"] and figures["budget_bytes"] is None
    assert figures["predicted_peak_bytes"] == figures["step_peak_bytes"] < figures["reserved_bytes"] <= 60 * 2**20
    more = read("measure", *asked, "--set", f"batch={figures['largest'] + 1}")
    assert more["refused"]["n_bytes"] == more["refused_bytes"] > 0
    assert "needs a budget" in run("batch", "sample_models/mlp.py", code=2).stderr
    refused = " ".join(run("batch", *asked[:-1], "801MiB", code=2).stderr.split())
    assert "Not even a batch of 1 fits in the 1.0 MiB that" in refused and "MiB reserved (predicted)" in refused


def test_a_comparison_for_a_card_plays_both_steps_and_compares_no_gradient(
    shared: Worker, tiny: str, tmp_path: Path
) -> None:
    asked = (tiny, "--policy", "all", "--predict", "--card", "1GiB")
    document = read("compare", *asked, "--save", str(tmp_path / "run.explorer"))
    sides = document["baseline"], document["candidate"]
    for side, policy in zip(sides, ("keep-all", "all")):
        alone = read("measure", tiny, "--policy", policy, *asked[3:])
        names = ("requested_bytes", "allocated_bytes", "reserved_bytes", "stranded_bytes", "refused")
        assert [side[name] for name in names] == [alone[name] for name in names] and side["refused"] is None
    assert not document["gradients"] and (tmp_path / "run.explorer").exists()
    printed = run("compare", *asked).stdout
    assert "everything kept  by the rules" in printed and "the policy  by the rules" in printed
    assert "not compared" in printed and "Verdict" not in printed
    assert "nothing to probe" in run("compare", *asked, "--quick", code=2).stderr


def test_an_optimizer_of_ones_own_is_played(shared: Worker, tiny: str, tmp_path: Path) -> None:
    """It holds its state twice while a step replaces it, which torch's AdamW never does."""
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "class Twice(torch.optim.Optimizer):\n"
        "    def __init__(self, parameters):\n"
        "        super().__init__(parameters, {})\n"
        "    def step(self):\n"
        "        for p in self.param_groups[0]['params']:\n"
        "            old = self.state[p].get('m', torch.zeros_like(p))\n"
        "            self.state[p]['m'] = 0.9 * old + 0.1 * p.grad.data\n"
    )
    asked = (tiny, "--predict", "--card", "b200", "--own-optimizer", f"{tmp_path / 'own.py'}:Twice")
    own = read("measure", *asked)
    roles = {own["allocations"]["role"][i] for i, born in enumerate(own["allocations"]["born"]) if born == 0}
    assert ROLES.index("optimizer state") in roles and own["reserved_bytes"] > 0
    assert own["phases"][-1]["phase"] == "optimizer"
    assert "a predicted step of one process" in run("measure", tiny, *asked[-2:], code=2).stderr
    assert "has no function" in run("measure", *asked[:-1], f"{tmp_path / 'own.py'}:Gone", code=2).stderr


def test_graph_as_a_tree_and_as_json(shared: Worker, tiny: str, tmp_path: Path) -> None:
    graph = read("graph", tiny)
    assert [block["fqn"] for block in graph["blocks"]][:3] == ["", "blocks", "blocks.0"] and graph["fingerprint"]
    assert "×3" in run("graph", tiny).stdout
    run("graph", tiny, "--json", "--out", str(tmp_path / "graph.json"))
    assert json.loads((tmp_path / "graph.json").read_text()) == graph


def test_models(root: Path) -> None:
    listed = {sample["target"] for sample in read("models")}
    assert listed == {f"sample_models/{path.name}" for path in (root / "sample_models").glob("[!_]*.py")}
    assert "sample_models/gpt.py" in run("models").stdout


def test_challenges_are_listed_and_an_unknown_one_is_one_sentence() -> None:
    assert all(challenge.task in run("grade").stdout for challenge in CHALLENGES.values())
    assert [challenge["name"] for challenge in read("grade")] == list(CHALLENGES)
    assert "There is no challenge gtp. Did you mean gpt" in " ".join(run("grade", "gtp", code=2).stderr.split())


def test_a_policy_is_marked_by_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a model of a blink, with limits that recomputing everything keeps and keeping everything does not."""
    model = ModelRef(target="tests/browser/tiny_model.py")
    small = Challenge(name="tiny", task="Fit it.", model=model, peak_bytes=1_500_000, flop_ratio=2.0, hint="All.")
    monkeypatch.setattr(verb, "CHALLENGES", {"tiny": small})
    document = read("grade", "tiny", "--policy", "all")
    assert document["solved"], document["marks"]
    kept = run("grade", "tiny", code=1).stdout
    assert "not met  step peak at most 1.4 MiB" in kept and "Not solved yet. All." in kept


SCRIPT = """
import sys, torch
from beside import WIDTH
if __name__ == "__main__":
    assert sys.argv == ["train.py", "--lr", "0.1", "--steps", sys.argv[4]], sys.argv
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Tanh()) for _ in range(4)]
    ends = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1)
    model = torch.nn.Sequential(ends[0], torch.nn.Dropout(0.5), *blocks, ends[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]))
    for i in range(int(sys.argv[4])):
        optimizer.zero_grad()
        model(torch.randn(64, WIDTH)).square().mean().backward()
        optimizer.step()
    print(f"{model[0].weight.double().sum():.17e}")
    if i == 4:
        raise ValueError("the script's own")
    sys.exit()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("WIDTH = 32\n")
    gc.collect()  # a record counts the tensors of an earlier training of this process
    return tmp_path


def test_the_script_prints_what_it_prints_alone_and_the_step_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    arguments = ("--lr", "0.1", "--steps", "3")
    watched = run("run", "train.py", "--at", "2", "--on-oom", "oom.explorer", "--", *arguments)
    alone = subprocess.run([sys.executable, "train.py", *arguments], capture_output=True, text=True, check=True).stdout
    assert watched.stdout == alone != ""
    step = from_msgpack(run_file.read((folder / "step2.explorer").read_bytes()).record, Measurement)
    assert step.recorded_in == "train.py, step 2" and step.by_fqn["2"].n_forward == 1 and step.spec.optimizer == "sgd"
    assert "step 2" in watched.stderr and "step 1" not in watched.stderr
    assert [path.name for path in folder.glob("*.explorer")] == ["step2.explorer"], (
        "the first is recorded, not asked for"
    )


def test_what_the_script_raises_is_shown_and_what_was_missed_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    raised = run("run", "train.py", "--at", "1", "--", "--lr", "0.1", "--steps", "5", code=1)
    assert "ValueError: the script's own" in raised.stderr and "Wrote step 1" in raised.stderr
    assert (folder / "step1.explorer").exists()
    missed = run("run", "train.py", "--at", "1", "--at", "2", "--", "--lr", "0.1", "--steps", "1", code=2)
    assert "took 1 step; no file was written of step 2." in " ".join(missed.stderr.split())
    assert "Wrote step 1" in missed.stderr


def test_a_script_without_an_optimizer_and_no_script_at_all_are_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "none.py").write_text("print('done')\n")
    without = run("run", "none.py", "--at", "1", code=2)
    assert "made no optimizer" in without.stderr and without.stdout == "done\n"
    assert "no script" in run("run", "nowhere.py", "--at", "1", code=2).stderr
    assert "made no optimizer" in run("run", "none.py", code=2).stderr


def test_one_command_and_the_verbs_on_its_record(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    text = run("train.py", "--", "--lr", "0.1", "--steps", "4").stdout
    assert text.startswith("train.py is taken for a training script") and "e+" not in text, "it ends after the record"
    assert all(f"\n{label} " in text for label in ("Step", "Peak", "Held by", "Fits", "Helps", "Next"))
    document = read("step2.explorer", "--card", "t4")
    assert document["peak_bytes"] == read("measure", "step2.explorer")["step_peak_bytes"]
    assert document["peak_bytes"] == sum(document["held"].values()) < document["card"]["reserved_bytes"]
    assert "801.0 MiB: no. It refuses" in run("--card", "801MiB", "step2.explorer").stdout
    assert "is no step" in run("run", "train.py", "--at", "two", code=2).stderr
    planned = read("plan", "step2.explorer", "--budget", "80%", "--out", "policy.yaml")
    assert planned["met"] and "taken for a policy" in run("policy.yaml").stdout
    for name in ("measure", "compare"):
        forecast = read(name, "step2.explorer", "--policy", "policy.yaml")
        assert forecast["forecast"]["step_peak_bytes"] == planned["plan"]["step_peak_bytes"]
        assert forecast["gradients"] == "not judged" and forecast["forecast"]["flop_ratio"] > 1
    for name, option in (("measure", "--card=t4"), ("compare", "--dtype=bfloat16"), ("plan", "--accumulate=2")):
        others = ("--policy", "all") if name != "plan" else ("--budget", "80%")
        refused = run(name, "step2.explorer", option, *others, code=2).stderr
        assert f"is a recorded step, and {option.partition('=')[0]} would make another one" in refused
    assert "No such command" in run("mesure", code=2).stderr and run("step2.explorer", "--html", "page.html")
    monkeypatch.setattr(run_verb, "summarize", None)
    with pytest.warns(UserWarning, match="not printed"):
        assert "e" in run("run", "train.py", "--", "--lr", "0.1", "--steps", "3").stdout, "the training goes on"


MADE = '''"""Takes its inference path without targets."""
from torch import nn
from torch.nn import functional as F

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layers = nn.Embedding(16, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16))

    def forward(self, idx, targets=None):
        out = self.layers(self.table(idx))
        return out[:, -1:] if targets is None else (out, F.cross_entropy(out.flatten(0, 1), targets.flatten()))

def build():
    return Words()
'''


def test_the_first_line_of_every_answer_names_the_batch(tmp_path: Path) -> None:
    """A made batch decides what is measured, so no verb keeps it to itself, a refusal included."""
    (path := tmp_path / "net.py").write_text(MADE)
    model, text = str(path), "int64[2, 64], int64[2, 64], made to fit with targets"
    questions: tuple[tuple[str, ...], ...] = (
        ("graph", model),
        ("measure", model, "--predict"),
        ("check", "layers.0", model),
        ("plan", model, "--predict", "--budget", "100%"),
        ("pipeline", model, "--stages", "2", "--no-predict", "--unkeyed"),
    )
    for question in questions:
        answer = run(*question).stdout
        first = next(line for line in answer.splitlines() if line.strip())
        assert text in first, question
        explains = question[0] in ("measure", "plan")
        assert ("worth recomputing?" in answer) is explains
        assert bool(read(*question).get("worth_recomputing")) is explains
    refused = run("plan", model, "--predict", "--budget", "1%", code=2)
    reasons = [row["why no gain"] for row in read("measure", model, "--predict")["worth_recomputing"]]
    assert text in refused.stderr and any(reasons) and all(reason in refused.stderr for reason in reasons)
    assert text in str(read("graph", model)["batch"])
    assert "made to fit with targets" in run("batch", model, "--predict", "--budget", "100KiB").stdout


def test_options_that_an_answer_would_leave_out_are_refused() -> None:
    for option in ("--at=2", "--worst-of=3", "--on-oom=a.explorer", "--stop"):
        assert "about a run without --card" in run("run", "--card", "h100", option, "train.py", code=2).stderr
    assert "Add --lora." in run("measure", "sample_models/mlp.py", "--quantize", "nf4", code=2).stderr
    for name in ("int8", "fp4", "8bit"):
        words = ("measure", "sample_models/mlp.py", "--lora", "r=8,targets=0", "--quantize", name)
        said = run(*words, code=2).stderr
        assert f"--quantize {name} is not offered" in said and "Take --quantize nf4" in said


DEEP = """
import torch
from torch import nn
SIZES = {"small": {"n": 4}, "gpu": {"n": 6}}
def build(n):
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Tanh()) for _ in range(n))), torch.randn(512, 8)
"""
ONE = "import torch\ndef one(): return torch.nn.Linear(4, 4), torch.randn(2, 4)\n"


def test_the_next_command_of_every_answer_runs_and_is_about_the_same_step(
    shared: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("deep.py").write_text(DEEP)
    Path("one.py").write_text(ONE)
    options = ("--size=gpu", "--optimizer=sgd")
    run("graph", "deep.py", "--size=gpu")  # a run is stored with the graph that is known
    run("measure", "deep.py", *options)
    stored = next(row.run_id for row in Store(shared.store_path).list() if row.model == "deep.py")
    monkeypatch.setattr(report_verb, "Store", lambda: Store(shared.store_path))
    for arguments in (("deep.py", *options), ("report", stored), ("one.py:one",), ("one.py:one", "--seed", "3")):
        following = shlex.split(run(*arguments).stdout.splitlines()[-1])
        assert following[:2] == ["Next", "checkpoint-explorer"]
        run(*following[2:])
        if "one.py:one" in arguments:
            assert following[2:4] == ["fit", "one.py:one"], "no policy lowers a Linear's peak"
        else:
            assert following[2] == "plan" and set(options) < set(following)
            Path("policy.yaml").unlink()


def test_gradients_are_not_judged_until_a_comparison_of_the_file_as_it_is_has_judged_them(
    shared: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(show_verb, "Store", lambda: Store(shared.store_path))
    Path("judged.py").write_text(DEEP)
    changes = read("judged.py", "--optimizer", "sgd")["changes"]
    assert {change["gradients"] for change in changes} == {"not judged"}
    policy = PolicyFile(policy=from_plain(changes[-1]["policy"], Policy))
    Path("policy.yaml").write_text(policy_file.dumps(policy))
    run("compare", "judged.py", "--policy", "policy.yaml", "--optimizer", "sgd")
    document = read("judged.py", "--optimizer", "sgd")
    verdicts = {change["peak_bytes"]: change["gradients"] for change in document["changes"]}
    assert verdicts[changes[-1]["peak_bytes"]] == "bitwise equal"
    other = read("judged.py", "--optimizer", "adamw")["changes"]
    assert {change["gradients"] for change in other} == {"not judged"}
    os.utime("judged.py", (time.time() + 60,) * 2)
    later = read("judged.py", "--optimizer", "sgd")["changes"]
    assert {change["gradients"] for change in later} == {"not judged"}


POLICIES = {
    "offload": (Policy(units=(Unit(blocks=("blocks.1",), action="offload"),)), ""),
    "lost gradients": (Policy.recompute(["blocks.0"], use_reentrant=True), "checkpoint of blocks.0 gets no input"),
    "reentrant": (Policy.recompute(["blocks.1"], use_reentrant=True), ""),
}


@pytest.mark.parametrize("name", POLICIES)
def test_every_verb_asks_one_list_of_what_is_not_predicted(name: str, tiny: str, tmp_path: Path) -> None:
    """What no play shows is refused alike, in the sentence of the list; a figure is a figure everywhere."""
    policy, refusal = POLICIES[name]
    graph = from_plain({k: v for k, v in read("graph", tiny).items() if k != "fingerprint"}, ModelGraph)
    (file := tmp_path / "policy.yaml").write_text(policy_file.dumps(policy_file.file_of(policy, graph)))
    peaks = []
    for question in (
        ("measure", tiny, "--predict", "--policy", str(file)),
        ("compare", tiny, "--predict", "--policy", str(file)),
        ("lock", tiny, "--policy", str(file)),
        ("batch", tiny, "--predict", "--budget", "1MiB", "--argument", "width", "--policy", str(file)),
    ):
        if refusal:
            assert refusal in " ".join(run(*question, code=2).stderr.split()), question
        else:
            peaks.append(run(*question).stdout)
    if not refusal:
        mib = re.search(r"Step peak +(\S+)", peaks[0])
        assert mib is not None and f"→ {mib[1]}" in peaks[1]
    checked = run("check", str(file), tiny, code=int(name == "lost gradients"))  # which is a hazard, too
    forecast = not_predicted(policy, graph)  # what the page says of a policy that is only drawn
    assert forecast == why_not_predicted(policy, graph, Forecast()) and forecast in checked.stderr
    assert ("does not cover" in forecast) == (name != "offload")


def test_a_script_that_asks_for_a_gpu_is_answered_by_the_imaginary_card_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nloss = torch.ones(1, requires_grad=True).cuda().sum()\nloss.backward()\n")
    asked: list[str] = []
    monkeypatch.setattr("explorer.own_loop.on_card.check_cuda_build", lambda script: None)
    monkeypatch.setattr(run_verb, "_on_card", lambda request, *_: asked.append(request.card))
    assert "asks for a GPU" in run(str(script), "--card", "t4").stderr
    assert asked == ["t4"]
