"""OLMo-core: modules by their whole names; what its engine does otherwise is said."""

from __future__ import annotations

from explorer.plan.export.olmo_core import to_olmo_core
from tests.plan.export.runs import file_of


def test_each_block_is_written_whole() -> None:
    form = to_olmo_core(file_of("blocks.0", "blocks.2"))
    compile(form.text, "olmo.py", "exec")
    assert form.recomputed == ("blocks.0", "blocks.2") and form.text.count('"blocks.') == 2
    assert form.as_run is not None and not form.as_run.preserve_rng_state


def test_a_policy_that_keeps_everything_writes_no_configuration() -> None:
    assert "No ac_config" in to_olmo_core(file_of()).text
