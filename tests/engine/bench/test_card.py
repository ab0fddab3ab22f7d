"""A step without data, played by CUDA's rules and sent through the allocator, holds what a B200 held.

The smallest row of each kind; `python -m benchmarks card` plays all, those with checkpoints among them.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import explorer.engine.bench.adamw_8bit
import explorer.engine.model.four_bit  # noqa: F401  # register operators
from explorer.engine.bench.measure import measure_without_data
from explorer.engine.device.cuda_rules import FLOAT32, FLOAT32_RESULT, LOWER, LOWER_ON_BOTH, PROMOTED, cuda_rules
from explorer.engine.device.kernel_memory import KernelMemory
from explorer.engine.device.without_data import without_data
from explorer.engine.model.describe import describe
from explorer.engine.model.load import load
from explorer.engine.watch.scopes import looking_at_saved
from explorer.errors import BadInput
from explorer.plan.card.cards import CARDS, RESULTS_ALONE, WITHOUT_RULE, capacity_bytes, parse_card
from explorer.plan.card.step_on_card import memory_on, program_of
from explorer.plan.card.torch_rules import workspace_bytes
from explorer.plan.memory.ledger import ledger
from explorer.plan.memory.next_step import STATE
from explorer.plan.policy.presets import preset
from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.sizes import mib
from explorer.record import Measurement, ModelRef, Policy, RunSpec
from explorer.record.card import Card
from explorer.record.graph import ModelGraph
from explorer.view.text.runs import card_rows, headroom_text
from tests.golden.b200.loop import ROWS, STEPS, simulated
from tests.zoo import sample

played = cache(lambda row_id: simulated(ROWS[row_id]))


@pytest.mark.parametrize("row_id", ["small-bf16-backward-w5", "small-fp32-forward-w5"])
def test_a_step_is_held_as_the_b200_held_it_to_the_byte(row_id: str) -> None:
    row, memory = ROWS[row_id], played(row_id).card
    assert memory.refused is None
    assert memory.allocated_bytes == row["peak_allocated_bytes"]
    assert memory.reserved_bytes == row["peak_reserved_bytes"]
    assert memory.workspace_bytes == (2 if "backward" in row_id else 1) * 8_519_680


def test_an_optimizer_of_the_loops_own_is_recorded() -> None:
    """Two moments a parameter, each made anew while the former is held; benchmarks/card.py has the B200's row."""
    spec = RunSpec(model=MODELS["tiny"], optimizer="none", card=CARDS["b200"])
    run = measure_without_data(spec, step=STEPS["forward+loss+backward+AdamW"])
    before = ledger(run, tick=0).by_role
    assert before["optimizer state"] == 2 * before["parameter"]
    assert "optimizer" in [span.phase for span in run.phases]


def test_a_request_is_refused_where_the_b200_refused_it() -> None:
    """A row that trains, and was refused in the sixth layer of its forward: the others only hold memory."""
    row = ROWS["fit-small-8192"]
    memory, row = simulated({**row, "scope": "forward", "reached": 6}).card, row["refused"]
    refused = memory.refused
    assert f"{refused.n_bytes / 2**30:.2f} GiB" == row["tried"]
    assert refused.allocated_bytes == row["allocated_bytes"]
    assert f"{refused.free_bytes / 2**30:.2f} GiB" == row["reserved_but_unallocated"]
    assert (refused.phase, refused.op) == ("forward", "aten.exp.default")
    assert row["where"].startswith("forward, softmax of the attention scores: the exp")


def test_the_drivers_share_in_forward_and_in_an_optimizer_is_that_of_the_b200s_messages() -> None:
    later, first = CARDS["b200"], replace(CARDS["b200"], taken_in_backward_bytes=None)
    for row_id, card in zip(
        ("10B-fp32-train-w5", "10B-bf16-train-w5", "memory-xl-s2048-fp32-forward"), (later, later, first)
    ):
        free_mib = float(ROWS[row_id]["refused"]["gpu_free"].removesuffix(" MiB"))
        assert abs(ROWS[row_id]["peak_reserved_bytes"] + free_mib * 2**20 - capacity_bytes(card)) < 0.02 * 2**20


