"""A baseline that did not fit is put together from the run that did: its figures say that they are predicted."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from streamlit.testing.v1 import AppTest

from explorer.jobs.protocol import Compare, Measure
from explorer.plan.predict.baseline import keep_all_from
from explorer.record import KEEP_ALL, Policy
from explorer.record.measurement import Refused
from explorer.ui.explore.headline import Drawn, figures
from explorer.ui.explore.shown import Shown
from explorer.view.text.runs import did_not_fit
from tests import graphs
from tests.ui.fake_worker import FakeJob, FakeWorker
from tests.ui.page_driver import say, settle, texts
from tests.view.builders import MIB, measured


def test_the_strip_says_predicted_of_a_baseline_that_nobody_measured() -> None:
    refused = Refused(what="everything kept", policy=KEEP_ALL, held_peak_bytes=60 * MIB, failed_in="forward")
    run = msgspec.structs.replace(measured(recompute=range(6)), refused=(refused,))
    whole = keep_all_from(run)
    assert whole is not None
    line = did_not_fit(run, whole)
    assert "everything kept, at least 60.0 MiB, then refused" in line and line.endswith("MiB (predicted).")
    known = Shown(comparison=None, baseline=whole, baseline_key="whole 1", stale=False, did_not_fit=line)
    strip = {figure.key: figure for figure in figures(known, Drawn(policy=Policy()))}
    assert strip["step_peak_bytes"].origin == strip["saved_after_forward_bytes"].origin == ("predicted",)
    assert strip["time_ratio"].value == "not measured" and strip["time_ratio"].origin == ()
    real = Shown(comparison=None, baseline=measured(), baseline_key="1", stale=False)
    assert figures(real, Drawn(policy=Policy()))[0].origin == ("measured",)
    assert figures(real, Drawn(policy=Policy()))[0].value == strip["step_peak_bytes"].value


def refuse_keep_all(worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> Policy:
    """Everything kept is refused at 90 MiB, every second block recomputed fits."""
    fitting, whole = Policy.recompute(["blocks.0", "blocks.2", "blocks.4"]), worker.answer
    refused = Refused(what="everything kept", policy=KEEP_ALL, held_peak_bytes=90 * MIB, failed_in="forward")

    def answer(job: FakeJob) -> None:
        if isinstance(job.request, Measure):
            run = graphs.measured(worker.graph, msgspec.structs.replace(job.request.spec, policy=fitting))
            job.finish(msgspec.structs.replace(run, refused=(refused,)))
        elif isinstance(job.request, Compare):
            baseline = graphs.measured(worker.graph, job.request.baseline)
            pair = graphs.compared(worker.graph, job.request.candidate)
            job.finish(msgspec.structs.replace(pair, baseline=baseline))
        else:
            whole(job)

    monkeypatch.setattr(worker, "answer", answer)
    return fitting


def test_run_compares_with_what_fitted_and_says_so(
    app: Callable[..., AppTest], worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitting = refuse_keep_all(worker, monkeypatch)
    at = app()
    assert "at least 90.0 MiB, then refused" in unescaped(at)
    at = settle(say(at, on=[f"blocks.{i}" for i in range(6)]).button(key="run").click().run())
    (asked,) = worker.of(Compare)
    assert asked.request.baseline.policy == fitting, "not everything kept: that would be refused again"
    assert "Compared with the run that fitted" in unescaped(at) and "pinned baseline" not in unescaped(at)
    assert "against what fitted" in unescaped(at)


def test_a_refresh_does_not_measure_again_what_did_not_fit(
    app: Callable[..., AppTest], worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_keep_all(worker, monkeypatch)
    app()
    assert "at least 90.0 MiB, then refused" in unescaped(app())
    assert len(worker.of(Measure)) == 1


def unescaped(at: AppTest) -> str:
    """What stands on the page, read by a person: without the marks that keep names from becoming markup."""
    return texts(at).replace("\\", "")


def test_nothing_is_counted_of_a_model_that_was_not_read() -> None:
    known = Shown(comparison=None, baseline=None, baseline_key=None, stale=False)
    strip = {figure.key: figure for figure in figures(known, Drawn(policy=Policy()))}
    assert strip["flop_ratio"].value == "not measured" and strip["flop_ratio"].origin == ()
