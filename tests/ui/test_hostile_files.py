"""No page loads what a link, a run file or a policy file names; what is not offered is one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from streamlit.testing.v1 import AppTest

from explorer.jobs import run_file
from explorer.jobs.protocol import DrawAutograd
from explorer.jobs.store import Store
from explorer.plan.policy import file as policy_file
from explorer.record import ModelRef, RunSpec
from explorer.record.files import PolicyFile
from explorer.ui.session import address, repository
from explorer.ui.shared.download import report_bytes
from tests import graphs
from tests.hostile import Trap
from tests.ui.conftest import SAMPLES
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import at_address, texts
from tests.view.builders import compared, measured
from tests.view.reports import KINDS

PAGES = ("explore", "pipeline", "lab", "runs")
GRAPH = graphs.gpt(4)


@pytest.fixture
def trap(tmp_path: Path) -> Trap:
    return Trap(tmp_path)


@pytest.fixture
def worker() -> FakeWorker:
    return FakeWorker(graphs.gpt(6))


@pytest.fixture
def at_page(app: Callable[..., AppTest], worker: FakeWorker) -> Callable[..., AppTest]:
    """Visits a page of the app; it does not end in a traceback, and asks for offered models alone."""

    def visit(page: str, opens: str = "", policy: bytes = b"", **query: str) -> AppTest:
        ring = f"{page}.ui" if page in ("lab", "pipeline") else f"ui.{page}"
        script = f"from explorer.{ring} import page\npage.page()\n"
        at = at_address(AppTest.from_string(script, default_timeout=60), query)
        at.session_state["pages"] = {name: name for name in PAGES}
        if opens:
            at.session_state[repository.OPENED] = [page, opens]
        for _ in range(2):  # the second run takes over what the worker answered
            at.run()
            assert not at.exception, (page, query, at.exception[0].message)
        if policy:
            at.file_uploader(key="upload_policy").upload("policy.yaml", policy)
            at.run()
            assert not at.exception, at.exception[0].message
        _check(worker)
        return at

    return visit


def _check(worker: FakeWorker) -> None:
    for job in worker.jobs.values():
        for name in job.request.__struct_fields__:
            field = getattr(job.request, name)
            model = field.model if isinstance(field, RunSpec) else field
            if isinstance(model, ModelRef):
                assert model.target in {sample.target for sample in SAMPLES} and not model.weights, job.request
        assert not isinstance(job.request, DrawAutograd)


def links(trap: Trap, text: str) -> list[dict[str, str]]:
    """Addresses that hold `text` wherever they hold one, with and without a model that is offered."""
    spec = trap.filled(RunSpec, text)
    own = msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, target=SAMPLES[0].target))
    names = ("size", "weights", "predict", "job", "cuts", "microbatches", "ranks", "schedule", "checkpoint", "keyed")
    readable = dict.fromkeys((*names, "deferred", "lesson", "experiment", "run"), text)
    return [address.to_query(spec), address.to_query(own), {"model": text, **readable}, readable]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_links_load_nothing_that_is_not_offered(page: str, trap: Trap, at_page: Callable[..., AppTest]) -> None:
    function, factory, _, weights = trap.texts
    for query in (*links(trap, function), links(trap, factory)[0], links(trap, weights)[2]):
        at_page(page, **query)
    assert not trap.mark.exists()


@pytest.mark.slow
def test_hostile_runs_are_listed_opened_and_reported(trap: Trap, at_page: Callable[..., AppTest], store: Store) -> None:
    records: dict[str, Any] = {**KINDS, "measurement": measured(), "comparison": compared()}
    assert {type(record) for record in records.values()} == set(run_file.KINDS.values())
    for i, record in enumerate(records.values()):
        text = trap.texts[i % 4]
        hostile = trap.changed(run_file.with_graph(record, GRAPH), text)
        run_id = store.import_file(run_file.write(run_file.stored_record(hostile, text)))
        if (kind := run_file.kind_of(record)) in repository.PAGES:
            at_page(repository.PAGES[kind], opens=run_id)
        assert report_bytes(run_id)
    at_page("runs")
    assert not trap.mark.exists()


def test_hostile_policies_are_one_sentence(trap: Trap, at_page: Callable[..., AppTest]) -> None:
    files = [policy_file.dumps(trap.filled(PolicyFile, text)) for text in trap.texts[:2]]
    files.append("!!python/object/apply:os.system ['touch mark']")
    for text in files:
        at = at_page("explore", policy=text.encode())
        assert any(words in texts(at) for words in ("has no block", "does not belong")), texts(at)
    assert not trap.mark.exists()
