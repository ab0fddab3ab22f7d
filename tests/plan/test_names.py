"""Names of blocks, results that a unit may keep, and sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis.strategies import integers

from explorer.errors import BadInput
from explorer.plan import names
from explorer.plan.sizes import from_to, mib_up, parse_bytes
from explorer.record.graph import ModelGraph
from explorer.record.policy import Unit
from tests.graphs import block, graph_of
from tests.view.builders import MIB


def test_a_block_lies_in_itself_in_its_holders_and_in_the_model() -> None:
    assert [names.is_within("a.b", block) for block in ("a.b", "a", "", "a.", "b", "a.b.c")] == [True] * 3 + [False] * 3
    assert not names.is_within("ab", "a")


def test_holders_come_nearest_first() -> None:
    assert list(names.above("a.b.c")) == ["a.b", "a", ""] and list(names.above("")) == []
    assert list(names.lineage("a.b")) == ["a.b", "a", ""] and list(names.lineage("")) == [""]
    assert names.innermost(["a", "a.b", "c"]) == ("a.b", "c") and names.innermost(["", "a"]) == ("a",)


def test_an_operator_goes_by_its_second_name() -> None:
    words = [names.operator_word(name) for name in ("aten.mm.default", "aten.mm.out", "mm", "aten.mm", "")]
    assert words == ["mm", "mm", "mm", "aten.mm", ""]


OPS = ("aten.mm.default", "aten.add_.Tensor", "aten.bernoulli_.float", "aten.exp.default", "aten._softmax.default")


def test_results_that_are_written_in_place() -> None:
    blocks = (block("a", "B", rewritten_ops=("aten.exp.default", "aten.sin.default")), block("b", "B"))
    known = graph_of(*blocks)
    by_name = ("aten.add_.Tensor", "aten.bernoulli_.float")

    def written(*fqns: str, of: ModelGraph | None = known) -> tuple[str, ...]:
        return names.written_results(Unit(blocks=fqns, action="save_ops", save_ops=OPS), of)

    assert written("b", "a") == (*by_name, "aten.exp.default"), "any block of a segment"
    assert written("b") == written("a", of=None) == written("elsewhere") == by_name


def test_products_are_what_flops_are_counted_of_and_nothing_writes_into() -> None:
    flops = {"aten.mm.default": 8, "aten.bmm.default": 4, "aten.gelu.default": 0}
    blocks = (
        block("a", "B", op_flops=flops, rewritten_ops=("aten.bmm.default",)),
        block("b", "B", op_flops={"aten.convolution.default": 2}),
        block("norm", "B"),
    )
    known = graph_of(*blocks)
    assert names.products_kept(("a", "b"), known) == Unit(
        blocks=("a", "b"), action="save_ops", save_ops=("aten.convolution.default", "aten.mm.default")
    )
    assert names.products_kept(("norm",), known) == Unit(blocks=("norm",)), "nothing to keep: recomputed whole"


@pytest.mark.parametrize(("text", "n_bytes"), [
    ("1.5GiB", 1610612736),
    ("800MiB", 838860800),
    ("123456B", 123456),
    ("123456", 123456),
    (" 64 kib ", 65536),
    (".5KiB", 512),
    ("1TiB", 2**40),
    ("0", 0),
])  # fmt: skip
def test_sizes(text: str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@given(integers(0, 2**62))
def test_whole_bytes_are_exact(n_bytes: int) -> None:
    assert parse_bytes(f"{n_bytes}B") == n_bytes


@pytest.mark.parametrize("text", ["", "GiB", "1.5GB", "12MB", "-1", "1e9", "1 2", "1.2.3GiB", "inf"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(("old", "new", "text"), [
    (206 * MIB, 56 * MIB, "206.0 to 56.0 MiB"),
    (15 * MIB, MIB // 2, "15.0 to 0.5 MiB"),
    (15 * MIB, 0.46 * MIB, "15.0 to 0.46 MiB"),
    (98.3 * 1024, 103.1 * 1024, "98.3 to 103.1 KiB"),
    (334_234, 339_251, "326.4 to 331.3 KiB"),
    (0.999 * MIB, 1.0004 * MIB, "0.999 to 1.000 MiB"),
    (2048 * MIB, 300 * MIB, "2.00 to 0.29 GiB"),
    (15 * MIB, 96, "15.0 MiB to 96 B"),
    (100, 10, "100 to 10 B"),
    (216_006_656, 216_006_664, "216,006,656 to 216,006,664 B"),
    (0, 0, "0 to 0 MiB"),
])  # fmt: skip
def test_two_sizes_share_a_unit(old: float, new: float, text: str) -> None:
    assert from_to(old, new) == text


@given(integers(0, 2**45), integers(0, 2**20))
def test_two_sizes_that_differ_read_differently(old: int, more: int) -> None:
    for new in (old + more, max(old - more, 0)):
        before, _, after = from_to(old, new, "|").partition("|")
        numbers = [float(text.split()[0].replace(",", "")) for text in (before, after)]
        assert old == new or numbers[0] != numbers[1] or " " in before, "else each has a unit of its own"


@given(integers(0, 2**45))
def test_what_is_advised_is_no_less_than_what_is_needed(n_bytes: int) -> None:
    assert parse_bytes(mib_up(n_bytes).replace(",", "")) >= n_bytes - 1


@pytest.mark.parametrize(("text", "instead"), [("60 mb", "60MiB"), ("1.5GB", "1.5GiB")])
def test_a_decimal_unit_is_refused_with_what_to_write(text: str, instead: str) -> None:
    with pytest.raises(BadInput, match="not a size") as refused:
        parse_bytes(text)
    assert f"write {instead}." in refused.value.hint and parse_bytes(instead)


def test_blocks_are_counted_in_one_unit_and_the_denominator_stays() -> None:
    def share(*named: str) -> str:
        return names.share_of_blocks(named, ("a.0", "a.1", "a.2"))

    assert share() == "0 of 3 blocks" and share("a.0", "a.2") == "2 of 3 blocks"
    assert share("a", "a.1") == share("") == "3 of 3 blocks"
    assert share("a.0", "a.0.mlp", "a.1.mlp", "a.1.norm") == "2 of 3 blocks, 1 in part"
    assert share("a.0", "head", "stem.conv") == "1 of 3 blocks and 2 more"
    assert names.share_of_blocks(("a", "a.1", "b"), ()) == "2 blocks" and names.share_of_blocks((), ()) == "0 blocks"
    assert names.outermost(("", "a")) == [""] and names.outermost(("a.b", "ab", "a", "a.b.c")) == ["ab", "a"]
