"""A run without a result is a result, and the page lives on."""

from __future__ import annotations

import pytest

from explorer.record import Failure
from tests.ui.explore.visits import ALL, App, press
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import figures, say, texts


@pytest.mark.parametrize(
    "kind", ["out of memory", "crash", "time-out", "model raised", "bad input", "not on this device", "internal"]
)
def test_a_failure_is_a_result_and_the_page_lives_on(app: App, worker: FakeWorker, kind: str) -> None:
    worker.fail_with = Failure(
        kind=kind,  # type: ignore[arg-type]
        sentence="Asked for the moon in <b>**blocks.3**</b>.",
        hint="Take less.",
        traceback="Traceback: line 1",
        asked_bytes=2**30,
        free_bytes=2**20,
    )
    at = press(say(app(), on=ALL), "run")
    assert "Asked for the moon in <b>**blocks.3**</b>." in [text.value for text in at.text]
    assert "Take less." in texts(at)
    assert at.code[0].value == "Traceback: line 1"
    worker.fail_with = None
    at = press(at, "run")
    assert figures(at)["Gradients"] == "bitwise equal"
    assert "Asked for the moon" not in texts(at)
