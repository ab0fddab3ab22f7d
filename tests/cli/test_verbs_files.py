"""Verbs that write files or list: report, gallery and export, and one path through all."""

from __future__ import annotations

import json
import pickle
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from explorer.cli.verbs import batch
from explorer.cli.verbs import report as report_verbs
from explorer.cli.verbs.lock import in_one_line
from explorer.jobs import run_file
from explorer.jobs.store import Store
from explorer.plan.catalogue import catalogue
from explorer.plan.planners import front
from explorer.plan.policy import file as policy_file
from explorer.plan.predict.baseline import Sized
from explorer.record import Comparison, Measurement, Policy, RunSpec
from explorer.record.base import from_json, from_msgpack
from explorer.record.files import Export, Move, PolicyFile
from explorer.view.report.explorable import Exhibit
from tests import graphs
from tests.cli.asked import read, run
from tests.exported import LAYERS, TARGETS, file_of, layers_again, run_there
from tests.plan.card.histories import small_document
from tests.view.reports import KINDS

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "cpu.msgpack"


@pytest.fixture
def measured() -> Measurement:
    """A run that brings its graph, as a recorded step does: no model is loaded for its hazards."""
    pair = from_msgpack(GOLDEN.read_bytes(), Comparison)
    return replace(pair.candidate, graph=graphs.gpt(4))


report = partial(run, "report")


def test_a_stored_run_and_a_run_file_give_the_same_report(
    tmp_path: Path, measured: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}  # once: on a busy machine a second search may prove less within its time
    search = front.find_plans
    monkeypatch.setattr(front, "find_plans", lambda *asked: found.get(0) or found.setdefault(0, search(*asked)))
    run_id = Store().save(measured, "my run")
    file = tmp_path / "my.run"
    file.write_bytes(Store().export_file(run_id))
    for which, name in ((run_id, "a.html"), (str(file), "b.html")):
        report(which, "--out", str(tmp_path / name))
    for name, key in (("a.perfetto.json", "traceEvents"), ("a.speedscope.json", "profiles")):
        report(run_id, "--out", str(tmp_path / name))
        assert json.loads((tmp_path / name).read_text())[key]
    text = (tmp_path / "a.html").read_text()
    assert text == (tmp_path / "b.html").read_text()
    assert "<h1>my run</h1>" in text and "<h2>Hazards</h2>" in text


def test_what_cannot_be_reported_is_one_sentence(tmp_path: Path, measured: Measurement) -> None:
    run_id = Store().save(measured)
    assert "Peak" in report(run_id).stdout and "checkpoint-explorer plan" in report(run_id).stdout
    assert "There is no run nonsense" in report("nonsense", "--out", str(tmp_path / "r.html"), code=2).stderr
    assert "cannot be written" in report(run_id, "--out", str(tmp_path), code=2).stderr


def test_every_kind_of_run_is_listed_and_reported(tmp_path: Path, measured: Measurement) -> None:
    assert "No run is stored yet" in report().stdout
    parts = {"ranks": "Ranks", "pipeline": "Schedule"}
    stored = {parts[kind]: Store().save(run) for kind, run in KINDS.items() if kind in parts}
    stored["Memory"] = Store().save(measured, "my run [2]")
    listed = report().stdout
    assert "my run [2]" in listed
    for part, run_id in stored.items():
        assert run_id in listed
        report(run_id, "--out", str(tmp_path / "r.html"))
        assert f"<h2>{part}</h2>" in (tmp_path / "r.html").read_text()
    if pipeline := stored.get("Schedule"):
        assert "no memory timeline" in report(pipeline, "--out", str(tmp_path / "r.perfetto.json"), code=2).stderr


def test_a_memory_snapshot_is_printed(tmp_path: Path) -> None:
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps(small_document()))
    printed = report(str(file)).stdout
    for words in ("as recorded", "expandable_segments:True", "20.0 MiB", "30.0 MiB", "3 events that move memory"):
        assert words in printed
    (device,) = json.loads(report(str(file), "--json").stdout)["devices"]
    assert device["stranded_bytes"] == 16 * 2**20
    assert device["simulated"][0]["stranded_bytes"] == 16 * 2**20
    assert device["at_peak_by_module"] == {"": 4 * 2**20}
    report(str(file), "--out", str(tmp_path / "r.html"))
    assert "<h2>Device 0</h2>" in (tmp_path / "r.html").read_text()
    report(str(file), "--out", str(tmp_path / "r.perfetto.json"))
    assert "bytes held" in (tmp_path / "r.perfetto.json").read_text()
    file.write_bytes(b"\x80\x04cos\nsystem\n.")
    assert "no memory snapshot of torch" in report(str(file), code=2).stderr
    file.write_bytes(pickle.dumps({"segments": []}))
    assert "neither segments nor events" in report(str(file), code=2).stderr


def of_rank(run: Measurement, rank: int, n_ranks: int = 2, step: int = 2) -> bytes:
    recorded = replace(
        run, origin="recorded", rank=rank, n_ranks=n_ranks, recorded_in=f"train.py, step {step}, rank {rank}"
    )
    return run_file.write(run_file.stored_record(recorded))


def test_the_files_that_ranks_wrote_are_one_report_by_their_common_name(tmp_path: Path, measured: Measurement) -> None:
    for rank in (0, 1):
        (tmp_path / f"step2.rank{rank}.explorer").write_bytes(of_rank(measured, rank))
    report(str(tmp_path / "step2.explorer"), "--out", str(tmp_path / "r.html"))
    text = (tmp_path / "r.html").read_text()
    assert "<h1>train.py, step 2, 2 of 2 ranks</h1>" in text and "<h2>Ranks</h2>" in text
    report(str(tmp_path / "step2.rank1.explorer"), "--out", str(tmp_path / "r.html"))
    assert "<h2>Ranks</h2>" not in (tmp_path / "r.html").read_text()
    (tmp_path / "step2.rank1.explorer").write_bytes(of_rank(measured, 1, n_ranks=4, step=3))
    refused = report(str(tmp_path / "step2.explorer"), "--out", str(tmp_path / "r.html"), code=2).stderr
    sentence = (
        "they are of trainings with 2 and 4 ranks; they were recorded in train.py, step 2 and in train.py, step 3"
    )
    assert sentence in " ".join(refused.split())


