"""A policy in a few words says what is done with which blocks."""

from __future__ import annotations

from explorer.record import KEEP_ALL, Policy
from explorer.record.plan import Forecast
from explorer.record.policy import Unit
from explorer.view.text.plan import expected, in_words

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


def test_an_operator_is_named_once_and_a_name_that_is_none_is_repeated() -> None:
    of_links = Unit(blocks=("a",), action="save_ops", save_ops=(MM, MM.replace("default", "out"), "bmm"))
    assert in_words(Policy(units=(of_links,))) == "recompute 1 block but keep mm, bmm: a"


def test_what_it_should_do_is_said_as_far_as_it_is_known() -> None:
    assert expected(Forecast(), 100) == ""
    assert expected(Forecast(step_peak_bytes=60, time_ratio=1.16), 100) == "≈ −40 % peak, ×1.16 time"
    assert expected(Forecast(time_ratio=1.16), 100) == "≈ ×1.16 time"
