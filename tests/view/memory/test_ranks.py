"""Who holds most, said in one sentence: a rank that recorded nothing is never counted as one that holds as much."""

from __future__ import annotations

from msgspec.structs import replace

from explorer.record.measurement import RecordedRanks
from explorer.view.memory.ranks import MOST_LINES, rank_rows, ranks_at_peak, ranks_over_time, spread_of_ranks
from tests.view.builders import MIB, Chain
from tests.view.report.kinds import path_of_rank, ranks


def several(*saved_mib: int, n_ranks: int | None = None) -> RecordedRanks:
    runs = tuple(path_of_rank(i, Chain(saved=size * MIB), len(saved_mib)) for i, size in enumerate(saved_mib))
    return RecordedRanks(ranks=runs, n_ranks=n_ranks or len(runs), recorded_in="train.py, step 2")


def unrecorded(of: RecordedRanks, rank: int) -> RecordedRanks:
    runs = [replace(run, allocations=None) if run.rank == rank else run for run in of.ranks]
    return replace(of, ranks=tuple(runs))


def test_the_fullest_is_held_against_the_emptiest() -> None:
    assert spread_of_ranks(several(10, 20)).startswith("Rank 1 holds most: ")
    assert "% over rank 0" in spread_of_ranks(several(10, 20))
    assert spread_of_ranks(several(10, 10)).endswith(", and so do all others.")
    assert spread_of_ranks(several(10, 10, n_ranks=4)).endswith("No file of ranks 2, 3.")


def test_what_no_rank_recorded_is_not_said_to_be_equal() -> None:
    assert spread_of_ranks(unrecorded(several(10, 10, 10), 0)).endswith(", as all others that recorded it.")
    assert spread_of_ranks(unrecorded(several(10, 20), 0)).endswith(" MiB.")
    nobody = unrecorded(unrecorded(several(10, 20), 0), 1)
    assert spread_of_ranks(nobody) == "No rank recorded what it held."
    assert "No rank has a memory timeline" in ranks_at_peak(nobody).figure.layout.annotations[0].text
    assert [row["where"] for row in rank_rows(nobody)] == ["not recorded"] * 2


def test_only_the_fullest_ranks_are_lines_and_all_are_rows() -> None:
    many = several(*range(1, MOST_LINES + 3))
    lines = [trace.name for trace in ranks_over_time(many).figure.data]
    assert lines == [f"rank {i}" for i in range(2, MOST_LINES + 2)]
    assert len(rank_rows(many)) == MOST_LINES + 2


def test_the_roles_of_a_bar_add_up_to_the_peak() -> None:
    fig = ranks_at_peak(ranks()).figure
    unit = {"MiB": MIB, "GiB": 1024 * MIB}[fig.layout.xaxis.title.text[-4:-1]]
    held = [sum(trace.x[i] for trace in fig.data) * unit for i in range(2)]
    assert [round(size) for size in held] == [run.held_peak_bytes for run in ranks().ranks]