def test_what_the_driver_takes_in_backward_is_refused_there_and_not_in_forward() -> None:
    run = played("small-bf16-backward-w5")
    whole, missing = run.card.reserved_bytes, run.card.stranded_bytes + 2**22
    card = Card(name="", total_bytes=whole, taken_bytes=0, cublas=run.card.card.cublas)
    cards = card, replace(card, taken_in_backward_bytes=missing), replace(card, taken_bytes=whole // 2)
    refused = [memory_on(card, run, others=()).refused for card in cards]
    assert [request and (request.phase, request.step) for request in refused] == [None, ("backward", 1), ("forward", 1)]


def test_steps_that_differ_are_an_interval_and_steps_that_repeat_end_early() -> None:
    """Each moment is made in new memory, so a step never finds the memory of a step before."""
    row, run = ROWS["small-fp32-train-w0"], played("small-fp32-train-w0")
    assert run.card.reserved_bytes == row["peak_reserved_bytes"]
    spans = [memory_on(replace(CARDS["b200"], n_steps=n), run, others=()) for n in (2, 5, 12)]
    assert [memory.n_steps for memory in (run.card, *spans)] == [row["step"], 2, 5, 12]
    one, few, many = ((memory.least_allocated_bytes, memory.allocated_bytes) for memory in spans)
    assert many[0] <= few[0] <= one[0] == one[1] <= few[1] <= many[1] and many[0] < many[1]
    assert [memory.reserved_bytes for memory in spans] == sorted(memory.reserved_bytes for memory in spans)
    few, many = (memory_on(replace(CARDS["b200"], n_steps=n), played("small-bf16-backward-w5")) for n in (5, 1000))
    assert few == replace(many, card=few.card) and few.n_steps < 5 and few.least_reserved_bytes == few.reserved_bytes


@pytest.mark.parametrize("form", ["default", "for-loop", "foreach", "fused"])
def test_adamw_counts_its_steps_on_the_card_in_its_fused_form_alone(form: Literal["default", "fused"]) -> None:
    """A bias of one element has moments as small as a counter."""
    model = ModelRef(target="sample_models/mlp.py", size="small")
    run = measure_without_data(RunSpec(model=model, optimizer_form=form, card=CARDS["h100"]))
    sizes = [parameter.numel() for parameter in load(model).model.parameters()]
    assert 1 in sizes
    log = run.allocations
    state = [log.n_bytes[entry] for entry in program_of(run).first if log.role[entry] == STATE]
    assert sum(state) == 4 * (2 * sum(sizes) + (len(sizes) if form == "fused" else 0))


DRIVER_OF_H200 = (552_402_944, 804_061_184)
"""What driver and context of a real H200 took at the start, and after forward, backward and a convolution."""


def test_the_share_of_an_unknown_driver_holds_that_of_a_real_one() -> None:
    card = parse_card("24GiB")
    least, most = 256 * 2**20, 800 * 2**20
    assert least < DRIVER_OF_H200[0] and DRIVER_OF_H200[1] <= most
    assert capacity_bytes(card) == 24 * 2**30 - most
    assert card_rows(played("small-bf16-backward-w5").card)["Card"].endswith("of driver and context")
    memory = memory_on(card, played("small-bf16-backward-w5"))
    assert card_rows(memory)["Card"].endswith("assumed to take 256.0 MiB to 800.0 MiB")
    left = card.total_bytes - memory.reserved_bytes
    assert headroom_text(memory) == f"{mib(left - most)} to {mib(left - least)}"
    with pytest.raises(BadInput, match="800.0 MiB of it"):
        parse_card("800MiB")
    assert capacity_bytes(parse_card("801MiB")) == 2**20


def test_a_smaller_card_empties_its_cache_or_names_the_refusal() -> None:
    run = played("small-bf16-backward-w5")
    whole = memory_on(CARDS["b200"], run)
    stranded = (whole.allocated_bytes + int(share * whole.stranded_bytes) for share in (0.25, 0.5, 0.75))
    for total_bytes in (*stranded, whole.reserved_bytes, whole.reserved_bytes // 2):
        memory = memory_on(Card(name="smaller", total_bytes=total_bytes, taken_bytes=0), run)
        assert memory.stranded_bytes >= 0
        if memory.refused is None:
            assert memory.allocated_bytes <= memory.reserved_bytes <= total_bytes
        else:
            assert total_bytes < whole.reserved_bytes, "just enough is enough"
    refused = memory.refused
    assert refused.step == 1 and refused.block.startswith("layers.")
    assert refused.reserved_bytes + refused.n_bytes > total_bytes - 2 * 2**20


def test_the_setting_of_cublas_decides_the_size_of_its_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert workspace_bytes(parse_card("24GiB")) == (2 * 4096 + 8 * 16) * 2**10


def test_the_lists_of_autocast_are_those_of_the_installed_torch() -> None:
    """Second source: the header that torch ships."""
    header = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()

    def listed(name: str) -> set[str]:
        body = re.search(rf"#define {name}\(_\)(.*?)\n\n", header, re.DOTALL)
        rows = re.findall(r"_\(\s*(\w+)(?:,\s*(\w+))?\s*\)", body[1])
        return {f"{base}.{overload}" if overload else base for base, overload in rows}

    assert listed("AT_FORALL_FP32") == FLOAT32 - {"norm.Scalar", "norm.ScalarOpt_dim"}
    assert listed("AT_FORALL_FP32_SET_OPT_DTYPE") == FLOAT32_RESULT
    assert listed("AT_FORALL_PROMOTE") == PROMOTED
    inside = {"_convolution", "convolution", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"}
    inside.add("_scaled_dot_product_flash_attention")  # like the others, part of an operator that is listed too
    assert listed("AT_FORALL_LOWER_PRECISION_FP") - inside == LOWER | LOWER_ON_BOTH


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


def test_autocast_casts_a_parameter_once_and_promotes_mixed_types() -> None:
    weight, x = torch.ones(8, 8, requires_grad=True), torch.ones(2, 8)
    half = torch.ones(2, 8, dtype=torch.bfloat16)
    with cuda_rules(), torch.autocast("cpu", torch.bfloat16):
        saved: list[Tensor] = []
        with looking_at_saved(saved.append):
            first, second = (torch.einsum("bi,oi->bo", x.requires_grad_(), weight) for _ in range(2))
        assert first.dtype == second.dtype == torch.bfloat16
        copies = {tensor.untyped_storage()._cdata for tensor in saved if tensor.numel() == weight.numel()}
        assert len(copies) == 1
        assert torch.addcmul(x, half, half).dtype == torch.float32
        assert torch.addcmul(half, half, half).dtype == torch.bfloat16
        assert torch.cat((half, x)).dtype == torch.float32
        with pytest.raises(RuntimeError, match="binary_cross_entropy"):
            F.binary_cross_entropy(half.sigmoid(), half)


def kept_by(forward: Any, *tensors: Tensor) -> list[tuple[torch.dtype, int]]:
    """(type, elements) of what backward keeps, the tensors themselves left out."""
    saved: list[Tensor] = []
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    with looking_at_saved(saved.append):
        forward(*tensors)
    return [(t.dtype, t.numel()) for t in saved if t.untyped_storage()._cdata not in storages]


def test_dropout_keeps_a_mask_of_one_byte_an_element() -> None:
    with cuda_rules(), FakeTensorMode():
        x = torch.empty(4, 64, requires_grad=True)
        assert kept_by(nn.Dropout(0.1), x) == [(torch.bool, 256)]
        assert kept_by(nn.Dropout(0.1).eval(), x) == []


def test_the_backward_of_flash_holds_its_sums_while_it_runs() -> None:
    """By hand, from `mha_bwd`: 40 rows are padded to 128, heads of 40 to 64, and two heads of keys serve four."""
    n_bytes: list[int] = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            n_bytes.extend(size for group in memory(func, args, kwargs or {}, result) for size in group)
            return result

    memory = KernelMemory(Card(name="a card", total_bytes=2**36, capability="8.0"))
    with cuda_rules("8.0"), FakeTensorMode():
        q = torch.empty(2, 4, 40, 40, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.empty(2, 2, 40, 40, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        loss = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).contiguous().sum()
        with Made():
            loss.backward()
    one_of_each_head = 2 * 40 * 4 * 40 * 2
    copied = one_of_each_head  # the gradient of a sum is one number in memory
    assert n_bytes == [2 * 4 * 128 * 4, 2 * 128 * 4 * 64 * 4, *[one_of_each_head] * 2, copied]


MODELS = {
    "vit": sample("vit", n_layers=2),
    "gpt": sample("gpt", n_layers=2),
    "tiny": ModelRef(target="tests/browser/tiny_model.py:large"),
}


@cache
def on_b200(name: str) -> tuple[Measurement, Forecaster, ModelGraph]:
    autocast: Literal["none", "bfloat16"] = "bfloat16" if name == "gpt" else "none"
    run = measure_without_data(RunSpec(model=MODELS[name], card=CARDS["b200"], autocast=autocast))
    with without_data():
        graph = describe(MODELS[name])
    return run, Forecaster(run, graph), graph


@pytest.mark.parametrize(("name", "model"), [
    ("all", "gpt"),  # its backward casts a gradient before it reads what was saved
    ("keep-products", "vit"),
    ("nested beside a segment", "tiny"),
])  # fmt: skip
def test_the_forecast_of_a_policy_fills_a_card_as_the_policy_played_does(name: str, model: str) -> None:
    nested = Policy.recompute(["layers.0", "layers.0.inner", ("layers.2", "layers.3")])
    run, forecaster, graph = on_b200(model)
    policy = nested if model == "tiny" else preset(name, graph)
    step, played_step = forecaster.step(policy), measure_without_data(replace(run.spec, policy=policy))
    assert step.held_peak_bytes == forecaster.peak_bytes(policy), "the line of the forecast, event by event"
    forecast = memory_on(CARDS["b200"], step, others=())
    for name in ("requested_bytes", "allocated_bytes", "reserved_bytes"):
        assert getattr(forecast, name) == getattr(played_step.card, name), name
    assert step.allocations.n_ticks == played_step.allocations.n_ticks
    less = Card(name="less", total_bytes=forecast.reserved_bytes - 2**21, taken_bytes=0)
    refused, there = (memory_on(less, one, others=()).refused for one in (step, played_step))
    assert (refused is None) == (there is None)
    if refused and there:
        assert (refused.block, refused.op, refused.n_bytes) == (there.block, there.op, there.n_bytes)


def test_every_operator_without_a_rule_is_named_with_the_room_that_it_has() -> None:
    """The room is what the peak lies above the bytes at the operator: a second count from the timeline."""
    run, _, _ = on_b200("vit")
    log = run.allocations
    part, norms = run.card.unknown
    assert norms.ops == ("native_layer_norm_backward",)
    assert part.ops == ("convolution", "convolution_backward") and part.most_bytes is None, "cuDNN sets no bound"
    held = [log.held_bytes[born] for born, op in zip(log.born, log.op) if "convolution" in log.ops[op]]
    assert part.room_bytes == pytest.approx(max(log.held_bytes) - max(held), abs=64 * 512)
    renamed = replace(log, ops=tuple(op.replace("aten.gelu.", "mine.gelu.") for op in log.ops))
    unknown = memory_on(CARDS["b200"], replace(run, allocations=renamed), others=()).unknown
    assert [part.ops for part in unknown if part.what == WITHOUT_RULE] == [("gelu",)]
    too_small = Card(name="small", total_bytes=run.card.reserved_bytes // 2, taken_bytes=0)
    assert {part.room_bytes for part in memory_on(too_small, run, others=()).unknown} == {None}
    spaces = (torch.ops.aten, torch.ops.explorer)
    missing = [name for name in RESULTS_ALONE if not any(hasattr(space, name) for space in spaces)]
    assert not missing, f"names that torch does not have: {missing}"
