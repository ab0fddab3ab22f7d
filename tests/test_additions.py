"""What somebody adds is one file or one row: it is offered everywhere without another line.

Verbs are added in tests/cli/test_command.py, lessons and sample models in tests/plan/test_catalogue.py and tests/lab/.
A job of the worker is a request and a line, which CONTRIBUTING.md names.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from msgspec.structs import replace
from streamlit.testing.v1 import AppTest

from explorer.errors import InvalidPlan
from explorer.pipeline.plan.schedules import SCHEDULES, Condition, Schedule, gpipe, rows_of
from explorer.plan.export.formats import FORMATS, ExportFormat, exported
from explorer.plan.hazards import hazards as rules
from explorer.plan.hazards.checkpoint_rules import Trap
from explorer.plan.policy.presets import PRESETS, Preset, is_preset, preset, preset_titles
from explorer.record.files import Export, PolicyFile
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import PipelinePlan
from explorer.view.report.html import drawn
from tests.graphs import gpt

ROWS = """
from explorer.plan.export.formats import FORMATS
from explorer.pipeline.plan.schedules import SCHEDULES
from explorer.plan.policy.presets import PRESETS

PRESETS["first-only"] = PRESETS["all"]
SCHEDULES["Upwards"] = SCHEDULES["GPipe"]
FORMATS["haiku"] = FORMATS["torch"]
from explorer.cli.main import app

for verb in ("compare", "pipeline", "export"):
    app([verb, "--help"], standalone_mode=False)
"""


def test_the_command_line_offers_a_new_row(root: Path) -> None:
    answer = subprocess.run([sys.executable, "-c", ROWS], cwd=root, capture_output=True, text=True, check=True)
    compare, pipeline, export = answer.stdout.split("Usage: ")[1:]
    assert "first-only" in compare and "Upwards" in pipeline and "haiku" in export


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


def test_a_schedule_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its actions are those of the row, and its conditions refuse a plan that breaks them, as a hazard."""
    few = Condition(rule="few", met=lambda sizes: sizes.n_microbatches < 3, sentence="takes two.", remedy="Take two.")
    row = Schedule(
        name="Upwards",
        generate=lambda n_ranks, n_microbatches, n_local: gpipe(n_ranks, n_microbatches),
        shape="single",
        words="as GPipe does",
        source="this test",
        conditions=(few,),
    )
    monkeypatch.setitem(SCHEDULES, row.name, row)
    graph = gpt(4)
    plan = PipelinePlan(stages=(graph.chain[:2], graph.chain[2:]), n_microbatches=2, schedule="Upwards")
    assert rows_of(plan) == gpipe(2, 2)
    assert "few" not in {hazard.rule for hazard in rules.hazards(graph, KEEP_ALL, plan)}
    larger = replace(plan, n_microbatches=4)
    with pytest.raises(InvalidPlan, match="Upwards takes two"):
        rows_of(larger)
    assert "few" in {hazard.rule for hazard in rules.hazards(graph, KEEP_ALL, larger)}


CHART = '''"""How many of each."""

from explorer.view.drawing.figure import Chart
from explorer.view.drawing.figure import figure


def one_more() -> Chart:
    fig = figure("How many?", "seven apples")
    fig.add_bar(x=[7], y=["apples"], orientation="h")
    return Chart(name="one more", figure=fig, alt="Seven apples.", rows=lambda: [{"fruit": "apples", "n": 7}])
'''


def page_of_a_chart() -> None:
    from one_more_chart import one_more  # type: ignore[import-not-found]

    from explorer.ui.shared.charts import draw

    draw(one_more(), key="one_more")


def test_a_chart_is_one_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page gives it a table and a file, the report a drawing and a table."""
    (tmp_path / "one_more_chart.py").write_text(CHART)
    monkeypatch.syspath_prepend(tmp_path)
    at = AppTest.from_function(page_of_a_chart).run()
    assert not at.exception
    assert [fold.label for fold in at.expander] == ["One more as a table"] and len(at.get("plotly_chart")) == 1
    in_report = drawn(import_module("one_more_chart").one_more())
    assert '<figure class="chart"' in in_report and "Seven apples." in in_report and "<td>apples</td>" in in_report
    sys.modules.pop("one_more_chart")


def test_an_export_format_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def haiku(file: PolicyFile) -> Export:
        return Export(target="haiku", written_for="readers", text=f"{len(file.policy.units)}")

    monkeypatch.setitem(FORMATS, "haiku", ExportFormat(name="haiku", title="a haiku", write=haiku))
    assert exported(PolicyFile(policy=KEEP_ALL), "haiku").text == "0"


def test_a_hazard_rule_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Trap("many-blocks", "note", lambda case: case.graph.repeats, "So many: {blocks}.", "Fewer.")
    monkeypatch.setattr(rules, "POLICY_RULES", (*rules.POLICY_RULES, row))
    assert [hazard.sentence for hazard in rules.hazards(gpt(2), KEEP_ALL)] == ["So many: blocks.0, blocks.1."]
