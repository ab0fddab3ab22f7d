"""cuBLAS's workspaces in a step on a GPU: an entry of their own, with the figure that torch's default setting gives.

The second method is the allocator itself: the same loop without the setting, and `on_card` against its counters.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace

from explorer.plan.card.cards import parse_card
from explorer.record.card import Card
from tests.engine.imaginary.test_run import has_cuda_build, values_on

LOOP = """
import explorer
from torch import nn
from explorer.record.allocations import ROLES
torch.manual_seed(0)
layers = [nn.Linear(512, 512, bias={bias}) for _ in range(4)]
{before}
model = nn.Sequential(*layers).cuda()
optimizer = torch.optim.AdamW(model.parameters())
out["steps"] = []
for _ in range(3):
    x = torch.randn(256, 512, device="cuda")
    with explorer.record_step(model) as run:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    log, peaks = run.measurement.allocations, run.measurement.peaks
    card = run.on_card("h100")
    out["steps"].append({{
        "workspaces": [n for n, role in zip(log.n_bytes, log.role) if ROLES[role] == "cuBLAS workspace"],
        "unattributed": sum(n for n, role in zip(log.n_bytes, log.role) if ROLES[role] == "unattributed"),
        "counted": [peaks.requested_peak_bytes, peaks.allocated_peak_bytes, peaks.reserved_peak_bytes],
        "on_card": [card.requested_bytes, card.allocated_bytes, card.reserved_bytes],
        "text": str(run),
    }})
"""


@cache
def steps_on(card: Card, setting: str = "", *, bias: bool = True, before: str = "") -> list[dict[str, Any]]:
    code = LOOP.format(bias=bias, before=before)
    return values_on(card, code, CUBLAS_WORKSPACE_CONFIG=setting)["steps"]  # type: ignore[return-value]


MIB = 1 << 20
H100 = parse_card("h100")
AMPERE = replace(H100, capability="8.0", multiprocessors=108)
HELD = {"h100": (H100, "", 32 * MIB), "8.0": (AMPERE, "", 8519680), "8.0, :16:8": (AMPERE, ":16:8", 128 << 10)}


@has_cuda_build
@pytest.mark.parametrize("name", HELD)
def test_a_thread_keeps_one_workspace_and_no_step_counts_it_twice(name: str) -> None:
    card, setting, n_bytes = HELD[name]
    for step in steps_on(card, setting):
        assert [size for size in step["workspaces"] if size != MIB] == [n_bytes] * 2  # 1 MiB: cuBLASLt's, torch 2.11
        assert step["unattributed"] < MIB // 8 and "convolution" not in step["text"]
        if card is H100:
            assert step["on_card"] == step["counted"]


@has_cuda_build
def test_the_peak_under_torchs_default_stands_beside_that_of_the_setting() -> None:
    by_default = steps_on(AMPERE)[-1]
    text = steps_on(AMPERE, ":16:8")[-1]["text"]
    assert f"With torch's default the step peaks at {by_default['counted'][0] / MIB:.1f} MiB" in text
    assert "torch's default" not in by_default["text"]


AT_THE_END_OF_A_RULE = {
    (1024, 40960, 0): [],  # one block of threads for a result
    (1024, 30720, 0): [31457280, 960],  # two blocks
    (1023, 40960, 0): [],
    (64, 131072, 1): [512, 256],
    (64, 131071, 1): [512, 256],
    (80, 131072, 1): [],
}
"""Scratch of a sum by rows, columns and dimension: torch 2.11 and 2.13 on an imaginary T4, of 40 multiprocessors."""


@has_cuda_build
def test_a_sum_takes_the_scratch_that_the_rule_was_measured_by() -> None:
    seen = values_on(
        parse_card("t4"),
        f"for rows, columns, dim in {[*AT_THE_END_OF_A_RULE]}:\n"
        "    x = torch.empty(rows, columns, device='cuda')\n"
        "    torch.cuda.memory._record_memory_history()\n"
        "    kept = x.sum(dim)\n"
        "    events = torch.cuda.memory._snapshot()['device_traces'][0]\n"
        "    torch.cuda.memory._record_memory_history(enabled=None)\n"
        "    taken = [event['size'] for event in events if event['action'] == 'alloc']\n"
        "    out[str((rows, columns, dim))] = taken[1:]\n",
    )
    assert seen == {str(case): scratch for case, scratch in AT_THE_END_OF_A_RULE.items()}


@has_cuda_build
def test_a_tensor_as_large_as_a_workspace_is_none() -> None:
    """An average of weights from before the step, that the script holds."""
    held = f"average = torch.zeros({32 * MIB // 4}, device='cuda')\nother = torch.zeros({MIB // 4}, device='cuda')"
    last = steps_on(H100, bias=False, before=held)[-1]
    assert last["workspaces"] == [32 * MIB] * 2


@has_cuda_build
def test_a_refused_step_names_them_too_and_its_request_to_the_byte() -> None:
    seen = values_on(
        replace(parse_card("24GiB"), capability="9.0"),
        "import explorer\n"
        "from torch import nn\n"
        "from explorer.record.allocations import ROLES\n"
        "model = nn.Linear(4096, 4096).cuda()\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "model(torch.randn(8, 4096, device='cuda')).sum().backward(); optimizer.step()\n"
        "try:\n"
        "    with explorer.record_step(model, optimizer) as run: model(torch.randn(1700001, 4096, device='cuda'))\n"
        "except torch.OutOfMemoryError: pass\n"
        "log = run.measurement.allocations\n"
        "out['held'] = [n for n, role in zip(log.n_bytes, log.role) if ROLES[role] == 'cuBLAS workspace']\n"
        "out['sentence'] = run.measurement.failure.sentence",
    )
    assert seen["held"] == [32 * MIB] * 2
    assert f"{1700001 * 4096 * 4:,} bytes" in str(seen["sentence"]), "torch's text says 25.94 GiB"
