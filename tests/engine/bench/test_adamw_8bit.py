"""AdamW with moments in 8 bits: the layout, the codes and the update, against bitsandbytes where it is installed."""

from __future__ import annotations

import pytest
import torch

from explorer.engine.bench.adamw_8bit import BLOCK, AdamW8bit, codes

SHAPES = ((100, 100), (4096,), (4095,), (3, 2000), (1,))


def stepped(n_steps: int = 1, **options: object) -> tuple[list[torch.Tensor], AdamW8bit]:
    torch.manual_seed(0)
    parameters = [torch.randn(shape, requires_grad=True, **options) for shape in SHAPES]  # type: ignore[call-overload]
    optimizer = AdamW8bit(parameters, lr=1e-2)
    for _ in range(n_steps):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter) + 1
        optimizer.step()
    return parameters, optimizer


def bytes_of(state: dict[str, object]) -> int:
    return sum(value.nbytes for name, value in state.items() if isinstance(value, torch.Tensor) and "codes" not in name)


def test_a_moment_has_a_byte_an_element_and_a_scale_for_each_block() -> None:
    parameters, optimizer = stepped()
    for parameter in parameters:
        n = parameter.numel()
        expected = 2 * (n + 4 * -(-n // BLOCK)) if n >= 4096 else 8 * n
        assert bytes_of(optimizer.state[parameter]) == expected
    tables = {id(v) for state in optimizer.state.values() for name, v in state.items() if "codes" in name}
    assert len(tables) == 2, "all parameters share the tables"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_update_is_that_of_adamw_but_for_rounding(dtype: torch.dtype) -> None:
    parameters, _ = stepped(20, dtype=dtype)
    torch.manual_seed(0)
    exact = [torch.randn(shape, requires_grad=True, dtype=dtype) for shape in SHAPES]
    start = [parameter.detach().clone() for parameter in exact]
    optimizer = torch.optim.AdamW(exact, lr=1e-2)
    for _ in range(20):
        for parameter in exact:
            parameter.grad = torch.randn_like(parameter) + 1
        optimizer.step()
    for ours, theirs, before in zip(parameters, exact, start):
        moved = (theirs - before).float().norm()
        distance = (ours - theirs).float().norm() / moved
        assert distance < (0.05 if dtype is torch.float32 else 0.2)
        is_rounded = ours.numel() >= 4096
        assert not is_rounded or distance > 0, "moments in 8 bits are another training"


def test_a_parameter_whose_elements_lie_otherwise_is_updated() -> None:
    parameter = torch.zeros(64, 128).t().requires_grad_()
    parameter.grad = torch.ones_like(parameter)
    AdamW8bit([parameter], lr=1e-2).step()
    assert torch.allclose(parameter, torch.tensor(-1e-2 * (1 - 1e-4)))  # the weight decays too


def test_the_codes_are_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    for signed in (True, False):
        assert torch.equal(codes(signed=signed), functional.create_dynamic_map(signed))


def test_the_state_has_the_bytes_of_bitsandbytes() -> None:
    optim = pytest.importorskip("bitsandbytes").optim
    parameters, ours = stepped()
    theirs = optim.AdamW8bit([torch.nn.Parameter(parameter.detach()) for parameter in parameters], lr=1e-2)
    for group_index, group in enumerate(theirs.param_groups):
        for index, (parameter, own) in enumerate(zip(group["params"], parameters)):
            theirs.init_state(group, parameter, group_index, index)
            tensors = {name: v for name, v in theirs.state[parameter].items() if not name.startswith("qmap")}
            assert bytes_of(tensors) == bytes_of(ours.state[own])
