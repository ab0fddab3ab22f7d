"""Flags and layouts for Megatron-LM, read back by the rules of its own documents."""

from __future__ import annotations

import re

import pytest

from explorer.errors import InvalidPlan
from explorer.plan.export.formats import exported
from explorer.record.run import PipelinePlan
from tests.plan.export.runs import LAYERS, file_of


def plan_of(*stages: tuple[str, ...]) -> PipelinePlan:
    return PipelinePlan(stages=stages, n_microbatches=4)


def expanded(layout: str) -> list[str]:
    """Stages as strings of E, t and L: `x*n` repeats a part, `(...)*n` several, `|` separates, commas are ignored."""
    layout = re.sub(r"\(([^)]+)\)\*(\d+)", lambda match: match[1] * int(match[2]), layout.replace(",", ""))
    return re.sub(r"(.)\*(\d+)", lambda match: match[1] * int(match[2]), layout).split("|")


@pytest.mark.parametrize(
    ("chosen", "n", "extra", "missing"),
    [
        ((0, 1, 2), 3, (), ()),
        ((0, 3), 2, (1,), (3,)),
        ((4,), 1, (0,), (4,)),
    ],
)
def test_without_a_plan_it_is_a_prefix(
    chosen: tuple[int, ...], n: int, extra: tuple[int, ...], missing: tuple[int, ...]
) -> None:
    form = exported(file_of(*(LAYERS[i] for i in chosen)), "megatron")
    assert form.text == f"--recompute-granularity full --recompute-method block --recompute-num-layers {n}\n"
    assert form.recomputed == LAYERS[:n]
    assert form.extra == tuple(LAYERS[i] for i in extra) and form.missing == tuple(LAYERS[i] for i in missing)
    assert form.fit == ("exact" if not extra else "approximated")


def test_with_a_plan_it_is_a_prefix_of_every_stage() -> None:
    plan = plan_of(("embed", *LAYERS[:2]), (*LAYERS[2:], "norm", "head"))
    form = exported(file_of("layers.0", "layers.2", plan=plan), "megatron")
    assert form.fit == "exact" and "--recompute-num-layers 1\n" in form.text
    uneven = exported(file_of("layers.2", "layers.3", plan=plan), "megatron")
    assert uneven.recomputed == ("layers.0", "layers.1", "layers.2", "layers.3") and uneven.fit == "approximated"
    assert uneven.extra == ("layers.0", "layers.1")
    none = exported(file_of("layers.4", plan=plan), "megatron")
    assert none.recomputed == () and none.missing == ("layers.4",) and none.text.startswith("#")


@pytest.mark.parametrize(
    ("stages", "layout"),
    [
        ((("embed", *LAYERS[:2]), (*LAYERS[2:], "norm", "head")), "Et*2|t*3L"),
        ((("embed",), LAYERS[:1], LAYERS[1:4], (LAYERS[4], "head")), "E|t|t*3|tL"),
        ((("embed", *LAYERS), ("norm", "head")), "Et*5|L"),
        ((LAYERS[:2], LAYERS[2:]), "Et*2|t*3L"),
    ],
)
def test_a_layout_counts_the_layers_of_each_stage(stages: tuple[tuple[str, ...], ...], layout: str) -> None:
    form = exported(file_of(plan=plan_of(*stages)), "megatron-layout")
    assert form.text == f'--pipeline-model-parallel-layout "{layout}"\n' and form.fit == "exact"
    assert [part.count("t") for part in expanded(layout)] == [sum(fqn in LAYERS for fqn in stage) for stage in stages]


def test_what_a_layout_cannot_say_is_said() -> None:
    for stages, words in (
        ((("embed",), ("dropout", *LAYERS)), "on several stages, and a layout has one embedding"),
        (((*LAYERS, "norm"), ("head",)), "on several stages, and a layout has one head"),
        (((*LAYERS[:2], "middle"), LAYERS[2:]), "middle stands between layers"),
        ((("a",), ("b",)), "No stage holds a numbered layer"),
    ):
        form = exported(file_of(plan=plan_of(*stages)), "megatron-layout")
        assert form.fit == "not expressible" and words in form.reasons[0]
    with pytest.raises(InvalidPlan, match="holds no pipeline plan"):
        exported(file_of("layers.0"), "megatron-layout")
