"""One file, no network, small, and with everything in it that the page says about a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from explorer.plan.lessons import lessons
from explorer.record import Comparison, Environment, Failure, Measurement
from explorer.record.base import from_msgpack
from explorer.record.lab import LabChart, LabOutcome, LabSeries
from explorer.view.compare.headline import headlines
from explorer.view.report.gallery import Exhibit, index_text, lesson_text
from explorer.view.report.parts import Reported, ReportOf
from explorer.view.report.report import charts_of, report_text
from tests.view.builders import Chain, compared

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "cpu.msgpack"
MOST_BYTES = 2 * 1024**2


@pytest.fixture(scope="module")
def pair() -> Comparison:
    return from_msgpack(GOLDEN.read_bytes(), Comparison)


def of(run: Reported) -> ReportOf:
    return ReportOf(run=run, name="gpt, every second", created=1e9)


def test_it_fetches_nothing_and_is_small(pair: Comparison) -> None:
    text = report_text(of(pair))
    assert len(text.encode()) < MOST_BYTES
    assert set(re.findall(r"https?://[^\"'< ]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, no address
    assert not re.search(r"<(link|img|iframe)|@import|url\((?!#)|src=", text)
    assert "default-src 'none'" in text


def test_a_deep_model_stays_small() -> None:
    """Twenty bands of two thousand points each: a stretch at one height is one line of the path."""
    deep = compared(Chain(n_blocks=200), recompute=range(0, 200, 2))
    assert len(report_text(of(deep)).encode()) < MOST_BYTES


def test_it_says_what_the_strip_says_and_every_part_is_there(pair: Comparison) -> None:
    text = report_text(of(pair))
    for figure in headlines(pair):
        assert figure.value in text and figure.label in text
    for part in ("Memory", "Blocks", "Cost", "Verdict", "Hazards", "Environment"):
        assert f"<h2>{part}</h2>" in text and f'href="#{part.lower()}"' in text
    assert "The policy lowered the peak" in text and "bitwise equal" in text
    assert pair.candidate.environment.torch_version in text
    assert text.count("<figure") == 10


def test_one_run_has_its_own_page(pair: Comparison) -> None:
    text = report_text(of(pair.candidate))
    assert "<h2>Memory</h2>" in text and "<h2>Verdict</h2>" not in text and "<h2>Cost</h2>" not in text
    assert list(charts_of(pair.candidate)) == [
        "memory-timeline", "bytes-by-role", "bytes-by-block", "alive-at-the-peak", "saved-bytes-by-block",
        "operators-of-the-model",
    ]  # fmt: skip


def test_a_run_that_failed_says_so_and_looks_in_no_part_whole(pair: Comparison) -> None:
    failure = Failure(kind="out of memory", sentence="The step asked for 8 bytes.", hint="Recompute more.")
    text = report_text(of(replace(pair, candidate=replace(pair.candidate, failure=failure))))
    assert "The step asked for 8 bytes." in text and "Recompute more." in text
    assert "nothing is bought, and nothing is proven" in text
    assert "<h2>Cost</h2>" not in text and "The policy lowered the peak" not in text


def test_without_a_timeline_it_still_reports(pair: Comparison) -> None:
    bare = Measurement(
        spec=pair.candidate.spec,
        environment=Environment(
            device="cpu", device_name="<i>", torch_version="2", python_version="3", platform="", n_threads=1
        ),
    )
    text = report_text(of(bare))
    assert "not measured" in text and "&lt;i&gt;" in text and "<h2>Memory</h2>" not in text


def test_a_lesson_and_the_first_page_of_the_gallery() -> None:
    lesson = lessons()[0]
    chart = LabChart(
        kind="bars", title="How far?", x_title="", y_title="n", x=("a",), series=(LabSeries(name="s", y=(1.0,)),)
    )
    outcome = LabOutcome(
        experiment=lesson.name, switches={switch.name: switch.default for switch in lesson.switches}, device="cpu",
        rows=(), chart=chart, findings=("All is well.",), seconds=1.0,
    )  # fmt: skip
    text = lesson_text(lesson, outcome)
    assert lesson.title in text and "All is well." in text and "A real run of 1.0 s on cpu." in text
    index = index_text([Exhibit(file="a b.html", title="A <b>", line="what", shelf="Traps")])
    assert 'href="a b.html"' in index and "A &lt;b&gt;" in index and "<h2>Traps</h2>" in index


def test_the_report_of_a_recorded_step_says_recorded_and_why(pair: Comparison) -> None:
    run = replace(pair.candidate, origin="recorded", recorded_in="train.py:42", times=None)
    text = report_text(of(run))
    cards = re.search(r'<div class="cards">.*?</div></div>', text, re.S)
    assert cards is not None and ">recorded<" in cards[0] and ">measured<" not in cards[0]
    assert "recorded by the same instruments in one step of a script" in text
    assert "The peak of 2.5 MiB lies at the start of backward; it is made of" in text
    assert "baseline" not in text and ">this run<" in text
    assert "<td>seed</td>" not in text and "<td>timed steps</td>" not in text and "<td>mode</td>" in text


def test_the_report_of_a_step_that_was_only_foreseen_says_predicted_and_why_not_more(pair: Comparison) -> None:
    run = replace(pair.baseline, origin="predicted", times=None, warnings=("What kernels take is not in it.",))
    text = report_text(of(run))
    cards = re.search(r'<div class="cards">.*?</div></div>', text, re.S)
    assert cards is not None and ">predicted<" in cards[0]
    assert ">measured<" not in cards[0] and ">counted<" not in cards[0]
    assert "Every figure is predicted" in text and "measured by a clock" not in text
    assert "Warning: What kernels take is not in it." in text
