"""One run or two as a report: every part is there, failures look in no part whole, recorded steps say so."""

from __future__ import annotations

import re

from msgspec.structs import replace

from explorer.record import Comparison, Environment, Failure, Measurement
from explorer.view.compare.headline import headlines
from explorer.view.report.report import report_text
from tests.view.report.read import besides_figures, figures_in, of


def test_it_says_what_the_strip_says_and_every_part_is_there(pair: Comparison) -> None:
    text = report_text(of(pair))
    for figure in headlines(pair):
        assert figure.value in text and figure.label in text
    for part in ("Memory", "Blocks", "Cost", "Verdict", "Hazards", "Environment"):
        assert f"<h2>{part}</h2>" in text and f'href="#{part.lower()}"' in text
    assert "The policy lowered the peak" in text and "bitwise equal" in text
    assert pair.candidate.environment.torch_version in text
    assert len(figures_in(text)) == 10


def test_one_run_has_its_own_page(pair: Comparison) -> None:
    text = report_text(of(pair.candidate))
    assert "<h2>Memory</h2>" in text and "<h2>Verdict</h2>" not in text and "<h2>Cost</h2>" not in text
    assert list(figures_in(text)) == [
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


def test_the_report_of_a_recorded_step_says_recorded_and_why(pair: Comparison) -> None:
    run = replace(pair.candidate, origin="recorded", recorded_in="train.py:42", times=None)
    text = report_text(of(run))
    cards = re.search(r'<div class="cards">.*?</div></div>', text, re.S)
    assert cards is not None and ">recorded<" in cards[0] and ">measured<" not in cards[0]
    assert "recorded by the same instruments in one step of a script" in text
    assert "The peak of 2.5 MiB lies at the start of backward; it is made of" in text
    assert "baseline" not in besides_figures(text)
    lines = figures_in(text)["memory-timeline"]["data"]
    assert any(line.get("name") == "this run" for line in lines)
    assert all("baseline" not in line.get("name", "") + line.get("hovertemplate", "") for line in lines)
    assert "<td>seed</td>" not in text and "<td>timed steps</td>" not in text and "<td>mode</td>" in text


def test_the_report_of_a_step_that_was_only_foreseen_says_predicted_and_why_not_more(pair: Comparison) -> None:
    run = replace(pair.baseline, origin="predicted", times=None, warnings=("What kernels take is not in it.",))
    text = report_text(of(run))
    cards = re.search(r'<div class="cards">.*?</div></div>', text, re.S)
    assert cards is not None and ">predicted<" in cards[0]
    assert ">measured<" not in cards[0] and ">counted<" not in cards[0]
    assert "Every figure is predicted" in text and "measured by a clock" not in text
    assert "Warning: What kernels take is not in it." in text
