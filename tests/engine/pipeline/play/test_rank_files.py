"""Reports in a folder of results are found whatever their ranks, tensors beside them are none."""

from __future__ import annotations

from pathlib import Path

from explorer.engine.pipeline.play.rank_files import report_file, report_files, tensor_file


def test_reports_that_are_there(tmp_path: Path) -> None:
    for rank in (0, 2):
        report_file(tmp_path, rank).write_bytes(b"")
        tensor_file(tmp_path, rank).write_bytes(b"")
    assert report_files(tmp_path) == [report_file(tmp_path, 0), report_file(tmp_path, 2)]
    assert report_file(tmp_path, 1) != tensor_file(tmp_path, 1)
