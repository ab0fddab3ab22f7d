"""What torch's schedules still hold of what was sent, action by action, for two stages and four microbatches."""

from __future__ import annotations

import gc
import weakref

from explorer.engine.pipeline.play.held_sends import HeldSends
from explorer.plan.pipeline.actions import parse_action


class Sent:
    """Stands for the tensors of one action."""


def alive_after(rows: str, *, one_f_one_b: bool, n_stages: int = 3) -> list[set[str]]:
    """By action, which sends are still alive once it is done."""
    held = HeldSends(one_f_one_b=one_f_one_b, n_stages=n_stages, n_microbatches=4)
    sends: dict[str, weakref.ref[Sent]] = {}
    alive = []
    for name in rows.split():
        sent = Sent()
        sends[name] = weakref.ref(sent)
        held.after(parse_action(name), sent)
        del sent
        gc.collect()
        alive.append({one for one, ref in sends.items() if ref() is not None})
    return alive


def test_gpipe_keeps_every_send_to_the_end() -> None:
    assert alive_after("0F0 0F1 0F2", one_f_one_b=False)[-1] == {"0F0", "0F1", "0F2"}


def test_1f1b_keeps_the_last_gradient_until_the_next() -> None:
    alive = alive_after("2F0 2B0 2F1 2B1", one_f_one_b=True)
    assert alive == [set(), {"2B0"}, {"2B0"}, {"2B1"}]


def test_1f1b_keeps_the_last_warm_up_send_but_one_until_the_drain() -> None:
    alive = alive_after("0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", one_f_one_b=True)
    assert [step - {"0B0", "0B1", "0B2", "0B3"} for step in alive] == [set(), *[{"0F1"}] * 4, set(), set(), set()]
