"""The plan in a link: what was chosen comes back, what is usual is left out, and all faults are told at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.errors import UnreadableFile
from explorer.ui.pipeline.address import (
    MOST_MICROBATCHES,
    SWITCHES,
    USUAL,
    WORDS,
    SplitChoices,
    cuts_at,
    from_query,
    to_query,
)
from tests import graphs

GRAPH = graphs.unet(3)
choices = st.builds(
    SplitChoices,
    n_microbatches=st.integers(1, MOST_MICROBATCHES),
    schedule=st.sampled_from(WORDS["schedule"]),
    checkpoint=st.sampled_from(WORDS["checkpoint"]),
    n_ranks=st.none() | st.integers(1, 9),
    **{name: st.booleans() for name in SWITCHES},
)


@given(choices, st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_link_restores_choices_and_cuts(chosen: SplitChoices, sizes: list[int]) -> None:
    stages = tuple(tuple(f"b{stage}.{i}" for i in range(size)) for stage, size in enumerate(sizes))
    again, places = from_query(to_query(chosen, stages))
    assert again == chosen
    assert places == [sum(sizes[: n + 1]) for n in range(len(sizes) - 1)]


def test_what_is_usual_is_left_out() -> None:
    assert to_query(USUAL, (("a",), ("b", "c"))) == {"cuts": "1"}
    assert from_query({}) == (USUAL, None)
    assert from_query(to_query(USUAL, (("a", "b"),))) == (USUAL, []), "one stage is a cut nowhere, and said so"


def test_all_faults_are_told_at_once() -> None:
    query = {"microbatches": "0", "ranks": "two", "schedule": "1F2B", "keyed": "yes", "cuts": "3.3"}
    with pytest.raises(UnreadableFile) as told:
        from_query(query)
    assert all(f"{name}={text}" in told.value.sentence for name, text in query.items())
    assert "1F1B" in told.value.sentence, "what was meant, perhaps"


def test_a_cut_stands_where_the_model_allows_one() -> None:
    first, second, third = GRAPH.chain[:3]
    assert cuts_at([2], GRAPH) == [f"{second}>{third}"]
    with pytest.raises(UnreadableFile) as told:
        cuts_at([1, len(GRAPH.chain)], GRAPH)
    assert f"no cut behind {first}: the skip from down0 crosses" in told.value.sentence
    assert f"no place behind block {len(GRAPH.chain)} of {len(GRAPH.chain)}" in told.value.sentence
