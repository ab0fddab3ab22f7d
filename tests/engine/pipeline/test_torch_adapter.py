"""Our action lists against torch's own, and torch's private names as this version has them."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.pipelining.schedules import get_schedule_class

from explorer.engine.pipeline import torch_adapter
from explorer.errors import NotOnThisDevice
from explorer.plan.pipeline.actions import format_rows, from_csv, to_csv
from explorer.plan.pipeline.schedules import SCHEDULES, rows_of
from explorer.record.run import PipelinePlan


def rows(schedule: str, n_ranks: int, n_microbatches: int, n_local: int):  # noqa: ANN201
    stages = (("x",),) * (n_ranks * n_local)
    return rows_of(PipelinePlan(stages=stages, n_ranks=n_ranks, n_microbatches=n_microbatches, schedule=schedule))


def torch_rows(schedule: str, n_ranks: int, n_microbatches: int, n_local: int) -> tuple[tuple[str, ...], ...]:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    with contextlib.redirect_stdout(io.StringIO()):
        listed = get_schedule_ops(schedule, n_ranks, n_microbatches, n_local)
    flat = [[part for action in row if action for part in (action.sub_actions or (action,))] for row in listed]
    return tuple(tuple(str(part) for part in row if part.computation_type.value in "FBIW") for row in flat)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "1F1B"])
@pytest.mark.parametrize(("n_ranks", "n_microbatches"), [(1, 3), (2, 4), (3, 6), (4, 8), (4, 12)])
def test_our_lists_are_torchs(schedule: str, n_ranks: int, n_microbatches: int) -> None:
    for n_local in {"single": (1,), "v": (2,), "looped": (2, 3)}[SCHEDULES[schedule].shape]:
        ours = format_rows(rows(schedule, n_ranks, n_microbatches, n_local))
        assert ours == torch_rows(schedule, n_ranks, n_microbatches, n_local)


def test_torchs_own_listing_of_1f1b_is_not_what_it_runs() -> None:
    """Why 1F1B is generated here: torch 2.13 lists F1..Fm for the last rank. If this fails, torch mended it."""
    assert torch_rows("1F1B", 2, 2, 1)[1][0] == "1F1"
    assert format_rows(rows("1F1B", 2, 2, 1))[1][0] == "1F0"


def mock_stages(n_ranks: int, n_local: int) -> list[mock.Mock]:
    from torch.distributed.pipelining import PipelineStage

    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod, stage.num_stages = 0, n_ranks, None, n_ranks * n_local
    return [stage] * n_local


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_torch_loads_the_csv_we_write(schedule: str, tmp_path: Path) -> None:
    ours = rows(schedule, 2, 4, 2)
    (tmp_path / "schedule.csv").write_text(to_csv(ours))
    runtime = torch_adapter.private(torch_adapter.SCHEDULES, "_PipelineScheduleRuntime")(mock_stages(2, 2), 4)
    runtime._load_csv(str(tmp_path / "schedule.csv"))
    assert runtime.pipeline_order_with_comms


def test_we_read_the_csv_that_torch_writes(tmp_path: Path) -> None:
    schedule = get_schedule_class("ZBVZeroBubble")(mock_stages(2, 2), 4)
    super(type(schedule).__mro__[1], schedule)._dump_csv(str(tmp_path / "torch.csv"))
    assert from_csv((tmp_path / "torch.csv").read_text()) == rows("ZBVZeroBubble", 2, 4, 2)


def test_the_private_names_are_there() -> None:
    """On each supported torch; a failure names what went away."""
    assert torch.__version__ >= "2.11"
    for module, name in (
        (torch_adapter.SCHEDULES, "_PipelineScheduleRuntime"),
        (torch_adapter.SCHEDULES, "_Action"),
        (torch_adapter.BACKWARD, "stage_backward_input"),
        (torch_adapter.BACKWARD, "stage_backward_weight"),
    ):
        assert callable(torch_adapter.private(module, name))


def test_a_missing_name_is_a_sentence() -> None:
    with pytest.raises(NotOnThisDevice, match="has no .*_gone"):
        torch_adapter.private(torch_adapter.SCHEDULES, "_gone")
