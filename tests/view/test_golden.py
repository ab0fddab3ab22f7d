"""Every chart replays a run that was recorded on a real machine, without torch, and keeps its laws on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from explorer.plan.memory.ledger import held, held_by_role, ledger
from explorer.plan.names import is_within
from explorer.plan.predict.forecaster import prices, prices_of_keeping
from explorer.plan.why.peak import explain
from explorer.record import ROLES, Comparison, Measurement
from explorer.record.base import from_msgpack
from explorer.view.compare.cost import recompute_cost, recompute_time, step_time
from explorer.view.compare.gradients import gradient_chart
from explorer.view.compare.headline import headlines
from explorer.view.memory.blocks import ledger_chart, saved_bytes_chart
from explorer.view.memory.stacked import roles
from explorer.view.memory.timeline import timeline

GOLDEN = sorted((Path(__file__).resolve().parent.parent / "golden").glob("*.msgpack"))


@pytest.fixture(params=GOLDEN, ids=lambda path: path.stem)
def pair(request: pytest.FixtureRequest) -> Comparison:
    return from_msgpack(request.param.read_bytes(), Comparison)


@pytest.fixture(params=["baseline", "candidate"])
def run(pair: Comparison, request: pytest.FixtureRequest) -> Measurement:
    return getattr(pair, request.param)


def test_roles_add_up_at_every_tick(run: Measurement) -> None:
    log = run.allocations
    assert (held_by_role(log).sum(axis=0) == held(log)).all()
    assert held(log).tolist() == log.held_bytes.tolist()
    assert ledger(run).total_bytes == run.step_peak_bytes == run.allocations.held_bytes[run.allocations.peak_tick]


def test_phases_follow_each_other_without_gaps(run: Measurement) -> None:
    assert run.phases[0].first_tick <= 1
    assert run.phases[-1].end_tick == run.allocations.n_ticks + 1
    for one, other in zip(run.phases, run.phases[1:]):
        assert one.end_tick == other.first_tick


def test_recomputed_for_exactly_the_chosen_blocks(pair: Comparison) -> None:
    again = ROLES.index("recomputed")
    assert not held_by_role(pair.baseline.allocations)[again].any()
    log = pair.candidate.allocations
    chosen = pair.candidate.spec.policy.blocks
    recomputed = {log.blocks[block] for block, role in zip(log.block, log.role) if role == again}
    assert recomputed and all(any(is_within(fqn, block) for block in chosen) for fqn in recomputed)
    assert all(pair.candidate.by_fqn[block].n_recompute == 1 for block in chosen)


def test_the_candidate_needs_less_and_computes_more(pair: Comparison) -> None:
    assert pair.candidate.step_peak_bytes < pair.baseline.step_peak_bytes
    assert pair.candidate.total_flops > pair.baseline.total_flops
    assert pair.verdict == "bitwise equal"


def test_every_chart_draws_it(pair: Comparison) -> None:
    figures = [
        timeline(pair.baseline, pair.candidate).figure,
        timeline(pair.baseline, pair.candidate, axis="time").figure,
        roles(pair.candidate).figure,
        roles(pair.candidate, block="blocks.2").figure,
        ledger_chart(ledger(pair.candidate)).figure,
        saved_bytes_chart(pair).figure,
        recompute_cost(pair).figure,
        recompute_time(pair).figure,
        step_time(pair).figure,
    ]
    for fig in figures:
        assert len(fig.data) > 0, fig.layout.title.text
        assert len(fig.to_json()) < 600_000
    assert "bitwise equal" in gradient_chart(pair).figure.layout.annotations[0].text
    line = next(t for t in figures[0].data if t.name == "candidate" and t.mode == "lines+markers")
    assert np.max(line.y) * 1024**2 == pytest.approx(pair.candidate.step_peak_bytes, rel=1e-12)


def test_it_is_explained_and_priced(pair: Comparison) -> None:
    assert explain(pair)[0].startswith("The policy lowered the peak from")
    assert {head.key for head in headlines(pair)} >= {"step_peak_bytes", "verdict", "flop_ratio"}
    (price,) = prices(pair.candidate, ["blocks.1"])
    kept = {price.blocks[0]: price for price in prices_of_keeping(pair.candidate)}
    assert price.peak_change_bytes < 0 < kept["blocks.0"].peak_change_bytes


def test_a_price_comes_true(pair: Comparison) -> None:
    """The candidate recomputes two blocks; both prices of the baseline together are the measured gain."""
    alone = prices(pair.baseline, ["blocks.0", "blocks.2"])
    gain = pair.candidate.step_peak_bytes - pair.baseline.step_peak_bytes
    assert sum(price.peak_change_bytes for price in alone) == pytest.approx(gain, rel=0.01)
