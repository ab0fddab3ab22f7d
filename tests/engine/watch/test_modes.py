"""Every kind of call that reaches a dispatch mode of ours, through every one of them: the call cannot tell.

The calls are torch's own: all operators of its dispatcher by name, a sample of each operator and higher-order operator
that its test suite has (OpInfo), and programs for what these lack: nested layouts, torch.func, custom operators. The
modes are found by walking the package, so a new mode fails here until it has a line in `MODES`.
"""

from __future__ import annotations

import gc
import importlib
import pkgutil
import sys
import unittest
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops.map import map as mapped
from torch._ops import _higher_order_ops
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import explorer
from explorer.engine.bench.bench import _OperatorWatch
from explorer.engine.bench.user_loop import _LoopTracker
from explorer.engine.compare.outcome import Branches, SameBranches, SameDraws
from explorer.engine.compare.watched import RerunDraws, RerunWatch
from explorer.engine.device.device import device_of
from explorer.engine.model.describe import _Notes
from explorer.engine.ranks.predict import _WithoutData
from explorer.engine.watch.checkpoint_error import _ThirdRun
from explorer.engine.watch.collectives import Buckets, kind_of
from explorer.engine.watch.flops import formula, lacks_formula
from explorer.engine.watch.forward import ForwardWatch, NoteTaker, Operator
from explorer.engine.watch.modes import (
    DispatchMode,
    draws_numbers,
    is_composite,
    is_noted,
    packet_name,
    writes_arguments,
)
from explorer.engine.watch.real_bytes import RealBytes
from explorer.engine.watch.scopes import BlockWatch
from explorer.engine.watch.tracker import Tracker
from explorer.errors import ModelFailed
from explorer.record.policy import KEEP_ALL

CPU = torch.device("cpu")
ANY = nn.Linear(2, 2)
MODES: dict[type, Callable[[nn.Module], Any]] = {
    Tracker: lambda model: Tracker(model, CPU),
    _LoopTracker: lambda model: _LoopTracker(model, CPU),
    ForwardWatch: lambda model: _Notes(model, lets_go=False).watch,
    RerunDraws: RerunDraws,
    RerunWatch: lambda model: RerunWatch(model, KEEP_ALL),
    _OperatorWatch: lambda model: _OperatorWatch(model, device_of(CPU).clock()),
    _ThirdRun: _ThirdRun,
    Buckets: lambda model: Buckets(),
    _WithoutData: lambda model: _WithoutData(),
    SameDraws: lambda model: SameDraws(torch.float32),
    Branches: lambda model: Branches(),
    RealBytes: lambda model: RealBytes("net.py:build"),
}
REPLAYS = {SameBranches}
"""Replays decisions of `Branches`, and raises where there are none."""


