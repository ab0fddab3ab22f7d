"""The suite for GPUs, on a CPU: its runner goes on after anything, and its checks run on tiny models."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from explorer.engine.bench.measure import measure
from explorer.engine.compare.compare import compare
from explorer.record import RunSpec
from explorer.record.base import to_msgpack
from tests.gpu import kit, runner
from tests.gpu.__main__ import main
from tests.gpu.kit import Bench, Figure, Result, attempt
from tests.gpu.runner import checks_of, files, report, run_all

UNSOUND = """
import os
from tests.gpu.kit import Skipped

VARIANTS = ({"SUITE_VARIANT": "on"},)


def check_passes(bench):
    bench.figure("variant", os.environ.get("SUITE_VARIANT", "off"))


def check_raises(bench):
    bench.figure("before", 1)
    raise ValueError("in the check")


def check_dies(bench):
    print("last words", file=__import__("sys").stderr, flush=True)
    os._exit(7)


def check_finds_faults(bench):
    bench.expect(False, "one thing is wrong")
    bench.expect(False, "another is, too")


def check_is_skipped(bench):
    raise Skipped("not here")
"""


@pytest.fixture
def unsound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "unsound_checks"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "unsound.py").write_text(UNSOUND)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_the_suite_goes_on_after_everything(unsound: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    results = run_all(out, ["--device", "cpu", "--tiny"], folder=unsound, package="unsound_checks", patience=10)
    outcomes = {result.check.removeprefix("unsound.check_"): result.outcome for result in results}
    expected = {
        "passes": "passed",
        "raises": "failed",
        "dies": "crashed",
        "finds_faults": "failed",
        "is_skipped": "skipped",
    }
    assert outcomes == {f"{name} [SUITE_VARIANT=on]": outcome for name, outcome in expected.items()}
    by_name = {result.check.partition(" ")[0]: result for result in results}
    assert by_name["unsound.check_passes"].figures == (Figure("variant", "on"),)
    assert "ended with 7" in by_name["unsound.check_dies"].said and "last words" in by_name["unsound.check_dies"].said
    assert by_name["unsound.check_finds_faults"].said == "one thing is wrong\nanother is, too"
    assert by_name["unsound.check_raises"].figures == (Figure("before", 1),)
    text = (out / "report.md").read_text()
    assert "1 crashed, 2 failed, 1 passed, 1 skipped" in text and "No CUDA device" in text
    assert "in the check" in (out / "unsound.check_raises_SUITE_VARIANT_on_.txt").read_text()


def test_what_no_longer_fits_into_the_time_is_said(
    unsound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "OTHER_SHARE_S", 0.0)
    results = run_all(tmp_path / "out", [], folder=unsound, package="unsound_checks")
    assert {result.outcome for result in results} == {"skipped"} and "was over" in results[0].said


@pytest.mark.parametrize(
    ("share_s", "check_s", "patience", "outcome"),
    [(0.2, 30.0, 1.0, "skipped"), (30.0, 0.2, 1.0, "crashed"), (0.02, 0.01, 10.0, "crashed")],
    ids=["the file's time was over", "it hangs", "limits are multiplied"],
)
def test_a_check_that_did_not_get_its_time_is_no_failure(
    unsound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share_s: float, check_s: float, patience: float,
    outcome: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(runner, "OTHER_SHARE_S", share_s)
    monkeypatch.setattr(runner, "CHECK_LIMIT_S", check_s)
    monkeypatch.setattr(runner, "checks_of", lambda file, package: {"unsound.check_passes": None})
    (result,) = run_all(tmp_path / "out", [], folder=unsound, package="unsound_checks", patience=patience)
    assert result.outcome == outcome and "no result after 0 s" in result.said


def test_without_cuda_it_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["tests.gpu"])
    assert main() == 0
    assert "finds no CUDA device" in capsys.readouterr().out


def test_figures_say_their_units_and_unknown_is_not_zero() -> None:
    figures = (Figure("a", 0.25, "GiB"), Figure("b", 1234567, "bytes"), Figure("c", None), Figure("d", "equal"))
    text = report([Result("x.check_y", "passed", 1.0, figures)])
    assert "a 0.25 GiB; b 1,234,567 bytes; c not measured; d equal" in text


def test_every_file_of_checks_is_found() -> None:
    assert set(files()) >= {"memory", "clocks", "verdicts", "streams", "kernels", "forecasts", "ranks"}
    assert all(checks_of(file) for file in files())
    assert set(runner.SHARES_S) <= set(files()), "a share of a file that is gone"
    assert sum(runner.SHARES_S.values()) <= 480


LONG = {"page.check_a_run_from_the_page", "ranks.check_an_assertion_is_a_result_and_the_worker_lives"}
"""They start a worker; the browser's and the worker's own tests do so on the CPU."""
CHECKS = [name for file in files() for name in checks_of(file) if name not in LONG]


RUNS: dict[tuple[bytes, ...], Any] = {}


def once(run: Callable[..., Any]) -> Callable[..., Any]:
    """Checks share the runs of equal steps."""

    def shared(*specs: RunSpec) -> Any:
        key = tuple(map(to_msgpack, specs))
        if key not in RUNS:
            RUNS[key] = run(*specs)
        return RUNS[key]

    return shared


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_a_check_runs_on_a_cpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "measure", once(measure))
    monkeypatch.setattr(kit, "compare", once(compare))
    bench = Bench("cpu", tmp_path, tiny=True)
    result = attempt(name, checks_of(name.partition(".")[0])[name], bench)
    assert result.outcome in ("passed", "skipped"), result.said
    if result.outcome == "skipped":
        assert "CUDA" in result.said or "CPU" in result.said
