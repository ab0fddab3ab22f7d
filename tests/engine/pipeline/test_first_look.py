"""Which stretches are equal, and that equal ones have one price, measured on some of them alone."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import nn

from explorer.engine.pipeline.cut.build import build
from explorer.engine.pipeline.first_look import N_OF_A_KIND, look_at
from explorer.engine.pipeline.profile import N_TIMED, profile_blocks
from explorer.record.policy import KEEP_ALL
from tests.engine.pipeline.pipeline_nets import GATED, LANGUAGE, QUIET
from tests.engine.pipeline.plans import spec

DEEP = ("tokens", *(f"blocks.{k}" for k in range(8)), "head")


@pytest.mark.parametrize(
    ("net", "blocks", "kinds"),
    [
        ("language", LANGUAGE, (0, 1, 1, 1, 4, 5)),  # the norm behind the last block is part of its stretch
        ("gated", GATED, (0, 1, 2, 1, 2, 5)),  # the last one sends to nobody
        ("quiet", QUIET, tuple(range(len(QUIET)))),
    ],
)
def test_equal_are_those_of_one_make_that_hold_the_same(
    net: str, blocks: tuple[str, ...], kinds: tuple[int, ...]
) -> None:
    pipeline = build(spec(net, blocks, len(blocks), n_microbatches=2))
    look = look_at(pipeline, lambda: None)
    assert look.kinds == kinds
    assert look.some_of(look.kinds) == {
        j for j, kind in enumerate(kinds) if sum(other == kind for other in kinds[:j]) < N_OF_A_KIND
    }


def test_equal_blocks_have_one_price_and_most_of_them_are_not_run_for_it() -> None:
    plan = spec("language", DEEP, 2, KEEP_ALL, arguments={"n_blocks": 8})
    n_calls: Counter[str] = Counter()
    seen: list[str] = []
    calls = nn.modules.module.register_module_forward_hook(lambda module, *_: n_calls.update([type(module).__name__]))
    try:
        profile = profile_blocks(
            plan, tuple((fqn,) for fqn in DEEP), lambda one: seen.append(one.what), n_microbatches=4
        )
    finally:
        calls.remove()
    first, *others = profile.blocks[1:8]
    assert all(block.kept == first.kept and block.recomputed == first.recomputed for block in others)
    assert first.kept.forward_ms > 0
    assert "pricing blocks, kept: 4 kinds of 10" in seen
    assert n_calls["Block"] < n_blocks_run_if_each_were_timed(8)


def n_blocks_run_if_each_were_timed(n_blocks: int) -> int:
    """Forwards of two microbatches, of the stretches and of all in one stage, whole and split, kept and recomputed."""
    return 2 * n_blocks * 2 * 2 * 2 * N_TIMED