def subclasses(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def test_every_mode_of_the_package_is_tried_here() -> None:
    for module in pkgutil.walk_packages(explorer.__path__, "explorer."):
        if module.name.startswith("explorer.engine"):
            importlib.import_module(module.name)
    gc.collect()
    ours = {kind for kind in subclasses(TorchDispatchMode) if kind.__module__.startswith("explorer.")}
    assert all(issubclass(kind, DispatchMode) for kind in ours)
    has_name = {kind for kind in ours if "<locals>" not in kind.__qualname__}
    assert has_name - {DispatchMode, BlockWatch} == MODES.keys() | REPLAYS


def every_operator() -> Iterator[Any]:
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        yield getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    for query in ("size", "sym_size", "stride", "sym_stride", "numel", "sym_numel", "dim", "is_contiguous"):
        yield getattr(torch.ops.aten, query).default
    yield torch.ops.prim.device.default
    yield from _higher_order_ops.values()


def test_every_operator_of_torch_has_an_answer() -> None:
    answers = {}
    for func in every_operator():
        answers[str(func)] = is_noted(func)
        for question in (draws_numbers, writes_arguments, packet_name, is_composite, formula, lacks_formula, kind_of):
            question(func)
    assert len(answers) > 3000
    assert not any(answers[name] for name in ("aten.sym_size.default", "aten.dim.default", "prim.device.default"))
    written = ("aten._foreach_add_.Scalar", "aten.add_.Tensor", "aten.record_stream.default")
    assert all(answers[name] for name in (*written, "aten._local_scalar_dense.default", "aten.mm.default", "cond"))


def samples() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The first sample of each operator that torch tests with float32 on the CPU, forward and backward."""
    # torch's test suite imports it for a class of tests that is not used here.
    sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.hop_db import hop_db

    for info in (*op_db, *hop_db):
        if torch.float32 not in info.supported_dtypes("cpu"):
            continue
        grad = info.supports_autograd
        try:
            sample = next(iter(info.sample_inputs("cpu", torch.float32, requires_grad=grad)))
        except (StopIteration, Exception):  # another library or another device is wanted
            continue

        def call(info: Any = info, sample: Any = sample, grad: bool = grad) -> Any:
            torch.manual_seed(0)
            leaves = [t for t in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, Tensor)]
            for leaf in leaves:
                leaf.grad = None
            out = info(sample.input, *sample.args, **sample.kwargs)
            made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad and t.numel()]
            if grad and made and made[0].layout is torch.strided and not made[0].is_nested:
                made[0].sum().abs().backward()
            return out, [leaf.grad for leaf in leaves]

        yield f"{info.name}.{info.variant_test_name}", call


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or the kind of error that it raises."""
    try:
        return call()
    except Exception as error:
        return type(error)


def plain_tensors(values: Any) -> list[Any]:
    return [v.detach().clone() if isinstance(v, Tensor) else v for v in tree_leaves(values)]


def same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other)
    if one.layout is not torch.strided or one.is_nested:
        return one.layout == other.layout
    return one.shape == other.shape and one.dtype == other.dtype


def bits_equal(one: Any, other: Any) -> bool:
    if not same(one, other):
        return False
    if not isinstance(one, Tensor):
        return one is other or bool(one == other)
    if one.layout is not torch.strided or one.is_nested or one.is_quantized:
        return True
    return torch.equal(one.nan_to_num(), other.nan_to_num()) if one.numel() else True


X = torch.linspace(-1, 1, 24).view(8, 3)
_library = torch.library.Library("modes_test", "FRAGMENT")
_library.define("twice(Tensor x) -> Tensor")
_library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
_library.define("note(Tensor x) -> ()")
_library.impl("note", lambda x: None, "CompositeExplicitAutograd")
_library.define("rows(Tensor x) -> int")
_library.impl("rows", lambda x: x.shape[0], "CompositeExplicitAutograd")


@torch.library.custom_op("modes_test::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x**3


@torch.library.custom_op("modes_test::fill", mutates_args={"x"})
def fill(x: Tensor) -> None:
    x.fill_(2.0)


def keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


cube.register_autograd(lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2, setup_context=keep)


def trained(function: Callable[[Tensor], Tensor]) -> Any:
    x = X.clone().requires_grad_()
    out = function(x)
    out.sum().backward()
    return out, x.grad


def in_rows(layout: torch.layout) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        rows = torch.nested.as_nested_tensor([x[:3], x[3:]], layout=layout)
        return (rows.sin() * 2).to_padded_tensor(0.0)

    return function


def custom(x: Tensor) -> Tensor:
    torch.ops.modes_test.note(x)
    y = torch.ops.modes_test.twice(x) * torch.ops.modes_test.rows(x)
    fill(torch.empty(2))
    return cube(y)


def flex(x: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    with torch.no_grad():
        q = x.view(1, 1, 8, 3)
        return x + flex_attention(q, q, q, score_mod=lambda score, *_: score * 2).view(8, 3)


def either(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))  # type: ignore[no-any-return]


PROGRAMS: list[tuple[str, Callable[[], Any]]] = [
    ("jagged", lambda: trained(in_rows(torch.jagged))),
    ("nested", lambda: trained(in_rows(torch.strided))),
    ("custom", lambda: trained(custom)),
    ("flex_attention", lambda: trained(flex)),
    ("cond", lambda: trained(either)),
    ("a cond inside of a cond", lambda: trained(lambda x: torch.cond(x.sum() < 9, either, torch.exp, (x,)))),
    ("while_loop", lambda: while_loop(lambda x: x.sum() < 90, lambda x: (x.exp(),), (X,))),
    ("scan", lambda: trained(lambda x: scan(lambda c, y: (c + y, c * y), x[0], x)[1])),
    ("associative_scan", lambda: trained(lambda x: associative_scan(torch.add, x, 0, combine_mode="generic"))),
    ("map", lambda: trained(lambda x: mapped(torch.sin, x))),
    ("vmap", lambda: trained(lambda x: torch.func.vmap(lambda row: row.sin() * row.sum())(x))),
    ("grad", lambda: torch.func.grad(lambda x: x.sin().sum())(X)),
    ("jvp", lambda: torch.func.jvp(torch.sin, (X,), (X,))),
    ("jacrev of a vmap", lambda: torch.func.jacrev(torch.func.vmap(torch.sin))(X)),
    ("functional_call", lambda: torch.func.functional_call(nn.Linear(3, 1), {"weight": X[:1], "bias": X[0, :1]}, (X,))),
    ("checkpoint", lambda: trained(lambda x: checkpoint(torch.sin, x, use_reentrant=False))),
    ("reentrant", lambda: trained(lambda x: checkpoint(torch.sin, x, use_reentrant=True))),
    ("sparse", lambda: trained(lambda x: torch.sparse.mm(X.T.to_sparse(), x))),
    ("quantised", lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8).dequantize()),
    ("compiled", lambda: trained(torch.compile(lambda x: x.sin() * 2, backend="eager"))),
]  # fmt: skip


