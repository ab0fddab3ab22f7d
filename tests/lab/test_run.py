"""Every lesson under every switch: complete, the same each time, and the world as it was."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch

from explorer.errors import BadInput
from explorer.lab.run import run_lab
from explorer.plan.lessons import lessons
from explorer.record.base import from_msgpack, to_msgpack
from explorer.record.lab import LabOutcome
from tests.lab.running import run

APART = ("nested-skips", "mode-flip")
"""These start processes: a second each, so they are run once a setting and not in the sweep."""


def combinations() -> list[tuple[str, dict[str, str]]]:
    return [
        (lesson.name, dict(zip([switch.name for switch in lesson.switches], values)))
        for lesson in lessons()
        if lesson.name not in APART
        for values in itertools.product(*(switch.values for switch in lesson.switches))
    ]


def test_every_lesson_has_its_function() -> None:
    for lesson in lessons():
        assert callable(importlib.import_module(f"explorer.lab.{lesson.name.replace('-', '_')}").run), lesson.name


@pytest.mark.parametrize(
    ("name", "switches"), combinations(), ids=lambda part: "-".join(part.values()) if isinstance(part, dict) else part
)
def test_an_outcome_is_complete_and_crosses_the_pipe(name: str, switches: dict[str, str]) -> None:
    outcome = run(name, **switches)
    assert outcome.switches == switches and outcome.experiment == name
    assert outcome.findings and all(sentence.endswith(".") for sentence in outcome.findings)
    assert outcome.rows[0].outcome == "baseline"
    assert outcome.chart.title.rstrip(")").endswith(("?", "chance", "raised"))
    assert all(len(series.y) == len(outcome.chart.x) for series in outcome.chart.series)
    assert from_msgpack(to_msgpack(outcome), LabOutcome) == outcome


def test_the_world_is_left_as_found() -> None:
    torch.manual_seed(11)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    run_lab("dropout", {})
    assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == threads


def test_equal_switches_give_equal_figures() -> None:
    first, second = run_lab("dropout", {}), run_lab("dropout", {})
    assert first.rows == second.rows and first.chart == second.chart


def test_unknown_names_are_told_with_what_there_is() -> None:
    with pytest.raises(BadInput, match=r"no experiment 'dropuot'.*dropout"):
        run_lab("dropuot", {})
    with pytest.raises(BadInput, match=r"p cannot be '9'.*no switch 'q'|no switch 'q'.*p cannot be '9'"):
        run_lab("dropout", {"p": "9", "q": "1"})
