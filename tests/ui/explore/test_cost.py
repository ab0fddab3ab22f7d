"""The Cost tab of a run whose model checkpoints itself."""

from __future__ import annotations

from streamlit.testing.v1 import AppTest


def cost_of_a_dead_checkpoint() -> None:
    from msgspec.structs import replace

    from explorer.record.checkpointing import CheckpointRegion, OwnCheckpointing
    from explorer.ui.explore.results import cost_panel
    from tests.view.builders import measured

    region = CheckpointRegion(caller="", blocks=("layers.0",), reentrant=True, n_calls=1, n_without_gradient=1)
    own = OwnCheckpointing(regions=(region,), n_trainable=9, without_gradient=("layers.0.weight",))
    cost_panel(replace(measured(), own_checkpointing=own), block="")


def test_a_dead_checkpoint_has_a_row() -> None:
    page = AppTest.from_function(cost_of_a_dead_checkpoint, default_timeout=120).run()
    assert not page.exception
    assert page.markdown[0].value == "**Checkpointing by the model itself**"
    first = page.dataframe[0].value.iloc[0]
    assert (first["block"], first["called"], first["without a gradient"]) == ("layers.0", 1, 1)
    assert first["that is"].startswith("dead: ")
