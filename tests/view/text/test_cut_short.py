"""A run that was cut short never looks like a whole one: no arrow, no ratio, no peak, wherever it is read."""

from __future__ import annotations

import msgspec
import pytest

from explorer.plan.policy.file import evidence_of
from explorer.plan.why.peak import explain
from explorer.record import Comparison, Failure, Measurement
from explorer.view.compare.headline import headlines
from explorer.view.memory.timeline import timeline
from explorer.view.text.runs import peak_and_end, what_failed, who_failed
from tests.view.builders import Book, Chain, compared, measured

RAISED = Failure(kind="model raised", sentence="The model raised CheckpointError.")
REFUSED = Failure(kind="out of memory", sentence="Out of memory.")


def cut_short(failure: Failure, *, phase: str = "recompute") -> Measurement:
    """A step that ended in the recompute of layers.5, or in forward; what unwinds behind it only frees."""
    book = Book()
    book.hold("parameter", "layers.5", 100 * 2**20)
    book.phase("forward")
    kept = book.alloc("saved activation", "layers.5", 8 * 2**20)
    if phase == "recompute":
        book.phase("backward")
        book.free(book.alloc("temporary", "head", 2**20))
        book.phase("recompute", "layers.5")
        book.alloc("recomputed", "layers.5", 4 * 2**20)
    book.phase("backward")
    book.free(kept)
    whole = measured(Chain(), range(6))
    return msgspec.structs.replace(
        whole, allocations=book.close(), phases=tuple(book.spans), times=None, failure=failure
    )


def failed(baseline: Failure | None = None, candidate: Failure | None = None) -> Comparison:
    pair = compared(recompute=range(6))
    runs = {
        name: cut_short(failure)
        for name, failure in (("baseline", baseline), ("candidate", candidate))
        if failure is not None
    }
    return msgspec.structs.replace(pair, gradients=(), failure=baseline or candidate, **runs)


@pytest.mark.parametrize(
    "pair",
    [failed(candidate=RAISED), failed(baseline=REFUSED), msgspec.structs.replace(compared(), failure=RAISED)],
    ids=["candidate", "baseline", "while it was judged"],
)
def test_nothing_reads_like_a_win(pair: Comparison) -> None:
    assert not pair.comparable
    assert pair.headlines()["flop_ratio"] is None and pair.headlines()["time_ratio"] is None
    for head in headlines(pair):
        assert "→" not in head.value and "%" not in head.value + head.delta, head
        assert head.tone != "good", head
    assert explain(pair) == ()
    assert evidence_of(pair) is None
    assert "%" not in timeline(pair.baseline, pair.candidate).alt or pair.candidate.complete


def test_a_part_of_a_step_has_no_headline_figure() -> None:
    run = cut_short(RAISED)
    figures = run.headlines()
    assert figures["complete"] is False and figures["held_peak_bytes"] == 112 * 2**20
    silent = set(figures) - {"complete", "failed_in", "held_peak_bytes"}
    assert all(figures[name] is None for name in silent), figures


def test_it_says_where_and_how_much() -> None:
    assert cut_short(RAISED).failed_in == "the recompute of layers.5"
    assert cut_short(REFUSED, phase="forward").failed_in == "forward"
    assert peak_and_end(cut_short(REFUSED)) == "at least 112.0 MiB, then refused"
    assert what_failed(failed(candidate=RAISED)) == "candidate failed in the recompute of layers.5"
    assert what_failed(failed(baseline=REFUSED)) == "baseline refused in the recompute of layers.5"
    assert what_failed(compared()) == ""
    assert who_failed(failed(candidate=RAISED)) == "candidate failed"
    strip = {head.key: head for head in headlines(failed(baseline=REFUSED))}
    assert strip["step_peak_bytes"].delta == "baseline at least 112.0 MiB, then refused"


def test_a_failure_behind_the_recorded_step_has_no_place() -> None:
    assert msgspec.structs.replace(measured(), failure=RAISED).failed_in == ""


def test_its_line_is_drawn_and_named() -> None:
    pair = failed(candidate=RAISED)
    words = [note.text.replace("\n", " ") for note in timeline(pair.baseline, pair.candidate).figure.layout.annotations]
    assert any("at least 112.0 MiB, then failed" in word for word in words), words
