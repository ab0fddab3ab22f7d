"""Equal means every bit: NaN payloads, the sign of zero, type and shape."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.masked import masked_tensor
from torch.nn.parameter import UninitializedBuffer

import explorer
from explorer.engine.compare.compare import compare
from explorer.engine.model.describe import describe
from explorer.engine.state.bits import contents, dense, n_bytes, same_bits, storages
from explorer.record.graph import ModelRef
from explorer.record.policy import KEEP_ALL
from explorer.record.run import RunSpec

pytestmark = pytest.mark.filterwarnings("ignore")  # kinds of tensors that torch calls prototypes

NAN = torch.tensor([math.nan])
OTHER_NAN = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(("left", "right", "same"), [
    (NAN, NAN.clone(), True),
    (NAN, OTHER_NAN, False),
    (torch.tensor(0.0), torch.tensor(-0.0), False),
    (torch.ones(2), torch.ones(2, 1), False),
    (torch.ones(2), torch.ones(2).double(), False),
    (torch.arange(6.0).reshape(2, 3).t(), torch.arange(6.0).reshape(2, 3).t().contiguous(), True),
    (torch.tensor([True, False]), torch.tensor([True, True]), False),
    (torch.tensor([1 + 2j]), torch.tensor([1 - 2j]).conj(), True),
    (torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16), True),
    (torch.empty(0), torch.empty(0), True),
])  # fmt: skip
def test_two_tensors(left: Tensor, right: Tensor, same: bool) -> None:
    assert same_bits(left, right) == same == same_bits(right, left)


def _sparse(layout: torch.layout, value: float) -> Tensor:
    tensor = torch.diag(torch.tensor([value, 2.0, 3.0, 4.0]))
    block = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    return tensor.to_sparse(layout=layout, blocksize=block)


class Wrapper(Tensor):
    """A subclass that has no memory and holds another tensor, as fp8 and sharded ones do."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Wrapper:
        wrapper = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        wrapper.held = held
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} ran on a tensor that is only read")


class Flattened(Wrapper):
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None


def _masked(value: float) -> Tensor:
    return masked_tensor(torch.tensor([value, 2.0]), torch.tensor([True, False]))


def _quantised(value: float, dtype: torch.dtype) -> Tensor:
    return torch.quantize_per_tensor(torch.tensor([value, 2.0, 3.0]), 0.1, 0, dtype)


def _scaled(value: float) -> Tensor:
    scales = torch.tensor([0.1, value], dtype=torch.float64)
    return torch.quantize_per_channel(torch.ones(2, 3), scales, torch.tensor([0, 1]), 0, torch.qint8)


def _nested(value: float, layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.full((2, 3), value), torch.ones(1, 3)], layout=layout)


def _half_complex(value: float) -> Tensor:
    return torch.full((2,), complex(1, value), dtype=torch.complex64).to(torch.complex32)


