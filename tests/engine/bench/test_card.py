"""A step without data, played by CUDA's rules and sent through the allocator, holds what a B200 held."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from explorer.engine.bench.measure import measure_without_data
from explorer.engine.device.cuda_rules import FLOAT32, FLOAT32_RESULT, cuda_rules
from explorer.plan.card.cards import CARDS
from explorer.plan.card.step_on_card import memory_on, workspace_bytes
from explorer.record import Measurement, ModelRef, RunSpec
from explorer.record.card import Card

B200 = Path(__file__).resolve().parents[2] / "golden" / "b200"
ROWS = {row["id"]: row for row in json.loads((B200 / "rows.json").read_text())["rows"]}


@cache
def played(row_id: str) -> Measurement:
    row = ROWS[row_id]
    arguments: dict[str, Any] = {"size": row["size"], "seq": row["seq"], "segments": row["segments"] or 0}
    model = ModelRef(target=f"{B200 / 'language_model.py'}:build", arguments=arguments)
    autocast = "bfloat16" if row["precision"] == "bf16" else "none"
    return measure_without_data(RunSpec(model=model, optimizer="none", autocast=autocast, card=CARDS["b200"]))


@pytest.mark.parametrize("row_id", ["small-fp32-backward-w5", pytest.param("checkpoint-8", marks=pytest.mark.slow)])
def test_float32_is_held_as_the_b200_held_it_to_the_byte(row_id: str) -> None:
    row, memory = ROWS[row_id], played(row_id).card
    assert memory is not None
    assert memory.refused is None
    assert memory.allocated_bytes == row["peak_allocated_bytes"]
    assert memory.reserved_bytes == row["peak_reserved_bytes"]
    assert memory.workspace_bytes == 2 * 8_519_680


def test_autocast_is_cudas_and_the_allocated_peak_is_met() -> None:
    row, memory = ROWS["small-bf16-backward-w5"], played("small-bf16-backward-w5").card
    assert memory is not None
    assert memory.allocated_bytes == pytest.approx(row["peak_allocated_bytes"], rel=0.0005)
    assert memory.reserved_bytes == pytest.approx(row["peak_reserved_bytes"], rel=0.025)


def test_a_card_that_is_too_small_says_where_it_refuses() -> None:
    run = played("small-fp32-backward-w5")
    whole = memory_on(CARDS["b200"], run)
    small = Card(name="small", total_bytes=whole.reserved_bytes // 2, taken_bytes=0)
    refused = memory_on(small, run).refused
    assert refused is not None
    assert refused.step == 1
    assert refused.block.startswith("layers.")
    assert refused.reserved_bytes + refused.n_bytes > small.total_bytes - 2 * 2**20
    just_enough = Card(name="enough", total_bytes=whole.reserved_bytes, taken_bytes=0)
    assert memory_on(just_enough, run).refused is None


def test_a_card_that_empties_its_cache_names_the_peak_of_what_was_reserved() -> None:
    run = played("small-fp32-backward-w5")
    whole = memory_on(CARDS["b200"], run)
    for share in (0.25, 0.5, 0.75):
        total = whole.allocated_bytes + int(share * whole.stranded_bytes)
        memory = memory_on(Card(name="less", total_bytes=total, taken_bytes=0), run)
        assert memory.refused is not None or memory.allocated_bytes <= memory.reserved_bytes <= total
        assert memory.stranded_bytes >= 0


def test_settings_without_a_rule_are_named() -> None:
    run = played("small-fp32-backward-w5")
    settings = "backend:native,roundup_power2_divisions:[256:1,512:2,>:8]"
    memory = memory_on(Card(name="big", total_bytes=2**40, options=settings), run)
    assert memory.not_checked == ("roundup_power2_divisions:[256:1,512:2,>:8]",)
    assert memory.not_played == ("backend:native",)


@pytest.mark.parametrize(
    ("capability", "setting", "n_bytes"),
    [("10.0", "", 8_519_680), ("9.0", "", 32 * 2**20), ("", "", 8_519_680), ("", ":4096:8", 32 * 2**20)],
)
def test_workspaces_have_the_size_that_torch_asks_for(capability: str, setting: str, n_bytes: int) -> None:
    assert workspace_bytes(capability, setting) == n_bytes


def test_the_lists_of_autocast_are_those_of_the_installed_torch() -> None:
    """Second source: the header that torch ships."""
    header = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()

    def listed(name: str) -> set[str]:
        body = re.search(rf"#define {name}\(_\)(.*?)\n\n", header, re.DOTALL)
        assert body is not None
        rows = re.findall(r"_\(\s*(\w+)(?:,\s*(\w+))?\s*\)", body[1])
        return {f"{base}.{overload}" if overload else base for base, overload in rows}

    assert listed("AT_FORALL_FP32") == FLOAT32 - {"norm.Scalar", "norm.ScalarOpt_dim"}
    assert listed("AT_FORALL_FP32_SET_OPT_DTYPE") == FLOAT32_RESULT


def test_operators_follow_cuda_inside_and_the_cpu_again_after() -> None:
    def dtypes() -> list[torch.dtype]:
        x = torch.ones(2, 8, 8, dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            results = (torch.exp(x), F.softmax(x, -1), F.layer_norm(x, (8,)), x.sum(), x.pow(2), x @ x, F.gelu(x))
        return [result.dtype for result in results]

    on_cpu = dtypes()
    with cuda_rules():
        assert dtypes() == [torch.float32] * 5 + [torch.bfloat16] * 2
    assert dtypes() == on_cpu
    assert on_cpu[0] == torch.bfloat16


def kept_by(forward: Any, *tensors: Tensor) -> list[tuple[torch.dtype, int]]:
    """(type, elements) of what backward keeps, the tensors themselves left out."""
    saved: list[Tensor] = []
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        forward(*tensors)
    return [(t.dtype, t.numel()) for t in saved if t.untyped_storage()._cdata not in storages]


def test_dropout_keeps_a_mask_of_one_byte_an_element() -> None:
    with cuda_rules(), FakeTensorMode():
        x = torch.empty(4, 64, requires_grad=True)
        assert kept_by(nn.Dropout(0.1), x) == [(torch.bool, 256)]
        assert kept_by(nn.Dropout(0.1).eval(), x) == []


@pytest.mark.parametrize(
    ("dtype", "masked", "kernel"),
    [
        (torch.bfloat16, False, "ScaledDotProductFlashAttention"),
        (torch.bfloat16, True, "ScaledDotProductEfficientAttention"),
        (torch.float32, False, "ScaledDotProductEfficientAttention"),
    ],
)
def test_attention_takes_the_kernel_that_torch_takes(dtype: torch.dtype, masked: bool, kernel: str) -> None:
    with cuda_rules(), FakeTensorMode():
        q = torch.empty(2, 4, 128, 64, dtype=dtype, requires_grad=True)
        mask = torch.ones(128, 128, dtype=torch.bool) if masked else None
        out = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        assert type(out.grad_fn).__name__.startswith(kernel)
        kept = kept_by(lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=mask), q)
        assert (torch.float32, 2 * 4 * 128) in kept  # the log-sum-exp
        assert (dtype, q.numel()) in kept  # the output
        out.sum().backward()
        assert q.grad is not None
        assert q.grad.shape == q.shape


def test_attention_that_is_not_aligned_takes_plain_operators() -> None:
    with cuda_rules(), FakeTensorMode():
        narrow = torch.empty(2, 4, 128, 6, requires_grad=True)  # 24 bytes a row
        kept = kept_by(lambda x: F.scaled_dot_product_attention(x, x, x), narrow)
        assert (torch.float32, 2 * 4 * 128 * 128) in kept  # the softmax
