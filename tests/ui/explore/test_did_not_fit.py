"""A baseline that did not fit is put together from the run that did: its figures say that they are predicted."""

from __future__ import annotations

import msgspec

from explorer.plan.forecast.keep_all import keep_all_from
from explorer.record import KEEP_ALL, Policy
from explorer.record.measurement import Refused
from explorer.ui.explore.headline import Drawn, figures
from explorer.ui.explore.shown import Shown
from explorer.view.words.cut_short import did_not_fit
from tests.view.builders import MIB, measured


def test_the_strip_says_predicted_of_a_baseline_that_nobody_measured() -> None:
    refused = Refused(what="everything kept", policy=KEEP_ALL, held_peak_bytes=60 * MIB, failed_in="forward")
    run = msgspec.structs.replace(measured(recompute=range(6)), refused=(refused,))
    whole = keep_all_from(run)
    assert whole is not None
    said = did_not_fit(run, whole)
    assert "everything kept, at least 60.0 MiB, then refused" in said and said.endswith("MiB (predicted).")
    known = Shown(comparison=None, baseline=whole, baseline_key="whole 1", stale=False, did_not_fit=said)
    strip = {figure.key: figure for figure in figures(known, Drawn(policy=Policy()))}
    assert strip["step_peak_bytes"].origin == strip["saved_after_forward_bytes"].origin == ("predicted",)
    assert strip["time_ratio"].value == "not measured" and strip["time_ratio"].origin == ()
    real = Shown(comparison=None, baseline=measured(), baseline_key="1", stale=False)
    assert figures(real, Drawn(policy=Policy()))[0].origin == ("measured",)
    assert figures(real, Drawn(policy=Policy()))[0].value == strip["step_peak_bytes"].value
