"""Which derivative survives which checkpoint: each derivative is right on a known loss, and the known outcomes come."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from explorer.engine.bench.step import prepare
from explorer.errors import BadInput
from explorer.lab.derivatives import DERIVATIVES
from explorer.lab.run import run_lab
from explorer.record.run import RunSpec
from tests.engine import trap_nets
from tests.lab.test_lessons import outcomes, run


class Cube(nn.Module):
    """w³ summed: gradient 3w², Hessian 6w."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w**3 * (1.0 if self.training else 2.0)


W = torch.tensor([1.0, 2.0])
FIRST = 3 * W**2
DIRECTION = torch.randn(2, generator=torch.Generator().manual_seed(0))
EXPECTED = {
    "backward": FIRST,
    "autograd.grad": FIRST,
    "backward twice": 2 * FIRST,
    "create_graph": FIRST,
    "Hessian-vector product": 6 * W * DIRECTION,
    "gradient penalty": FIRST + 2 * FIRST * 6 * W,
    "eval mode": 2 * FIRST,
}


@pytest.mark.parametrize("name", DERIVATIVES)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_each_derivative_of_a_cube(name: str) -> None:
    trainee = prepare(RunSpec(model=trap_nets.ref("plain")))
    trainee.model, trainee.inputs, trainee.targets = Cube(), torch.ones(1), None
    trainee.loss_function = lambda output, targets: output.sum()
    derived = DERIVATIVES[name](trainee)["w"]
    assert derived is not None and not derived.requires_grad
    torch.testing.assert_close(derived, EXPECTED[name])


FIRST_ORDER = ("backward", "backward twice", "create_graph", "eval mode")


@pytest.mark.slow
def test_recompute_survives_everything_and_reentrant_does_not_survive_second_order() -> None:
    rows = outcomes("derivatives")
    assert {rows[f"{name}: non-reentrant"] for name in DERIVATIVES} == {"bitwise equal"}
    assert {rows[f"{name}: reentrant"] for name in FIRST_ORDER} == {"bitwise equal"}
    assert {rows[f"{name}: reentrant"] for name in ("autograd.grad", "gradient penalty")} == {"raised"}
    assert rows["Hessian-vector product: reentrant"] in ("raised", "different", "missing")
    assert rows["backward: selective"] == "bitwise equal"
    assert {rows[f"{name}: selective"] for name in ("backward twice", "gradient penalty")} == {"raised"}
    assert [finding.partition(":")[0] for finding in run("derivatives").findings] == [
        "Non-reentrant", "Reentrant", "Selective",
    ]  # fmt: skip


def test_only_a_lesson_that_takes_a_model_is_given_one() -> None:
    with pytest.raises(BadInput, match="brings its own nets"):
        run_lab("dropout", {}, model=trap_nets.ref("plain"))


@pytest.mark.slow
def test_a_model_of_a_persons_own_that_has_no_second_order() -> None:
    rows = {row.label: row.outcome for row in run_lab("derivatives", {}, model=trap_nets.ref("no_second_order")).rows}
    assert rows["Hessian-vector product: keep"] == "raised"
    assert rows["Hessian-vector product: non-reentrant"] == "shown"
