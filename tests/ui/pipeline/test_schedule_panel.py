"""Ranks that can be chosen, and own schedules given as a file."""

from __future__ import annotations

import pytest
from streamlit.testing.v1 import AppTest

from explorer.jobs.protocol import RunPipeline
from tests.ui.page_driver import address, figures, texts, widget
from tests.ui.pipeline.pipeline_driver import (
    Open,
    PipelineWorker,
    chosen,
    run,
    settled,
)  # fmt: skip

OWN_ROWS = b"0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def give(at: AppTest, data: bytes) -> AppTest:
    """Gives `data` as a file called own.csv."""
    at.file_uploader(key="upload_schedule").upload("own.csv", data)
    return settled(at.run())


def test_an_own_schedule_is_given_as_a_file_and_has_its_own_name(visit: Open, worker: PipelineWorker) -> None:
    at = give(visit(cuts="1.2"), OWN_ROWS)
    assert widget(at, "selectbox", "pipeline_schedule").value == "own schedule"
    assert figures(at)["Plan"] == "2 stages"
    assert chosen(at, "n_microbatches") == 2
    at = run(at)
    plan = worker.of(RunPipeline)[-1].request.spec.plan
    assert plan.actions == (("0F0", "0F1", "0B0", "0B1"), ("1F0", "1B0", "1F1", "1B1"))
    assert (plan.n_ranks, plan.schedule_name) == (2, "own schedule")
    at = settled(widget(at, "selectbox", "pipeline_schedule").set_value("GPipe").run())
    assert chosen(at, "actions") == ()
    at = settled(widget(at, "selectbox", "pipeline_schedule").set_value("own schedule").run())
    assert chosen(at, "actions") == plan.actions


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "holds no action"),
        (b"\xff\xfe", "is not text"),
        (b"0F0,fish", "'fish' (rank 0, cell 1)"),
        (b"0F0,0B0\n1B0,1F0\n", "1B0"),
        (b"0F0,0B0\n1F0\n", "1B0 is missing"),
        (b"99F0,99B0\n", "is missing"),
    ],
)
def test_a_schedule_that_cannot_be_read_is_a_sentence_and_changes_nothing(visit: Open, data: bytes, fault: str) -> None:
    at = visit(cuts="1.2")
    at = give(at, data)
    assert fault in texts(at).replace("\\", "")
    assert chosen(at, "actions") == ()
    assert figures(at)["Plan"] == "3 stages"


def test_ranks_are_chosen_where_the_schedule_leaves_them_open(visit: Open) -> None:
    at = visit(cuts="1.2.3")
    assert widget(at, "selectbox", "pipeline_n_ranks").disabled
    at = settled(widget(at, "selectbox", "pipeline_schedule").set_value("Interleaved1F1B").run())
    ranks = widget(at, "selectbox", "pipeline_n_ranks")
    assert (ranks.options, ranks.value) == (["1", "2"], 2)
    at = settled(ranks.set_value(1).run())
    assert "one rank" in at.info[0].value
    assert address(at)["ranks"] == "1"
    again = visit(**address(at))
    assert widget(again, "selectbox", "pipeline_n_ranks").value == 1
    at = settled(widget(at, "number_input", "pipeline_stages").set_value(5).run())
    assert widget(at, "selectbox", "pipeline_n_ranks").value == 1
