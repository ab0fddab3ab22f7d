"""Blocks by name and by number, and Megatron's flags and layouts, read back by the rules of its documents."""

from __future__ import annotations

import itertools
import re

import pytest
import yaml
from torch import nn

from explorer.errors import InvalidPlan
from explorer.plan.export.formats import exported
from explorer.plan.export.layers import Layers, first_of, fullest_list, layers_of, prefix_of
from explorer.record.policy import Policy, Unit
from explorer.record.policy_file import PolicyFile
from explorer.record.run import PipelinePlan
from tests.plan.export.runs import (
    LAYERS,
    Chain,
    assert_same,
    chain_loss,
    file_of,
    ran_again,
    step,
    untouched,
)


def recompute(model: nn.Module, names: list[str]) -> None:
    """As any program does that takes a list of modules."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for name in names:
        parent, _, index = name.rpartition(".")
        model.get_submodule(parent).register_module(index, checkpoint_wrapper(model.get_submodule(name)))


def test_names_and_numbers_choose_the_same_blocks_and_those_run_again() -> None:
    chosen, model = ("layers.3", "layers.1"), Chain()
    form = exported(file_of(*chosen), "names")
    document = yaml.safe_load(form.text)
    assert document == {"names": ["layers.3", "layers.1"], "numbers": {"layers": [1, 3]}}
    assert form.fit == "exact" and form.recomputed == chosen and form.checked == "executed"
    plain, before = step(model, chain_loss, untouched)
    for names in (document["names"], [f"layers.{i}" for i in document["numbers"]["layers"]]):
        gradients, calls = step(model, chain_loss, lambda model, names=names: recompute(model, names))
        assert ran_again(before, calls, LAYERS) == set(chosen)
        assert_same(plain, gradients)


def test_names_are_of_every_list_and_any_block() -> None:
    blocks = ("enc.0", "dec.1.mlp", "dec.0", "1", "true")
    document = yaml.safe_load(exported(file_of(*blocks), "names").text)
    assert document == {"names": list(blocks), "numbers": {"enc": [0], "dec": [0], "": [1]}}
    assert yaml.safe_load(exported(file_of(), "names").text) == {"names": [], "numbers": {}}
    assert exported(file_of("a", early_stop=False, use_reentrant=True), "names").fit == "exact"


def test_names_say_what_no_name_can() -> None:
    units = (
        Unit(blocks=("a",), action="offload"),
        Unit(blocks=("b",), action="save_ops", save_ops=("aten.mm.default",)),
        Unit(blocks=("c.0", "c.1")),
    )
    form = exported(PolicyFile(policy=Policy(units=units)), "names")
    assert form.fit == "approximated" and yaml.safe_load(form.text)["names"] == ["b", "c.0", "c.1"]
    for words in ("a is offloaded", "b keeps the results", "c.0 and c.1 are recomputed together"):
        assert words in " ".join(form.reasons)


PLAN = PipelinePlan(stages=(("embed", "m.layers.0", "m.layers.1"), ("m.layers.2", "head.0")), n_microbatches=1)


def test_numbers_of_one_list_in_order() -> None:
    assert layers_of(["m.layers.3", "m.layers.1"]) == Layers(parent="m.layers", chosen=(1, 3))
    assert Layers(parent="m", chosen=()).names([2, 0]) == ("m.2", "m.0")


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        (["m.head"], "m.head is no numbered layer"),
        (["a.0", "b.0"], "Layers of a and of b are chosen"),
        ([], "The policy recomputes nothing."),
    ],
)
def test_what_is_no_list_of_layers_is_a_sentence(blocks: list[str], words: str) -> None:
    assert words in str(layers_of(blocks))


def test_the_longest_list_of_the_stages_is_the_models() -> None:
    layers = fullest_list(PLAN)
    assert layers is not None and layers.parent == "m.layers" and layers.stages(PLAN) == [[0, 1], [2]]
    assert fullest_list(PipelinePlan(stages=(("embed",),), n_microbatches=1)) is None


def test_no_other_prefix_differs_less() -> None:
    stages = [[0, 1, 2], [3, 4, 5]]
    for n in range(7):
        for chosen in itertools.combinations(range(6), n):
            differ = [len(set(chosen) ^ set(first_of(stages, k))) for k in range(4)]
            assert differ[prefix_of(stages, chosen)] == min(differ)


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
