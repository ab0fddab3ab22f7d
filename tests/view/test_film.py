"""The film of a step: what its frames hold against the ledger of the same event, and the order of its blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from msgspec.structs import replace

from explorer.plan.memory.ledger import ledger
from explorer.plan.sizes import mib
from explorer.record.allocations import FIXED_ROLES
from explorer.record.base import from_msgpack
from explorer.record.comparison import Comparison
from explorer.record.measurement import Measurement
from explorer.view.memory.film import Film, film
from tests.view import builders

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "cpu.msgpack"


@pytest.fixture(scope="module")
def pair() -> Comparison:
    return from_msgpack(GOLDEN.read_bytes(), Comparison)


def played(run: Measurement) -> Film:
    """The film of a run whose tick t stands at t."""
    assert run.allocations is not None
    made = film(run, np.arange(run.allocations.n_ticks + 1, dtype=np.float64))
    assert made is not None
    return made


def holds_what_the_ledger_holds(run: Measurement) -> None:
    made = played(run)
    held = [0] * len(made.rows)
    most = [0] * len(made.rows)
    for frame in made.frames:
        for row, n_bytes in frame.changes:
            assert held[row] != n_bytes
            held[row] = n_bytes
        most = [max(pair) for pair in zip(most, held)]
        there = ledger(run, int(frame.x))
        assert frame.held == mib(there.total_bytes)
        for (_, fqns), n_bytes in zip(made.rows, held):
            cells = [cell for cell in there.cells if cell.role not in FIXED_ROLES]
            inside = [cell for cell in cells if any(f"{cell.block}.".startswith(f"{fqn}.") for fqn in fqns)]
            assert sum(cell.n_bytes for cell in inside) == n_bytes
    assert made.most == most


@given(builders.runs())
def test_each_frame_holds_what_the_ledger_holds_at_its_end(run: Measurement) -> None:
    holds_what_the_ledger_holds(run)


@pytest.mark.parametrize("side", ["baseline", "candidate"])
def test_each_frame_of_a_real_step_holds_what_the_ledger_holds_at_its_end(pair: Comparison, side: str) -> None:
    holds_what_the_ledger_holds(getattr(pair, side))


def blocks_in(made: Film, phase: str) -> list[str]:
    """Labels of the blocks of a phase in the order of its frames, each stretch once."""
    labels = [made.rows[frame.row][0] for frame in made.frames if frame.phase == phase and frame.row is not None]
    return [label for before, label in zip(["", *labels], labels) if label != before]


@given(builders.runs())
def test_forward_goes_down_backward_goes_up_and_each_recompute_is_shown(run: Measurement) -> None:
    made = played(run)
    chain = [label for label, _ in made.rows if label.startswith("layers.")]
    inside = {phase: [x for x in blocks_in(made, phase) if x in chain] for phase in ("forward", "backward")}
    assert inside == {"forward": chain, "backward": chain[::-1]}
    assert blocks_in(made, "recompute") == [span.block for span in run.phases if span.phase == "recompute"]


def test_blocks_of_a_long_model_share_rows() -> None:
    made = played(builders.measured(builders.Chain(n_blocks=250)))
    assert len(made.rows) <= 200
    assert sum(len(fqns) for _, fqns in made.rows if fqns[0].startswith("layers.")) == 250


def test_a_run_without_a_timeline_has_no_film(pair: Comparison) -> None:
    assert film(replace(pair.baseline, allocations=None), np.zeros(1)) is None
