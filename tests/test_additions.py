"""A new preset, schedule, export format or hazard rule is one row: it is offered everywhere without another line.

Verbs: tests/cli/test_main.py. Lessons: tests/lab.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from explorer.plan.export.formats import FORMATS, ExportFormat, exported
from explorer.plan.hazards import known
from explorer.plan.hazards.case import Case
from explorer.plan.policy.presets import PRESETS, Preset, is_preset, preset, preset_titles
from explorer.record.export import Export
from explorer.record.hazard import Hazard
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.policy_file import PolicyFile
from tests.graphs import gpt

ROWS = """
import sys
from explorer.plan.export.formats import FORMATS
from explorer.plan.pipeline.schedules import SCHEDULES
from explorer.plan.policy.presets import PRESETS

PRESETS["first-only"] = PRESETS["all"]
SCHEDULES["Upwards"] = SCHEDULES["GPipe"]
FORMATS["haiku"] = FORMATS["torch"]
from explorer.cli.main import app

app(sys.argv[1:], standalone_mode=False)
"""


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(["compare", "--help"], "first-only"), (["pipeline", "--help"], "Upwards"), (["export", "--help"], "haiku")],
)
def test_the_command_line_offers_a_new_row(root: Path, arguments: list[str], name: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", ROWS, *arguments], cwd=root, capture_output=True, text=True, check=True
    )
    assert name in answer.stdout


def test_a_preset_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Preset(
        name="first-only",
        title="Only the first",
        help="Recompute the first block.",
        choose=lambda graph: Policy.recompute(graph.chain[:1]),
    )
    monkeypatch.setitem(PRESETS, row.name, row)
    graph = gpt(3)
    assert is_preset("first-only") and preset("first-only", graph).blocks == graph.chain[:1]
    assert preset_titles()["first-only"] == "Only the first"


def test_an_export_format_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def haiku(file: PolicyFile) -> Export:
        return Export(target="haiku", written_for="readers", text=f"{len(file.policy.units)}")

    monkeypatch.setitem(FORMATS, "haiku", ExportFormat(name="haiku", title="a haiku", write=haiku))
    assert exported(PolicyFile(policy=KEEP_ALL), "haiku").text == "0"


def test_a_hazard_rule_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def many_blocks(case: Case) -> Iterator[Hazard]:
        yield Hazard(rule="many-blocks", severity="note", blocks=(), sentence="So many.", remedy="Fewer.")

    monkeypatch.setattr(known, "POLICY_RULES", (*known.POLICY_RULES, many_blocks))
    assert [hazard.rule for hazard in known.hazards(gpt(3), KEEP_ALL)] == ["many-blocks"]
