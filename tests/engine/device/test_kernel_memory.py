"""Kernels in a step without data hold what torch's own CUDA code holds on an imaginary card, by version of torch."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from benchmarks.imaginary.operators import Program, attentions, call, kernel_of, programs, temporaries
from explorer.engine.device.cuda_rules import cuda_rules
from explorer.engine.device.kernel_memory import PARTS, REDUCED_LOSSES, KernelMemory
from explorer.plan.card.cards import CARDS
from explorer.plan.card.kernel_scratch import REDUCTIONS
from explorer.plan.card.torch_rules import TORCH_VERSIONS, lt_workspace_bytes, workspace_bytes
from explorer.record.card import Card
from tests.engine.imaginary.test_workspaces import AT_THE_END_OF_A_RULE

GOLDEN = Path(__file__).parents[2] / "golden" / "imaginary"
ROWS: dict[str, list[dict[str, Any]]] = {
    version: json.loads((GOLDEN / f"torch-{version}.json").read_text()) for version in TORCH_VERSIONS
}


def card_of(version: str, row: dict[str, Any]) -> Card:
    card = Card(name="imaginary", total_bytes=2**37, capability=row["capability"], torch=version)
    return replace(card, multiprocessors=row["multiprocessors"])


def without_data(program: Program) -> tuple[Any, tuple[Any, ...], Any]:
    """The operator, its arguments and its result."""
    with FakeTensorMode():
        operator, arguments = call(program, "cpu")
        return operator, arguments, operator(*arguments)


def held_by(called: tuple[Any, tuple[Any, ...], Any], card: Card | None) -> list[int]:
    """Bytes at most and afterwards, as `operators.measured`."""
    operator, arguments, result = called
    scratch = KernelMemory(card)(operator, arguments, {}, result)
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    kept = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    return [kept + max((sum(group) for group in scratch), default=0), kept]


@cache
def calls() -> list[tuple[Any, tuple[Any, ...], Any]]:
    return [without_data(program) for program in programs()]


@pytest.mark.parametrize("version", TORCH_VERSIONS)
def test_operators_hold_what_torch_holds_on_a_card(version: str) -> None:
    wrong, n_scratch = [], 0
    for row in ROWS[version]:
        card = card_of(version, row)
        for program, called, held in zip(programs(), calls(), row["held"], strict=True):
            n_scratch += held[0] > held[1]
            if (here := held_by(called, card)) != held:
                wrong.append((row["capability"], program, held, here))
    assert not wrong, f"{len(wrong)}, the first: {wrong[:3]}"
    assert n_scratch > 1000, "programs without scratch would judge nothing"


@pytest.mark.parametrize("version", [version for version in TORCH_VERSIONS if "temporaries" in ROWS[version][0]])
def test_norms_and_attention_hold_in_backward_what_torch_holds_on_a_card(version: str) -> None:
    called = [(program, without_data(program)) for program in temporaries()]
    wrong, n_judged = [], 0
    for row in ROWS[version]:
        card = card_of(version, row)
        for (program, operation), held in zip(called, row["temporaries"], strict=True):
            n_judged += bool(held)
            if held and (here := held_by(operation, card)) != held:
                wrong.append((row["capability"], program, held, here))
    assert not wrong, f"{len(wrong)} of {n_judged}, the first: {wrong[:3]}"
    assert n_judged > 1000, "torch refuses bfloat16 on 7.5 alone"


@pytest.mark.parametrize("version", TORCH_VERSIONS)
def test_workspaces_are_those_of_torch_on_a_card(version: str) -> None:
    for row in ROWS[version]:
        card = card_of(version, row)
        assert [workspace_bytes(card), lt_workspace_bytes(card)] == row["workspaces"], row["capability"]


@pytest.mark.parametrize("version", [version for version in TORCH_VERSIONS if "attention" in ROWS[version][0]])
def test_attention_takes_the_kernel_that_torch_takes_on_a_card(version: str) -> None:
    wrong, kernels = [], set()
    for row in ROWS[version]:
        with cuda_rules(row["capability"], version), FakeTensorMode():
            for attention, kernel in zip(attentions(), row["attention"], strict=True):
                kernels.add(kernel)
                if (here := kernel_of(attention, "cpu")) != kernel:
                    wrong.append((row["capability"], attention, kernel, here))
    assert not wrong, f"{len(wrong)}, the first: {wrong[:3]}"
    assert kernels == {"", "flash", "efficient", "cudnn"}


@pytest.mark.parametrize("loss", ["mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy"])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_a_reduced_loss_keeps_the_storage_that_the_cpu_keeps(loss: str, reduction: int) -> None:
    """Second source: torch itself, on the CPU of this machine."""
    arguments: list[Any] = [None, reduction] if loss == "binary_cross_entropy" else [reduction]
    program = [f"{loss}.default", "float32", [[64, 64], [64, 64]], arguments, None]
    operator, inputs = call(program, "cpu")
    real = operator(*(part.fill_(0.5) if isinstance(part, Tensor) else part for part in inputs))
    assert held_by(without_data(program), None)[1] == real.untyped_storage().nbytes()


@pytest.mark.parametrize("case", AT_THE_END_OF_A_RULE)
def test_a_sum_takes_scratch_as_soon_as_two_blocks_share_a_result(case: tuple[int, int, int]) -> None:
    n_rows, n_columns, dim = case
    program = ["sum.dim_IntList", "float32", [[n_rows, n_columns]], [[dim]], None]
    kept = 4 * (n_rows, n_columns)[1 - dim]
    assert held_by(without_data(program), CARDS["t4"]) == [kept + sum(AT_THE_END_OF_A_RULE[case]), kept]


def test_every_operator_with_a_rule_is_unknown_on_a_card_without_multiprocessors() -> None:
    assert {name.partition(".")[0] for name in PARTS} | {*REDUCED_LOSSES} == REDUCTIONS


def test_a_card_without_multiprocessors_has_no_figure_for_scratch() -> None:
    program = ["sum.dim_IntList", "float32", [[8192, 4096]], [[0]], None]
    assert held_by(without_data(program), Card(name="24 GiB", total_bytes=24 * 2**30)) == [4096 * 4] * 2
