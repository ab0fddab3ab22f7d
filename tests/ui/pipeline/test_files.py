"""What leaves the Pipeline page: a policy file that reads back, a script's folder, a report; of a plan that can run."""

from __future__ import annotations

import io
import zipfile

from streamlit.testing.v1 import AppTest

from explorer.record import Policy
from explorer.ui.pipeline.files import FOLDER, zipped
from tests.ui.page_driver import texts, widget
from tests.ui.pipeline.pipeline_driver import Open, run, say, settled


def offered(at: AppTest) -> list[str]:
    at.session_state["pipeline_tabs"] = "Files"
    return [button.label for button in settled(at.run()).get("download_button")]


POLICY, SCRIPT, REPORT = "Policy file with the plan (YAML)", "torchrun script, plan and schedule (zip)", "Report (HTML)"


def test_plan_and_script_are_there_at_once_and_a_report_after_a_run_of_this_plan(visit: Open) -> None:
    at = visit()
    assert offered(at) == [POLICY, SCRIPT]
    at = run(at)
    assert offered(at) == [REPORT, POLICY, SCRIPT]
    at = say(at, on=["blocks.1"])
    assert at.session_state["draft"].spec.policy == Policy.recompute(["blocks.1"])
    assert REPORT not in offered(at), "that run was of another plan"


def test_a_plan_that_cannot_run_has_no_script_and_says_why(visit: Open) -> None:
    at = visit()
    widget(at, "selectbox", "pipeline_schedule").set_value("Interleaved1F1B")
    at = settled(widget(at, "number_input", "pipeline_stages").set_value(5).run())
    assert offered(at) == [POLICY]
    assert "These files need a plan that can run." in texts(at)


def test_an_archive_holds_every_file_in_one_folder() -> None:
    with zipfile.ZipFile(io.BytesIO(zipped({"plan.yaml": "a: 1\n", "run.py": "print()\n"}))) as archive:
        assert archive.namelist() == [f"{FOLDER}/plan.yaml", f"{FOLDER}/run.py"]
        assert archive.read(f"{FOLDER}/plan.yaml") == b"a: 1\n"
