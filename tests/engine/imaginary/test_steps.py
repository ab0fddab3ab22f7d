"""`--card` beside torch's own code on imaginary cards: a few rows of `benchmarks/imaginary/steps.py`."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.imaginary.steps import CHOICES, answers, rows
from tests.engine.imaginary.test_run import has_cuda_build

ROWS = (
    "gpt all bfloat16 adamw 10.0,",
    "tied_lm every-2 bfloat16 adamw 10.0,",
    "vit sqrt none none 10.0,",
    "gpt all none own-adamw 10.0,",
    "mlp every-2 none adamw 10.0,",
    "mlp keep-products none sgd 7.5,expandable_segments:True",
    "tied_lm all none none 7.5,expandable_segments:True",
    "gpt keep-all none forward 7.5,expandable_segments:True",
    "vit keep-products bfloat16 adamw 8.9,garbage_collection_threshold:0.8",
    "recurrent keep-all none sgd 8.9,garbage_collection_threshold:0.8",
    "gpt every-2 none adamw 9.0,roundup_power2_divisions:4",
    "mlp all bfloat16 forward 9.0,roundup_power2_divisions:4",
    "tied_lm sqrt none sgd 8.0,max_split_size_mb:64",
    "vit all bfloat16 none 8.0,max_split_size_mb:64",
)
"""Model, policy, type, step and capability; then options of the allocator."""


SEGMENT_BYTES = 2 << 20
"""A small segment: what a row names as unknown may begin one more, in which nothing of the peak lies."""


def is_as_counted(result: dict[str, Any]) -> bool:
    """Whether allocated and reserved bytes are torch's own; a row with unknown workspaces may reserve one segment."""
    if "counted" not in result:
        return False
    (allocated, reserved), (counted, kept) = result["predicted"], result["counted"]
    beside = SEGMENT_BYTES if result.get("unknown") else 0
    return bool(allocated == counted and abs(reserved - kept) <= beside)


@has_cuda_build
def test_allocated_and_reserved_peaks_of_steps_are_those_of_torch() -> None:
    chosen = []
    for row in ROWS:
        words, _, options = row.partition(",")
        name, *rest = words.split()
        chosen.append(dict(zip(CHOICES, [f"sample_models/{name}.py", *rest, options])))
    results = list(answers(chosen))
    assert len(results) == len(ROWS)
    assert not {" ".join(row.values()): result for row, result in results if not is_as_counted(result)}


@pytest.mark.parametrize("most", [None, 12])
def test_every_pair_of_choices_is_drawn_and_the_first_rows_are_the_same(most: int | None) -> None:
    chosen = rows(most)
    assert chosen == rows()[:most]
    if most is None:
        for one in CHOICES:
            for other in CHOICES:
                pairs = {(row[one], row[other]) for row in chosen}
                expected = len(CHOICES[one]) * (len(CHOICES[other]) if one != other else 1)
                assert len(pairs) == expected, (one, other)
