"""Files of the ranks of one step open as one run; what shows that they are not is said, all of it at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from explorer.errors import BadInput
from explorer.jobs import run_file
from explorer.jobs.rank_files import files_of_ranks, grouped, opened
from explorer.record.base import from_msgpack
from explorer.record.measurement import RecordedRanks
from tests.jobs.runs import measured


def file_of(rank: int | None, n_ranks: int = 3, where: str = "train.py:42, step 2") -> bytes:
    recorded = f"{where}, rank {rank}" if rank is not None else where
    run = replace(measured(), rank=rank, n_ranks=None if rank is None else n_ranks, recorded_in=recorded)
    return run_file.write(run_file.stored_record(run, f"rank {rank}"))


def test_files_beside_each_other_come_by_rank(tmp_path: Path) -> None:
    for name in ("step.rank10.explorer", "step.rank2.explorer", "step.explorer", "other.rank0.explorer"):
        (tmp_path / name).write_bytes(b"")
    names = [path.name for path in files_of_ranks(tmp_path / "step.explorer")]
    assert names == ["step.rank2.explorer", "step.rank10.explorer"]
    assert files_of_ranks(tmp_path / "nowhere" / "step.explorer") == []


def test_ranks_of_one_step_are_one_run_in_order() -> None:
    stored = opened([file_of(2), file_of(0)])
    run = from_msgpack(stored.record, RecordedRanks)
    assert [one.rank for one in run.ranks] == [0, 2] and run.missing == (1,)
    assert stored.name == "train.py:42, step 2, 2 of 3 ranks"
    assert opened([file_of(None)]).kind == "measurement"


def test_what_was_chosen_together_is_grouped_by_step() -> None:
    stored = grouped([file_of(0), file_of(None), file_of(1), file_of(0, where="train.py:42, step 9")])
    assert [one.kind for one in stored] == ["recorded ranks", "measurement", "measurement"]


def test_every_fault_is_told() -> None:
    with pytest.raises(BadInput, match=r"rank 0 is there twice; they are of trainings with 2 and 3 ranks; they were"):
        opened([file_of(0), file_of(0), file_of(1, n_ranks=2, where="a.py:1, step 1")])
    with pytest.raises(BadInput, match="rank None was recorded by none"):
        opened([file_of(0), file_of(None)])
