"""Files of the ranks of one training as one run: `step2.explorer` opens `step2.rank0.explorer` and the rest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from explorer.errors import BadInput
from explorer.jobs import run_file
from explorer.jobs.run_file import StoredRecord
from explorer.record.base import Record, from_msgpack
from explorer.record.measurement import Measurement, RecordedRanks


def files_of_ranks(path: Path) -> list[Path]:
    """Files that ranks wrote beside `path` under its name, by rank; may be empty."""
    path_of_rank = re.compile(rf"{re.escape(path.stem)}\.rank(\d+){re.escape(path.suffix)}")
    if not path.parent.is_dir():
        return []
    by_rank = {int(match[1]): file for file in path.parent.iterdir() if (match := path_of_rank.fullmatch(file.name))}
    return [by_rank[rank] for rank in sorted(by_rank)]


def grouped(files: Sequence[bytes]) -> list[StoredRecord]:
    """Records of files chosen together. Files of the ranks of a step become one run; any other file is a run.

    Raises UnreadableFile, BadInput.
    """
    groups: dict[str, list[StoredRecord]] = {}
    for i, data in enumerate(files):
        stored = run_file.read(data)
        run = _run_of(stored)
        group = str(i)
        if isinstance(run, Measurement) and run.rank is not None:
            group = f"{_place(run)} of {run.n_ranks}"
        groups.setdefault(group, []).append(stored)
    return [_as_one(group) for group in groups.values()]


def opened(files: Sequence[bytes]) -> StoredRecord:
    """The record of one file, or the files of a step's ranks joined into one run. Raises UnreadableFile, BadInput."""
    return _as_one([run_file.read(data) for data in files])


def _as_one(stored: Sequence[StoredRecord]) -> StoredRecord:
    if len(stored) == 1:
        return stored[0]
    runs = [_run_of(one) for one in stored]
    alone = [one.name for one, run in zip(stored, runs) if not isinstance(run, Measurement) or run.rank is None]
    if alone:
        raise BadInput(
            f"{len(stored)} files are opened as the ranks of one step, and {', '.join(alone)} was recorded by none.",
            hint="Open such a file by itself.",
        )
    merged = _side_by_side([run for run in runs if isinstance(run, Measurement)])
    name = f"{merged.recorded_in}, {len(merged.ranks)} of {merged.n_ranks} ranks"
    return replace(run_file.stored_record(merged, name), created=max(one.created for one in stored))


def _run_of(stored: StoredRecord) -> Record:
    return from_msgpack(stored.record, run_file.KINDS[stored.kind])


def _side_by_side(runs: Sequence[Measurement]) -> RecordedRanks:
    """Raises BadInput with everything that shows that they are not ranks of one step."""
    runs = sorted(runs, key=lambda run: run.rank or 0)
    ranks = [run.rank for run in runs]
    sizes = sorted({run.n_ranks or 0 for run in runs})
    places = list(dict.fromkeys(_place(run) for run in runs))
    faults = [f"rank {rank} is there twice" for rank in sorted({r or 0 for r in ranks if ranks.count(r) > 1})]
    if len(sizes) > 1:
        faults.append(f"they are of trainings with {' and '.join(map(str, sizes))} ranks")
    if len(places) > 1:
        faults.append(f"they were recorded in {' and in '.join(places)}")
    if faults:
        raise BadInput(
            f"{len(runs)} files are opened as the ranks of one step; {'; '.join(faults)}.",
            hint="Take the files that one step of one training left; delete those of an earlier one.",
        )
    return RecordedRanks(ranks=tuple(runs), n_ranks=sizes[0], recorded_in=places[0])


def _place(run: Measurement) -> str:
    return run.recorded_in.removesuffix(f", rank {run.rank}")
