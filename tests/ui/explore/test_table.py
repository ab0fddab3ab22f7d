"""The Blocks tab: every block is a row, with what it keeps in both runs and how often it ran again."""

from __future__ import annotations

from tests import graphs
from tests.ui.explore.visits import ALL, App, press
from tests.ui.page_driver import say, settle


def test_every_block_is_a_row(app: App) -> None:
    at = press(say(app(), on=ALL[:2]), "run")
    at.session_state["tabs"] = "Blocks"
    at = settle(at.run())
    (rows,) = [frame.value for frame in at.dataframe if "ran again" in frame.value]
    assert list(rows["block"])[1:] == [block.fqn for block in graphs.gpt(6).blocks][1:]
    again = dict(zip(rows["block"], rows["ran again"], strict=True))
    kept, candidate = (
        dict(zip(rows["block"], rows[f"saved, {run} (bytes)"], strict=True)) for run in ("kept", "candidate")
    )
    assert (again["blocks.0"], again["blocks.1"], again["blocks.2"]) == (1, 1, 0)
    assert candidate["blocks.0"] < kept["blocks.0"] and candidate["blocks.2"] == kept["blocks.2"]
