"""A cell that crashes, hangs or is ended from outside is a cell, and the rest goes on."""

from __future__ import annotations

import os
import signal

import msgspec
import pytest

from explorer.engine.derivatives.cell_process import cells_apart
from explorer.errors import Cancelled
from tests.engine.derivatives.nets import spec
from tests.forked import forked, server_of


@pytest.mark.slow
class TestInAProcessOfItsOwn:
    def test_a_crash_is_a_cell_and_the_rest_goes_on(self) -> None:
        asked = spec("deadly", ("1",), how="crash")
        cells = list(cells_apart(asked, "reentrant", ("backward", "autograd.grad"), lambda: None))
        assert [(cell.derivative, cell.outcome) for cell in cells] == [
            ("backward", "crashes"), ("autograd.grad", "raises"),
        ]  # fmt: skip
        assert cells[0].sentence == "ended the process by SIGSEGV"

    def test_a_hang_ends_at_the_time_limit(self) -> None:
        asked = msgspec.structs.replace(spec("deadly", ("1",), how="hang"), time_limit_s=3.0)
        (cell,) = cells_apart(asked, "reentrant", ("backward",), lambda: None)
        assert (cell.outcome, cell.sentence) == ("not run", "no answer within 3 s")

    def test_cancelled_leaves_no_process_behind(self) -> None:
        def cancel() -> None:
            raise Cancelled("The run was cancelled.")

        before = forked()
        with pytest.raises(Cancelled):
            list(cells_apart(spec("deadly", ("1",), how="hang"), "reentrant", ("backward",), cancel))
        assert forked() <= before

    @pytest.mark.parametrize(
        ("whom", "n_kills", "words"),
        [
            ("cell", 1, "no answer within 3 s"),
            ("cell", 2, "not found out in 2 tries: ended the process by SIGKILL"),
            ("server", 1, "no answer within 3 s"),
        ],
    )
    def test_an_end_from_outside_is_no_outcome_of_the_cell(self, whom: str, n_kills: int, words: str) -> None:
        killed: set[int] = set()

        def kill() -> None:
            for pid in (forked() - killed) if len(killed) < n_kills else ():
                killed.add(pid)
                os.kill(pid if whom == "cell" else server_of(pid), signal.SIGKILL)

        asked = msgspec.structs.replace(spec("deadly", ("1",), how="hang"), time_limit_s=3.0)
        hanging, following = cells_apart(asked, "reentrant", ("backward", "autograd.grad"), kill)
        assert len(killed) == n_kills
        assert (hanging.outcome, following.outcome) == ("not run", "raises")
        assert words in hanging.sentence
