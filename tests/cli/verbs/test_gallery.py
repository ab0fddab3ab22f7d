"""The gallery: a page for each sample model and each lesson, of a stored run where there is one, else of a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from explorer.cli.main import app
from explorer.cli.verbs import gallery
from explorer.jobs.protocol import Compare, RunLab
from explorer.jobs.store import Store
from explorer.plan.catalogue import catalogue
from explorer.plan.lessons import lessons
from explorer.record import RunSpec
from explorer.record.lab import LabChart, LabOutcome
from explorer.record.policy import Policy
from tests import graphs


class Engine:
    """Knows the answers, and what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()

    def ask(_: Engine, request: Any, *, keep: bool = False) -> Any:
        engine.asked.append(request)
        if isinstance(request, Compare):
            return graphs.compared(graphs.gpt(2), request.candidate)
        assert isinstance(request, RunLab)
        lesson = next(one for one in lessons() if one.name == request.name)
        chart = LabChart(kind="bars", title="", x_title="", y_title="", x=(), series=())
        switches = {switch.name: switch.default for switch in lesson.switches}
        return LabOutcome(
            experiment=lesson.name, switches=switches, device="cpu", rows=(), chart=chart, findings=(), seconds=1.0
        )

    monkeypatch.setattr(gallery, "worker", lambda: engine)
    monkeypatch.setattr(gallery, "ask", ask)
    monkeypatch.setattr(gallery, "describe", lambda *_, **__: graphs.gpt(2))
    return engine


def test_every_sample_and_every_lesson_has_a_page_that_the_first_one_leads_to(engine: Engine, tmp_path: Path) -> None:
    sample = catalogue()[0]
    spec = RunSpec(model=graphs.gpt(2).model, policy=Policy.recompute(["blocks.0"]))
    pair = graphs.compared(graphs.gpt(2), spec)
    model = replace(spec.model, target=sample.target)
    runs = (replace(run, spec=replace(run.spec, model=model)) for run in (pair.baseline, pair.candidate))
    baseline, candidate = runs
    Store().save(replace(pair, baseline=baseline, candidate=candidate), name="kept from before")
    answer = CliRunner().invoke(app, ["gallery", "--out", str(tmp_path / "pages")])
    assert answer.exit_code == 0, (answer.stderr, answer.exception)
    pages = {path.name for path in (tmp_path / "pages").iterdir()}
    expected = {f"{one.name}.html" for one in catalogue()} | {f"lesson-{one.name}.html" for one in lessons()}
    assert pages == expected | {"index.html", "plotly.min.js"}
    assert all((tmp_path / "pages" / name).stat().st_size < 3 * 1024**2 for name in expected)
    first = (tmp_path / "pages" / "index.html").read_text()
    assert all(f'href="{name}"' in first for name in expected)
    compared = [request.baseline.model.target for request in engine.asked if isinstance(request, Compare)]
    assert sorted(compared) == sorted(one.target for one in catalogue()[1:])
    assert "kept from before" in (tmp_path / "pages" / f"{sample.name}.html").read_text()


def test_a_place_that_cannot_be_a_folder_is_refused_before_anything_runs(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = CliRunner().invoke(app, ["gallery", "--out", str(tmp_path / "file")])
    assert answer.exit_code == 2 and not engine.asked
