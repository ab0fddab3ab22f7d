"""A policy beside torch.compile, DistributedDataParallel and FSDP2 keeps every bit of the gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from explorer.child_process.forks import at_hand
from explorer.engine.policy.apply import apply_policy
from explorer.record.policy import KEEP_ALL, Policy

BLOCKS = ("0", "1", "2")
ALL = Policy.recompute(BLOCKS)
SEGMENT = Policy.recompute([BLOCKS])
BACKEND = "aot_eager"
"""Traces forward and backward as inductor does, and compiles nothing: the bits stay those of the kernels."""

Compiled = tuple[nn.Module, nn.Module]
"""The model to police, and what to call."""


def net(kind: Any) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2)) for _ in BLOCKS]
    return kind(blocks) if kind is Listed else kind(*blocks)


class Listed(nn.ModuleList):
    """The same blocks, called one after the other by a forward of their own."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


def blocks_compiled(model: nn.Module) -> Compiled:
    for name in BLOCKS:
        model._modules[name] = torch.compile(model._modules[name], backend=BACKEND)  # type: ignore[assignment]
    return model, model


def whole_compiled(model: nn.Module) -> Compiled:
    return model, torch.compile(model, backend=BACKEND)


def step(compiled: Compiled, policy: Policy) -> tuple[list[Tensor], int]:
    """Gradients of the second step, and bytes saved for its backward, parameters excluded."""
    model, called = compiled
    apply_policy(model, policy)
    constant = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in constant:
            held[storage._cdata] = storage.nbytes()
        return tensor

    for _ in range(2):
        model.zero_grad()
        held.clear()
        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = called(torch.linspace(-1, 1, 64).reshape(4, 16)).square().mean()
        loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None], sum(
        held.values()
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's tracer reads it, torch 2.13
@pytest.mark.parametrize(("kind", "compiled", "policy", "is_effective"), [
    (nn.Sequential, blocks_compiled, ALL, True),
    (nn.Sequential, whole_compiled, ALL, True),
    (Listed, blocks_compiled, SEGMENT, True),
    (Listed, whole_compiled, SEGMENT, False),  # dynamo looks past a module's own way of being called
])  # fmt: skip
def test_a_compiled_model_recomputes_to_the_same_bits(
    kind: Any, compiled: Callable[[nn.Module], Compiled], policy: Policy, is_effective: bool
) -> None:
    torch._dynamo.reset()
    expected, kept_bytes = step(compiled(net(kind)), KEEP_ALL)
    gradients, held_bytes = step(compiled(net(kind)), policy)
    assert len(gradients) == len(expected) == 2 * len(BLOCKS)
    assert all(map(torch.equal, gradients, expected))
    assert held_bytes < kept_bytes if is_effective else held_bytes == kept_bytes


HOW = ("ddp", "fsdp of policed", "policed fsdp")
Tensors = dict[str, Tensor]


@pytest.mark.slow
def test_two_ranks_keep_their_gradients_under_a_policy(tmp_path: Path) -> None:
    # A rank that gloo aborts is started once more; wrong gradients are wrong again.
    for attempt in (tmp_path / "first", tmp_path / "second"):
        attempt.mkdir()
        codes = codes_of_ranks(attempt)
        if codes == [0, 0]:
            break
    assert codes == [0, 0]
    for rank in range(2):
        assert (attempt / str(rank)).read_text().splitlines() == [f"{how}: the same 19 tensors" for how in HOW]


def codes_of_ranks(folder: Path) -> list[int | None]:
    ranks = [at_hand().start(ranked, rank, str(folder), needs=["torch._dynamo"]) for rank in range(2)]
    try:
        for process in ranks:
            process.wait()
        return [process.code for process in ranks]
    finally:
        for process in ranks:
            process.close()


def normed_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)),
        nn.Linear(16, 1, bias=False),
    )


def rank_step(how: str, policy: Policy) -> Tensors:
    """Whole gradients and running statistics of this rank's second rank_step."""
    model: nn.Module = Listed(normed_net())
    called = model
    if how != "policed fsdp":
        apply_policy(model, policy)
    if how == "ddp":
        called = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if how == "policed fsdp":
        apply_policy(model, policy)
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(3 + dist.get_rank())
        called(torch.randn(4, 16)).square().mean().backward()
    tensors = {name: _whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    return tensors | {name: b.clone() for name, b in model.named_buffers() if "num_batches" not in name}


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def ranked(rank: int, folder: str) -> None:
    """One rank's process; writes what it found equal."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with (Path(folder) / str(rank)).open("w") as told:
        for how in HOW:
            expected = rank_step(how, Policy())
            for tensors in (rank_step(how, ALL), rank_step(how, SEGMENT)):
                wrong = [name for name in expected if not torch.equal(expected[name], tensors[name])]
                assert expected.keys() == tensors.keys() and not wrong, wrong
            print(f"{how}: the same {len(tensors)} tensors", file=told)
    dist.barrier()
    dist.destroy_process_group()
