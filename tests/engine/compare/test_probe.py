"""State that no list names is found by what it does; a block without it leaves the same step, however often it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from explorer.engine.compare.compare import compare
from explorer.engine.compare.probe import FEWEST, MOST, ProbedStep, probe, probed_step
from explorer.record.plan import silent
from explorer.record.policy import Policy, Unit
from explorer.record.run import RunSpec
from tests.engine import hidden_nets

BLOCKS = ("0", "1", "2")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    os.environ.pop("HIDDEN_NETS_CALLS", None)
    sys.modules.pop("hidden_manager", None)


POLICY = Policy.recompute(BLOCKS)
ENOUGH = hidden_nets.FIRST_CALL + 8
"""Runs that show every effect, however slow the machine is."""


def both_steps(kind: str, policy: Policy = POLICY, n_probes: int = 0) -> ProbedStep:
    return probed_step(RunSpec(model=hidden_nets.ref(kind), policy=policy, n_probes=n_probes), None, silent)


@pytest.mark.parametrize("kind", [hidden.__name__ for hidden in hidden_nets.HIDDEN])
def test_a_late_effect_of_hidden_state_shows(kind: str) -> None:
    probed = both_steps(kind, n_probes=ENOUGH)
    assert probed.first != probed.left


@pytest.mark.parametrize("kind", [harmless.__name__ for harmless in hidden_nets.HARMLESS])
def test_a_block_without_hidden_state_leaves_the_same_step(kind: str) -> None:
    probed = both_steps(kind)
    assert FEWEST <= probed.n_runs <= MOST
    assert probed.first == probed.left and not probed.unlike


TO_THE_END = Policy.recompute(BLOCKS, early_stop=False)
SEGMENT = Policy.recompute([BLOCKS])
REENTRANT = Policy.recompute(["1", "2"], use_reentrant=True)
NESTED = Policy.recompute(["1", "1.fc"])
OFFLOADED = Policy(units=(Unit(blocks=("1",), action="offload"),))


@pytest.mark.parametrize(
    ("kind", "policy", "moves"),
    [
        ("behind_the_last_saved_tensor", TO_THE_END, True),
        ("behind_the_last_saved_tensor", SEGMENT, True),
        ("behind_the_last_saved_tensor", REENTRANT, True),
        ("saves_nothing", TO_THE_END, False),
        ("saves_nothing", SEGMENT, True),
        ("under_gradients_alone", REENTRANT, True),
        ("guarded_count", REENTRANT, False),
        ("installed_package", OFFLOADED, False),
        ("behind_a_child", NESTED, True),
    ],
)
def test_the_probe_runs_what_the_policy_recomputes(kind: str, policy: Policy, moves: bool) -> None:
    probed = both_steps(kind, policy, ENOUGH)
    assert (probed.first != probed.left) is moves


@pytest.mark.parametrize(("kind", "hidden"), [("every_eighth_call", ("1",)), ("restarted_by_each_step", ())])
def test_unlike_recomputes_are_settled_by_real_steps(kind: str, hidden: tuple[str, ...]) -> None:
    probed = both_steps(kind, n_probes=ENOUGH)
    assert probed.first == probed.left and probed.unlike == (("1",),)
    spec = RunSpec(model=hidden_nets.ref(kind), n_probes=ENOUGH)
    assert probe(spec, RunSpec(model=spec.model, n_probes=ENOUGH, policy=POLICY), silent).hidden_state == hidden


def test_a_number_of_runs_is_kept() -> None:
    assert both_steps("nothing", n_probes=70).n_runs == 70


@pytest.mark.parametrize("kind", ["installed_package", "length_of_an_unjudged_log"])
def test_a_comparison_names_the_block_and_is_not_green(kind: str) -> None:
    """Through clean processes: what an earlier run moved in this one is not there."""
    spec = RunSpec(model=hidden_nets.ref(kind), n_repeats=0, n_probes=ENOUGH)
    policed = RunSpec(model=spec.model, n_repeats=0, n_probes=ENOUGH, policy=POLICY)
    comparison = compare(spec, policed)
    assert comparison.hidden_state == ("1",) and comparison.n_probes == ENOUGH
    assert comparison.verdict == "state moved" and "state that no list names in 1" in comparison.moved_twice


def test_a_model_that_cannot_run_is_no_finding() -> None:
    spec = RunSpec(model=hidden_nets.ref("no such kind"))
    result = probe(spec, RunSpec(model=spec.model, policy=Policy.recompute(BLOCKS)), silent)
    assert not result.hidden_state and result.not_probed_because
