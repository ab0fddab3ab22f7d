"""Running statistics under each cure."""

from __future__ import annotations

import itertools

import pytest

from tests.lab.running import run


@pytest.mark.parametrize(
    ("steps", "blocks", "momentum"), list(itertools.product(["1", "10"], ["all", "half"], ["0.1", "0.5"]))
)
def test_batchnorm_is_exact_only_if_the_second_forward_is_discarded(steps: str, blocks: str, momentum: str) -> None:
    outcome = run("batchnorm", steps=steps, blocks=blocks, momentum=momentum)
    off = {row.label: row.value("running statistics off by") for row in outcome.rows[1:]}
    counted = {row.label: row.value("batches counted") for row in outcome.rows}
    assert all(row.value("gradients of every step") is True for row in outcome.rows[1:])
    assert off["second forward discarded"] == 0 and counted["second forward discarded"] == counted["kept"] == int(steps)
    assert off["both forwards count"] > 1e-2 and counted["both forwards count"] == 2 * int(steps)
    assert (0 < off["momentum trick"] < 1e-5) if blocks == "all" else off["momentum trick"] > 1e-3
    assert outcome.row("momentum trick").outcome == "different"
