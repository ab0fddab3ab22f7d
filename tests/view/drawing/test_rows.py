"""Rows of a chart cover the model once, in module order, and stay few."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from explorer.plan.names import is_within
from explorer.view.drawing.rows import MAX_ROWS, rows_of

names = st.sampled_from(["a", "b", "0", "1", "2", "layer1", "encoder_layer_0", "conv"])
trees = st.lists(st.lists(names, min_size=1, max_size=4).map(".".join), max_size=40)


def closed(fqns: list[str]) -> list[str]:
    """With all ancestors in front, as a module lists them."""
    return list(dict.fromkeys(".".join(f.split(".")[:i]) for f in fqns for i in range(len(f.split(".")) + 1) if f))


@given(trees)
def test_each_leaf_is_in_exactly_one_row(fqns: list[str]) -> None:
    tree = closed(fqns)
    rows = rows_of(tree).rows
    leaves = [fqn for fqn in tree if fqn and not any(other.startswith(f"{fqn}.") for other in tree)]
    for leaf in leaves:
        assert sum(is_within(leaf, fqn) for row in rows for fqn in row.fqns) == 1


@given(trees)
def test_index_finds_the_row_that_covers(fqns: list[str]) -> None:
    tree = closed(fqns)
    rows = rows_of(tree)
    for fqn in tree:
        i = rows.index(fqn)
        covers = [j for j, row in enumerate(rows.rows) if any(is_within(fqn, top) for top in row.fqns)]
        assert ([i] if i >= 0 else []) == covers


def test_a_gpt_has_one_row_a_block() -> None:
    tree = ["", "embedding", "blocks"]
    tree += [f"blocks.{i}{part}" for i in range(12) for part in ("", ".attention", ".mlp")]
    labels = [row.label for row in rows_of([*tree, "norm", "head"]).rows]
    assert labels == ["embedding", *(f"blocks.{i}" for i in range(12)), "norm", "head"]


def test_a_resnet_is_opened_inside_its_layers() -> None:
    tree = ["", "conv1", *(f"layer{i}{part}" for i in range(1, 4) for part in ("", ".0", ".0.conv", ".1", ".1.conv"))]
    labels = [row.label for row in rows_of(tree).rows]
    assert labels == ["conv1", *(f"layer{i}.{j}" for i in range(1, 4) for j in range(2))]


def test_two_hundred_blocks_share_rows_in_order() -> None:
    tree = ["", "embedding", "blocks", *(f"blocks.{i}" for i in range(200)), "head"]
    rows = rows_of(tree).rows
    assert len(rows) <= MAX_ROWS
    assert [fqn for row in rows for fqn in row.fqns] == ["embedding", *(f"blocks.{i}" for i in range(200)), "head"]
    assert rows[1].label == "blocks.0 to blocks.9"


def test_a_model_without_children_is_its_own_row() -> None:
    assert [row.label for row in rows_of([""]).rows] == ["(model itself)"]
    assert rows_of([""]).index("") == 0
