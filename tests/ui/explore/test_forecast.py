"""What a toggle would do is said at once, and nothing runs for it."""

from __future__ import annotations

import re

from explorer.jobs.protocol import Compare
from tests.ui.explore.visits import ALL, App, press
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import figures, say, texts


def test_a_toggle_predicts_at_once_and_runs_nothing(app: App, worker: FakeWorker) -> None:
    at = say(app(), on=ALL)
    assert figures(at)["Step peak"] == "104.5 → ≈ 34.5 MiB"
    assert figures(at)["FLOPs"].startswith("≈ +")
    assert "predicted" in texts(at)
    assert not worker.of(Compare)


def test_a_toggle_and_every_preset_say_what_they_would_take_in_time(app: App) -> None:
    at = app()
    assert figures(at)["Step time"] == "102 ms"
    offered = at.get("menu_button")[0].proto.options
    assert "Keep all" in offered
    assert [title for title in offered if title.startswith("Recompute all: ≈ −67 % peak, ×2.0")], offered
    at = say(at, on=ALL)
    assert re.fullmatch(r"≈ ×2\.0\d ± 0\.\d\d", figures(at)["Step time"]), "predicted, with its interval"
    at = press(at, "run")
    assert figures(at)["Step time"].startswith("×1.") and "±" in figures(at)["Step time"]
    shorter = figures(say(at, on=ALL[:5]))["Step time"]
    assert float(shorter.split()[1][1:]) < 1.6, "a whole step that was measured says what the next policy will take"
