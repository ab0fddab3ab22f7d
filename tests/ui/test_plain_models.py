"""The plainest models with the engine's own answers: tabs are drawn, the guided path begins, and nothing raises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from explorer.errors import ExplorerError
from explorer.jobs.store import Store
from explorer.jobs.worker import answer
from explorer.plan.catalogue import own_samples
from explorer.record.failure import failure_of
from explorer.record.plan import silent
from explorer.ui.explore.results import TABS
from explorer.ui.session import backend
from explorer.view.text.lab import STEPS
from tests import graphs
from tests.ui.fake_worker import FakeJob, FakeWorker
from tests.ui.page_driver import App, open_tab, press, texts

FILE = Path(__file__).resolve().parent / "plain_models.py"
FACTORIES = re.findall(r"^def (\w+)\(\):", FILE.read_text(), re.MULTILINE)
WHOLE = ("one_parameter", "buffers_only")
"""Models that have neither blocks nor, the second, a backward: each tab is opened, and the guided path begins."""
ANSWER = re.compile("Measured with everything kept|The run trains nothing")


class EngineWorker(FakeWorker):
    """Answers as the worker does, in this process."""

    def answer(self, job: FakeJob) -> None:
        try:
            job.finish(answer(job.request, silent))
            if job.keep and self.store is not None:
                job.run_id = self.store.save(job.result)
        except ExplorerError as error:
            job.finish(failure=failure_of(error, in_step=False))


@pytest.fixture
def worker() -> FakeWorker:
    return EngineWorker(graphs.gpt(1), store=Store())


@pytest.mark.parametrize("name", FACTORIES)
def test_plain_models_raise_in_no_tab_and_not_on_the_guided_path(
    app: App, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Most models open the plans, where a preset may choose nothing, and one other tab in turn."""
    target = f"{FILE}:{name}"
    monkeypatch.setattr(backend, "samples", lambda: own_samples((target,)))
    at = app(model=target)
    assert ANSWER.search(texts(at)), texts(at)
    if (name == FACTORIES[0] or name in WHOLE) and any(button.key == "tour_begin" for button in at.button):
        at = press(at, "tour_begin")
        for step in STEPS[:4]:
            assert f"**{step.title}**" in texts(at)
            at = press(at, "tour_next")
    place = FACTORIES.index(name)
    for tab in TABS[1:] if name in WHOLE else [TABS[1], TABS[2 + place % len(TABS[2:])]]:
        at = open_tab(at, tab)
        assert [shown.label for shown in at.tabs] == TABS
