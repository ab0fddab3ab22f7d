"""A step that does not fit: the first run goes down until one does, and the baseline is known from that one."""

from __future__ import annotations

import msgspec
import pytest

from explorer.engine.bench.measure import measure, measure_what_fits
from explorer.engine.model.describe import describe
from explorer.plan.policy.presets import preset
from explorer.plan.predict.baseline import keep_all_from
from explorer.plan.predict.forecaster import Forecaster
from explorer.record import ModelRef, RunSpec
from explorer.record.plan import Progress
from explorer.view.text.runs import did_not_fit
from tests.engine.tiny_nets import ref

MIB = 1024**2


@pytest.mark.slow
def test_the_run_that_fits_tells_what_the_one_that_did_not_would_have_needed() -> None:
    spec = RunSpec(model=ModelRef(target="sample_models/gpt.py", size="small"), n_repeats=0)
    graph = describe(spec.model)
    progresses: list[Progress] = []
    run = measure_what_fits(msgspec.structs.replace(spec, memory_limit_bytes=150 * MIB), progresses.append)
    assert run.failure is None and run.spec.policy == preset("all", graph)
    assert any("everything kept does not fit, now every block recomputed: " in one.what for one in progresses)
    real = measure(spec)
    assert real.step_peak_bytes is not None and real.step_peak_bytes > 200 * MIB
    (refused,) = run.refused
    assert refused.what == "everything kept" and refused.policy == spec.policy
    assert refused.held_peak_bytes is not None and refused.held_peak_bytes < real.step_peak_bytes
    whole = keep_all_from(run, graph)
    assert whole is not None and (whole.origin, whole.step_peak_bytes) == ("predicted", real.step_peak_bytes)
    words = did_not_fit(run, whole)
    assert "everything kept, at least" in words and "then refused" in words and words.endswith("MiB (predicted).")
    half = preset("every-2", graph)
    measured = measure(msgspec.structs.replace(spec, policy=half))
    assert Forecaster(run, graph).forecast(half).step_peak_bytes == pytest.approx(measured.step_peak_bytes, rel=1e-4)


@pytest.mark.slow
def test_where_nothing_fits_the_last_attempt_says_so_and_no_figure_looks_whole() -> None:
    """A baseline that ran out of memory has a lower bound and no peak, and nothing is foreseen from it."""
    spec = RunSpec(model=ref("wide", mib=64, depth=3), n_repeats=0, memory_limit_bytes=200 * MIB)
    run = measure_what_fits(spec)
    assert run.failure is not None and run.failure.kind == "out of memory"
    assert [one.what for one in run.refused][:1] == ["everything kept"]
    assert run.step_peak_bytes is None and run.saved_after_forward_bytes is None and run.times is None
    assert {run.headlines()[name] for name in ("step_peak_bytes", "step_ms", "forward_flops")} == {None}
    assert keep_all_from(run) is None
    assert did_not_fit(run, None).endswith("then refused.")


def test_what_fits_is_measured_once() -> None:
    progresses: list[Progress] = []
    run = measure_what_fits(RunSpec(model=ref("wide", mib=1, depth=2), n_repeats=0), progresses.append)
    assert run.failure is None and run.refused == () and not run.spec.policy.units
    assert did_not_fit(run, None) == ""
    assert not any("does not fit" in one.what for one in progresses)


def test_another_failure_is_no_reason_to_go_down() -> None:
    run = measure_what_fits(RunSpec(model=ref("raises"), n_repeats=0))
    assert run.failure is not None and (run.failure.kind, run.refused) == ("model raised", ())
