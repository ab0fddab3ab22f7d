"""DeepSpeed's configuration selects no block: nothing is written, and it is said what to do instead."""

from __future__ import annotations

from explorer.plan.export.deepspeed import to_deepspeed
from tests.plan.export.runs import file_of


def test_it_is_refused_with_a_way_out() -> None:
    form = to_deepspeed(file_of("layers.0"))
    assert (form.fit, form.text, form.as_run) == ("not expressible", "", None)
    assert "selects no block" in form.reasons[0] and any(
        "deepspeed.initialize" in note for note in form.notes + form.reasons
    )