KINDS: dict[str, Callable[[float], Tensor]] = {
    **{f"{layout}": partial(_sparse, layout) for layout in
       (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)},
    **{f"{dtype}": partial(_quantised, dtype=dtype) for dtype in
       (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2)},
    "scaled by channel": _scaled,
    "nested": partial(_nested, layout=torch.strided),
    "ragged": partial(_nested, layout=torch.jagged),
    "mkldnn": lambda value: torch.full((3, 3), value).to_mkldnn(),
    "wrapper": lambda value: Wrapper(torch.full((3,), value)),
    "flattened": lambda value: Flattened(torch.full((3,), value)),
    "wrapper of wrapper": lambda value: Wrapper(Flattened(_sparse(torch.sparse_csr, value))),
    "masked": _masked,
    "parameter": lambda value: torch.nn.Parameter(torch.full((2,), value)),
    "expanded": lambda value: torch.tensor(value).expand(5),
    "conjugate": lambda value: torch.full((2,), complex(1, value)).conj(),
    "negative": lambda value: torch.full((2,), complex(1, value)).conj().imag,
    "complex32": _half_complex,
    "float8": lambda value: torch.full((2,), value).to(torch.float8_e4m3fn),
    "uint16": lambda value: torch.full((2,), int(value), dtype=torch.uint16),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_any_kind(kind: str) -> None:
    make = KINDS[kind]
    one, same, other = make(1.0), make(1.0), make(2.0)
    assert same_bits(one, same) and not same_bits(one, other)
    assert contents(one), "no byte was read"
    assert n_bytes(one) > 0
    assert dense(one).numel() and dense(one).layout is torch.strided and type(dense(one)) is Tensor
    assert same_bits(dense(one), dense(same)) and not same_bits(dense(one), dense(other))
    assert bool(storages(one)) == (kind != "mkldnn"), "oneDNN's memory is closed to Python"


def _freed() -> Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def _fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(3)


@pytest.mark.parametrize("make", [_freed, _fake, lambda: torch.ones(3, device="meta"), lambda: torch.ones(0, 3),
                                  lambda: UninitializedBuffer()])  # fmt: skip
def test_a_tensor_without_bytes_is_its_form(make: Callable[[], Tensor]) -> None:
    assert same_bits(make(), make()) and not same_bits(make(), torch.ones(3, 1))
    assert not sum(storage.nbytes() for storage in storages(make())) and not dense(make()).numel()


def test_a_zero_without_memory_is_zeros() -> None:
    zero = torch._efficientzerotensor(3)
    assert not storages(zero) and same_bits(zero, torch.zeros(3)) and torch.equal(dense(zero), torch.zeros(3))


def test_a_wrapper_of_functorch_is_what_it_wraps() -> None:
    seen = []

    def forward(value: Tensor) -> Tensor:
        seen.append((n_bytes(value), same_bits(value, value), dense(value).numel()))
        return value * 2

    with warnings.catch_warnings(action="ignore"):  # torch scripts its formulas at the first call
        torch.func.jvp(forward, (torch.ones(3),), (torch.ones(3),))
    torch.func.vmap(forward)(torch.ones(2, 3))
    torch.func.grad(lambda value: forward(value).sum())(torch.ones(3))
    assert seen == [(12, True, 3), (24, True, 6), (12, True, 3)]


class Holder(nn.Module):
    """A block with a buffer and an attribute of one kind; the buffer takes part where torch can multiply with it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.register_buffer("held", KINDS[kind](1.0))
        self.attribute = [KINDS[kind](1.0)]
        self.fc = nn.Linear(4, 4)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("torch.sparse_coo", "torch.sparse_csr"):
            x = (self.get_buffer("held") @ x.t()).t()
        if self.kind == "parameter":
            with warnings.catch_warnings(action="ignore"):
                return torch.func.jvp(self.fc, (x,), (x,))[1] + torch.func.vmap(self.fc)(x)
        return torch.relu(self.fc(x)) + x


def every_kind() -> tuple[nn.Module, Tensor]:
    kinds = [kind for kind in KINDS if "wrapper" not in kind and kind != "flattened"]
    return nn.Sequential(*map(Holder, kinds)), torch.randn(64, 4)


def _step(model: nn.Module, batch: Tensor) -> Tensor:
    model.zero_grad()
    loss: Tensor = model(batch).square().sum()
    loss.backward()
    return loss


@pytest.mark.slow  # five instruments, two of them in processes
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning")
def test_a_model_with_buffers_of_every_kind_opens_in_every_instrument() -> None:
    ref = ModelRef(target=f"{__file__}:every_kind")
    assert len(describe(ref).blocks) > len(KINDS)
    model, batch = every_kind()
    with explorer.record_step(model) as run:
        _step(model, batch)
    assert run.measurement.step_peak_bytes > 0
    assert explorer.judge(_step, _step, model, batch).verdict == "bitwise equal"
    plan = explorer.auto_policy(model, lambda: _step(model, batch), budget="95%")
    assert plan.policy.units
    specs = [RunSpec(model=ref, optimizer="none", policy=policy, n_repeats=1) for policy in (KEEP_ALL, plan.policy)]
    compared = compare(*specs)
    assert compared.verdict == "bitwise equal", compared.failure or compared.not_reproducible_because