READS_OPERATORS = {Tracker, ForwardWatch, _ThirdRun}
"""Modes that read every operator's arguments and results. The others look for a few, and are tried on the programs."""
REFUSE_HOOKS = {"grad", "jacrev of a vmap"}
"""torch refuses hooks on saved tensors in torch.func.grad; `describe_step` has a sentence for it."""
WHATEVER_LIES_THERE = ("empty", "resize")
"""Names of operators whose result is uninitialised memory: two calls agree by chance only."""
Run = tuple[str, Callable[[], Any], list[Any], bool]
"""A call with its name and its result without any mode, and whether a second call has the same bits."""


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    every: list[Run] = []
    for name, call in (*PROGRAMS, *samples()):
        before, repeat = plain_tensors(outcome(call)), plain_tensors(outcome(call))
        is_initialised = not any(word in name for word in WHATEVER_LIES_THERE)
        is_repeatable = is_initialised and len(before) == len(repeat) and all(map(bits_equal, before, repeat))
        every.append((name, call, before, is_repeatable))
    return every


@pytest.mark.timeout(900)  # torch's samples take 20 s of CPU
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MODES, ids=lambda kind: kind.__name__)
def test_every_call_runs_as_without_the_mode(kind: type, runs: list[Run]) -> None:
    unlike = []
    for name, call, before, is_repeatable in runs if kind in READS_OPERATORS else runs[: len(PROGRAMS)]:
        try:
            with MODES[kind](nn.Linear(2, 2)):
                after = plain_tensors(outcome(call))
        except Exception as error:
            unlike.append(f"{name}: the mode raised {error!r}")
            continue
        if kind is ForwardWatch and name in REFUSE_HOOKS:
            assert after == [RuntimeError]
        elif len(before) != len(after) or not all(map(bits_equal if is_repeatable else same, before, after)):
            unlike.append(f"{name}: {before[:1]} became {after[:1]}"[:200])
    assert len(runs) > 500
    assert not unlike


class Fails(NoteTaker):
    def ran(self, op: Operator) -> None:
        raise ValueError("no such field")


def test_a_note_taker_that_fails_lets_the_forward_run_and_raises_a_sentence_behind_it() -> None:
    model, outputs = nn.Linear(2, 2), []
    with (
        pytest.raises(ModelFailed, match="cannot be watched: ValueError: no such field"),
        ForwardWatch(model, [Fails()]),
    ):
        outputs.append(model(torch.ones(1, 2)))
    assert torch.equal(outputs[0], model(torch.ones(1, 2)))
