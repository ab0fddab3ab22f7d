"""Sentences and glossaries of the page."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from explorer.plan.policy.file import evidence_of
from explorer.plan.why.peak import explain
from explorer.record import KEEP_ALL, Comparison, Failure, Measurement, ModelRef, Policy, RunSpec
from explorer.record.plan import Certificate, Forecast, Plan
from explorer.record.policy import Unit
from explorer.ui.runs.table import stored_time
from explorer.view.compare.headline import headlines
from explorer.view.drawing.units import MIB
from explorer.view.memory.timeline import timeline
from explorer.view.text.plan import against_budget, certificate, effects_of_presets, expected, in_words
from explorer.view.text.runs import conditions, figures_of, peak_and_end, stored_flops, what_failed, who_failed
from tests import graphs
from tests.graphs import GRAPH
from tests.view.builders import Book, Chain, compared, measured, on_cuda


def test_a_caching_allocators_peaks_stand_beside_the_drawn_one() -> None:
    run = on_cuda(measured())
    expected = "allocator's peaks: 149.0 MiB requested, 150.0 MiB allocated, 298.0 MiB reserved"
    expected += ", 148.0 MiB of it stranded"
    assert (
        run.headlines()["stranded_bytes"] == (run.step_peak_bytes or 0) - MIB
        and run.headlines()["refused_bytes"] is None
    )
    assert timeline(run).figure.layout.title.subtitle.text.endswith(expected)
    assert expected in headlines(run)[0].tooltip
    table = timeline(run).rows()
    assert max(row["peak reserved (bytes)"] for row in table) == run.peaks.reserved_peak_bytes
    assert max(row["peak allocated (bytes)"] for row in table) == run.step_peak_bytes + 512


def test_conditions_say_what_is_not_usual_and_nothing_else() -> None:
    spec = RunSpec(model=ModelRef(target="m.py", size="small", arguments={"n": 4}))
    assert conditions(spec) == "small, n=4, cpu"
    assert conditions(replace(spec, optimizer_form="fused")) == "small, n=4, cpu, fused optimizer"
    other = msgspec.structs.replace(
        spec, autocast="bfloat16", optimizer="sgd", momentum=0.9, frozen=("a",), n_threads=2
    )
    assert conditions(other) == "small, n=4, cpu, bfloat16 autocast, optimizer sgd, momentum 0.9, frozen a, 2 threads"


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
    pair = failed(candidate=RAISED)
    notes = timeline(pair.baseline, pair.candidate).figure.layout.annotations
    assert any("at least 112.0 MiB, then failed" in note.text.replace("\n", " ") for note in notes)
    run = graphs.measured(GRAPH, RunSpec(model=GRAPH.model))
    short = figures_of(replace(run, failure=REFUSED))
    assert short["Phase of the peak"] == short["Step time"] == short["Forward"] == "not measured"
    assert short["Step peak"].startswith("at least")


def plan_of(proof: Certificate, *, budget: int | None = MIB) -> Plan:
    return Plan(
        policy=Policy.recompute(["a"]), step_peak_bytes=MIB, baseline_step_peak_bytes=2 * MIB, extra_cost=1.0,
        step_cost=10.0, cost_unit="ms", budget_bytes=budget, certificate=proof,
    )  # fmt: skip


@pytest.mark.parametrize(("gap", "budget", "n_segments", "sentence"), [
    (0.0, MIB, 0, "Proven: no other choice among 99 modules, at most one inside another, is faster."),
    (0.0, None, 0, "Proven: no other choice among 99 modules, at most one inside another, needs less memory."),
    (
        0.031,
        MIB,
        24,
        "Nearly proven: no other choice among 75 modules and 24 segments, at most one inside another, is faster by "
        "more than 3.1 %.",
    ),
    (0.0, MIB, 99, "Proven: no other choice among 99 segments, is faster."),
    (1.0, MIB, 98, "The best that was found in time among 1 module and 98 segments; nothing is proven."),
])  # fmt: skip
def test_a_certificate_in_words(gap: float, budget: int | None, n_segments: int, sentence: str) -> None:
    proof = Certificate(bound=1.0, gap=gap, n_candidates=99, n_rows=7, n_solves=1, n_segments=n_segments)
    words, meaning = certificate(plan_of(proof, budget=budget))
    bounded = "" if budget is None else " Bounded: requested bytes."
    assert words == sentence + bounded and "7 moments of the step decided it, 1 call of the solver." in meaning


MM, SDPA = "aten.mm.default", "aten._scaled_dot_product_flash_attention.default"


def test_each_action_has_its_words() -> None:
    assert in_words(KEEP_ALL) == "keep all"
    assert in_words(Policy.recompute(["a", "b"])) == "recompute 2 blocks: a, b"
    assert in_words(Policy.recompute([("a", "b"), "c"])) == "recompute 3 blocks in 2 units: a, b, c"
    assert in_words(Policy.recompute(list("abcdef"))) == "recompute 6 blocks: a ... f"
    assert in_words(Policy.recompute(["h.10.mlp", ("h.9", "h.10"), ("h.2", "h.3")])).endswith(": h.2 ... h.10.mlp")
    mixed = Policy(
        units=(
            Unit(blocks=("a",)),
            Unit(blocks=("b",), action="save_ops", save_ops=(MM, SDPA)),
            Unit(blocks=("c",), action="offload"),
            Unit(blocks=("d",), action="save_ops", save_ops=(MM, SDPA)),
        )
    )
    assert in_words(mixed) == (
        "recompute 1 block: a; recompute 2 blocks but keep mm, _scaled_dot_product_flash_attention: b, d; "
        "offload 1 block: c"
    )
    assert expected(Forecast(), 100) == ""
    assert expected(Forecast(step_peak_bytes=60, time_ratio=1.16), 100) == "≈ −40 % peak, ×1.16 time"
    assert expected(Forecast(time_ratio=1.16), 100) == "≈ ×1.16 time"


EVERY = Forecast(step_peak_bytes=600, time_ratio=1.3, time_ratio_spread=0.1)


@pytest.mark.parametrize(("other", "is_better"), [
    ({"time_ratio": 1.5}, False),
    ({"time_ratio": 1.25}, False),  # within the spread
    ({"time_ratio": 1.19}, True),
    ({"time_ratio": 1.19, "step_peak_bytes": 604}, True),  # the same peak
    ({"time_ratio": 1.19, "step_peak_bytes": 606}, False),
    ({"step_peak_bytes": 594}, True),
    ({"step_peak_bytes": 596}, False),
    ({"step_peak_bytes": 500, "time_ratio": 1.31}, False),
    ({"step_peak_bytes": None}, False),
    ({"time_ratio": None}, False),
])  # fmt: skip
def test_a_preset_is_beaten_by_one_that_is_better_by_more_than_the_noise(
    other: dict[str, float | None], is_better: bool
) -> None:
    named = effects_of_presets({"every-2": EVERY, "all": replace(EVERY, **other)}, 1000)
    assert named["every-2"].endswith("; Recompute all is better") == is_better
    assert effects_of_presets({"every-2": EVERY, "all": Forecast()}, None)["every-2"] == expected(EVERY, None)


@pytest.mark.parametrize(("headlines", "flops", "time"), [
    ({"flop_ratio": 1.333, "time_ratio": 1.25, "time_ratio_spread": 0.02}, "+33 %", "×1.25 ± 0.02"),
    ({"step_ms": 12.3}, "", "12 ms"),
    ({"step_ms": 1.234}, "", "1.23 ms"),
    ({}, "", ""),
])  # fmt: skip
def test_of_stored_headlines(headlines: dict[str, Any], flops: str, time: str) -> None:
    assert (stored_flops(headlines), stored_time(headlines)) == (flops, time)


@pytest.mark.parametrize(("peak_bytes", "colour"), [(5 * MIB, "green"), (5 * MIB + 1, "red")])
def test_a_peak_may_fill_its_budget(peak_bytes: int, colour: str) -> None:
    assert against_budget(peak_bytes, 5 * MIB, measured=True).startswith(f":{colour}[")
