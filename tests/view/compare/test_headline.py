"""The strip says what the records say, with unit, origin and a sentence."""

from __future__ import annotations

import msgspec

from explorer.record import RngDiff
from explorer.view.compare.headline import headlines
from tests.view.builders import compared, measured, wrong_gradient


def test_a_good_policy() -> None:
    strip = {head.key: head for head in headlines(compared(recompute=range(6)))}
    peak = strip["step_peak_bytes"]
    assert (peak.value, peak.delta, peak.tone) == ("149.0 → 90.0 MiB", "\N{MINUS SIGN}40 %", "good")
    assert (strip["flop_ratio"].value, strip["flop_ratio"].tone) == ("+25 %", "bad")
    assert strip["time_ratio"].value == "×1.20 ± 0.00"
    assert (strip["verdict"].value, strip["verdict"].delta) == ("bitwise equal", "6 of 6 tensors equal")
    assert (strip["n_recompute"].value, strip["n_recompute"].tone) == ("6 of 6 blocks", "neutral")


def test_what_flops_leave_out_stands_beside_them() -> None:
    pair = compared()
    left_out = msgspec.structs.replace(pair.candidate, uncounted_ops={"aten.linalg_qr.default": 12})
    for run in (left_out, msgspec.structs.replace(pair, candidate=left_out)):
        strip = {head.label: head for head in headlines(run)}
        assert "FLOPs leave out aten.linalg_qr.default (12 calls)" in strip["FLOPs"].tooltip
    assert "leave out" not in {head.label: head for head in headlines(pair)}["FLOPs"].tooltip


def test_keys_are_those_of_json() -> None:
    pair = compared()
    known = set(pair.headlines()) | set(pair.candidate.headlines()) | {"n_recompute"}
    assert {head.key for head in headlines(pair)} <= known


def test_a_policy_without_effect_is_bad_news() -> None:
    pair = compared(recompute=[0, 1])
    still = msgspec.structs.replace(
        pair.candidate, blocks=tuple(msgspec.structs.replace(cost, n_recompute=0) for cost in pair.candidate.blocks)
    )
    strip = {head.key: head for head in headlines(msgspec.structs.replace(pair, candidate=still))}
    assert (strip["n_recompute"].value, strip["n_recompute"].delta) == ("0 of 2 blocks", "policy without effect")
    assert strip["n_recompute"].tone == "bad"


def test_wrong_gradients_are_bad_news() -> None:
    pair = msgspec.structs.replace(compared(), gradients=(wrong_gradient("w"),))
    strip = {head.key: head for head in headlines(pair)}
    assert (strip["verdict"].value, strip["verdict"].tone) == ("different", "bad")


def test_unknown_is_said() -> None:
    pair = compared()
    bare = {
        name: msgspec.structs.replace(run, allocations=None, times=None, blocks=())
        for name, run in (("baseline", pair.baseline), ("candidate", pair.candidate))
    }
    for head in headlines(msgspec.structs.replace(pair, **bare)):
        if head.key != "verdict":
            assert "not measured" in head.value, head


def test_one_run_has_no_delta() -> None:
    strip = headlines(measured())
    assert [head.key for head in strip] == ["step_peak_bytes", "saved_after_forward_bytes", "total_flops", "step_ms"]
    assert all(head.delta == "" for head in strip)
    assert headlines(measured(recompute=[0]))[-1].key == "n_recompute"


def test_every_figure_explains_itself() -> None:
    for head in (*headlines(compared()), *headlines(measured())):
        assert head.origin and head.tooltip.endswith(".") and len(head.tooltip) <= 140


def test_the_card_says_how_many_differ_of_how_many() -> None:
    pair = compared(n_gradients=6)
    gone = msgspec.structs.replace(pair.gradients[0], name="unused", presence="neither")
    wrong = (*pair.gradients[:2], *(wrong_gradient(diff.name) for diff in pair.gradients[2:]), gone)
    card = {head.key: head for head in headlines(msgspec.structs.replace(pair, gradients=wrong))}["verdict"]
    assert (card.value, card.delta, card.tone) == ("different", "4 of 6 tensors differ", "bad")
    later = msgspec.structs.replace(pair, later_gradients=(wrong_gradient("layers.0.weight"),))
    card = {head.key: head for head in headlines(later)}["verdict"]
    assert (card.value, card.delta) == ("different", "6 of 6 tensors equal in the first step")


def test_state_that_moved_is_no_good_news() -> None:
    moved = msgspec.structs.replace(compared(), rng=(RngDiff(generator="python", equal=False),))
    card = {head.key: head for head in headlines(moved)}["verdict"]
    assert (card.value, card.delta, card.tone) == ("state moved", "6 of 6 tensors equal", "bad")


def test_figures_of_a_recorded_step_are_recorded_and_what_is_unknown_has_no_origin() -> None:
    run = msgspec.structs.replace(measured(), origin="recorded", recorded_in="train.py:42", times=None)
    strip = {head.key: head for head in headlines(run)}
    assert strip["step_peak_bytes"].origin == strip["saved_after_forward_bytes"].origin == ("recorded",)
    assert strip["total_flops"].origin == ("counted",)
    assert strip["step_ms"].value == "not measured" and strip["step_ms"].origin == ()
