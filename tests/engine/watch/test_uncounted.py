"""What FLOPs leave out is said: operators of matrix kind without a formula, by name and calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from explorer.engine.bench.measure import measure
from explorer.engine.watch.uncounted import MATRIX_KIND, is_uncounted
from explorer.record import ModelRef, RunSpec

aten = torch.ops.aten
MIXER = """
import torch
from torch import nn


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        basis, _ = torch.linalg.qr(self.mix(x))
        return torch.fft.rfft(basis).abs()


def build():
    return Mixer(), torch.randn(4, 8)
"""


def test_a_run_names_the_operators_that_its_flops_leave_out(tmp_path: Path) -> None:
    (tmp_path / "mixer.py").write_text(MIXER)
    run = measure(RunSpec(model=ModelRef(target=f"{tmp_path / 'mixer.py'}:build"), n_repeats=1))
    assert run.failure is None
    assert run.uncounted_ops["aten.linalg_qr.default"] == 1
    assert run.uncounted_ops["aten._fft_r2c.default"] == 1
    assert all(is_uncounted(getattr(aten, name.split(".")[1])) for name in run.uncounted_ops)
    assert run.forward_flops == 2 * 4 * 8 * 8


def test_a_run_whose_operators_all_have_a_formula_names_none() -> None:
    run = measure(RunSpec(model=ModelRef(target="sample_models/mlp.py", size="small"), n_repeats=1))
    assert run.uncounted_ops == {}


@pytest.mark.parametrize("name", ["mm", "addmm_", "convolution", "_grouped_mm", "add", "relu", "native_layer_norm"])
def test_what_has_a_formula_or_is_element_wise_is_not_named(name: str) -> None:
    assert not is_uncounted(getattr(aten, name).default if name != "add" else aten.add.Tensor)


def test_an_operator_of_another_library_is_named() -> None:
    with torch.library._scoped_library("explorer_tests", "DEF") as library:
        library.define("unknown(Tensor x) -> Tensor")
        assert is_uncounted(torch.ops.explorer_tests.unknown.default)


def test_every_name_of_the_list_is_an_operator_of_torch() -> None:
    """A name that torch drops would be looked for in vain."""
    known = {schema.name.removeprefix("aten::") for schema in torch._C._jit_get_all_schemas()}
    assert not MATRIX_KIND - known