def exhibits(engine: object, out: Path) -> list[Exhibit]:
    (out / "one.html").write_text("of a slice")
    return [Exhibit(file="one.html", title="One", line="", shelf="Traps")]


@pytest.fixture
def gallery_without_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model has its step, and a slice adds one page."""
    monkeypatch.setattr(report_verbs, "worker", nullcontext)
    of_slices = {"one": SimpleNamespace(exhibits=exhibits)}
    monkeypatch.setattr(report_verbs, "slices", SimpleNamespace(parts=lambda module: of_slices))


def test_every_sample_and_every_exhibit_of_a_slice_has_a_page_that_the_first_one_leads_to(
    gallery_without_worker: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sample has a stored comparison, the other its bundled step."""
    stored, bundled = samples = catalogue()[:2]
    monkeypatch.setattr(report_verbs, "catalogue", lambda: samples)
    spec = RunSpec(model=replace(graphs.gpt(2).model, target=stored.target), policy=Policy.recompute(["blocks.0"]))
    pair = graphs.compared(graphs.gpt(2), spec)
    Store().save(replace(pair, candidate=replace(pair.candidate, graph=graphs.gpt(2))), name="kept from before")
    run("gallery", "--out", str(tmp_path / "pages"))
    pages = {path.name: path.read_text() for path in (tmp_path / "pages").iterdir()}
    expected = {f"{sample.name}.html" for sample in samples} | {"one.html"}
    assert pages.keys() == expected | {"index.html", "plotly.min.js"}
    assert all(len(pages[name]) < 3 * 1024**2 and f'href="{name}"' in pages["index.html"] for name in expected)
    assert "kept from before" in pages[f"{stored.name}.html"]
    text = pages[f"{bundled.name}.html"]
    assert '<section class="explorable"' in text and 'type="range"' in text


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = run("gallery", "--out", str(tmp_path / "file"), code=2).stderr
    assert "could not be made" in refused


@pytest.fixture
def policy(tmp_path: Path) -> str:
    path = tmp_path / "policy.yaml"
    path.write_text(policy_file.dumps(PolicyFile(policy=Policy.recompute(["layers.0", "layers.2"]))))
    return str(path)


def test_the_text_and_what_becomes_of_the_policy(policy: str) -> None:
    answer = run("export", policy, "--to", "fsdp2")
    assert "BLOCKS = (\n    'layers.0',\n    'layers.2',\n)" in answer.stdout
    assert "exact in torch" in answer.stderr and "It recomputes layers.0, layers.2." in answer.stderr


def test_what_the_target_does_can_be_measured(policy: str, tmp_path: Path) -> None:
    told = tmp_path / "as_run.yaml"
    run("export", policy, "--to", "fsdp2", "--as-run", str(told))
    there = Policy.recompute(["layers.0", "layers.2"], running_stats="every_forward")
    assert policy_file.load_policy(told) == there


def test_one_document(policy: str) -> None:
    form = from_json(run("export", policy, "--to", "names", "--json").stdout, Export)
    assert (form.fit, form.recomputed) == ("exact", ("layers.0", "layers.2")) and "layers: [0, 2]" in form.text


def test_an_unknown_target_is_one_sentence(policy: str) -> None:
    told = " ".join(run("export", policy, "--to", "hugingface", code=2).stderr.split())
    assert "There is no exporter hugingface. Did you mean huggingface" in told


@pytest.mark.slow
@pytest.mark.usefixtures("shared")
def test_what_was_chosen_here_runs_there(tmp_path: Path) -> None:
    """The exports of a policy file are files that torch alone runs."""
    policy, model = (str(tmp_path / name) for name in ("policy.yaml", "layers.py:build"))
    (tmp_path / "layers.py").write_text(LAYERS)
    compared = read("compare", model, "--policy", "layers.0,layers.2", "--out", policy, "--repeats", "0", "--no-store")
    assert compared["verdict"] == "bitwise equal"
    for target in TARGETS:
        fit = read("export", policy, "--to", target)
        assert fit["fit"] == "exact" and fit["recomputed"] == ["layers.0", "layers.2"]
        run("export", policy, "--to", target, "--out", str(tmp_path / file_of(target)))
    assert read("check", policy, model)["fresh"]
    outcomes = run_there(tmp_path)
    assert outcomes.keys() == set(TARGETS)
    for target, outcome in outcomes.items():
        assert outcome["same"], target
        assert layers_again(outcome) == {"layers.0", "layers.2"}, (target, outcome)


@pytest.mark.parametrize(("n_causes", "more"), [(1, ""), (2, " (and 1 more)")])
def test_the_line_of_a_lock_counts_the_causes_that_it_leaves_out(n_causes: int, more: str) -> None:
    cause = Move(kind="results", blocks=("a",), sentence="a has other results.", n_bytes=0)
    assert in_one_line([cause] * n_causes) == f"a has other results{more}"


@pytest.mark.parametrize(("limit", "fits"), [(5, True), (4, False), (None, True)])
def test_a_batch_may_fill_the_budget(limit: int | None, *, fits: bool) -> None:
    sized = Sized(size=1, step_peak_bytes=5, event_by_event=False, measurement=None)
    assert batch._fits(sized, graphs.SPEC, limit) is fits
