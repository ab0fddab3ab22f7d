"""Layers by number: of one list or a sentence, stage by stage, and the prefix that differs from a choice the least."""

from __future__ import annotations

import itertools

import pytest

from explorer.plan.export.layers import Layers, first_of, fullest_list, layers_of, prefix_of
from explorer.record.run import PipelinePlan

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
