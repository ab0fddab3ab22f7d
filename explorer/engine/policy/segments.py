"""Segments whose blocks no Sequential runs: consecutive blocks that the model calls one after the other.

    for block in blocks:
        x = block(x, mask)    blocks.0: the whole segment runs in one checkpoint; the model gets a stand-in as result
                              blocks.1: called with the stand-in and with the mask of blocks.0, it returns another one
                              blocks.2: the last block returns the segment's result

1. A stand-in knows its shape, and what the model may do next. No other state is kept: an unfinished pass leaves none,
   and several passes may be under way.
2. Any other use of a stand-in (an addition between blocks, a head on hidden states) raises an error: a tensor without
   data has no results.
3. Calls are taken over in front of a block's hooks. The hooks see the block's real arguments and results, once in
   forward and once in the recompute, as inside a Sequential. The `_call_impl` of an instance goes along when the model
   is copied or pickled; a `_compiled_call_impl` would not.
4. Without gradients blocks run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from explorer.errors import InvalidPolicy

Arguments = Mapping[int | str, object]
"""The arguments of one call: by position, then by keyword."""
_CONSTANTS = (int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_SHAPE_QUERIES = frozenset(
    str.split("""
shape device dtype layout ndim requires_grad is_cpu is_cuda is_meta is_sparse is_quantized itemsize nbytes size
dim stride numel nelement ndimension get_device element_size is_contiguous is_floating_point is_complex __len__
__hash__
""")
)
"""Attributes and methods that a stand-in answers."""
_CONVERSIONS = frozenset(str.split("to type type_as float double half bfloat16 cpu cuda"))
"""Methods that return the stand-in itself if there is nothing to convert."""
_ONE_BY_ONE = "Recompute these blocks one by one, each as a unit of its own."


@dataclass(frozen=True)
class WrappedSegment:
    """One segment; each of its blocks holds it."""

    fqns: tuple[str, ...]
    members: tuple[nn.Module, ...]
    run: Callable[..., object]
    """Takes `wrap`, the function to recompute, its modules, arguments and keyword arguments."""
    wrap: object
    inside: tuple[WrappedSegment, ...] = ()
    """Segments of some of its members, which run inside it."""


@dataclass(frozen=True)
class _Pending:
    """The next call of a segment that has begun."""

    segment: WrappedSegment
    index: int
    """Index of the block that has to be called next."""
    arguments: Arguments
    """The arguments that the block has to get, with shapes where stand-ins go."""
    returned: tuple[object, ...]
    """The output of each block but the last, with shapes instead of new tensors."""
    output: object

    @property
    def requires_grad(self) -> bool:
        return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(self.output))


@dataclass(frozen=True, eq=False)
class _Shape:
    """The form of tensor number `index` in a block's output."""

    index: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class StandIn(Tensor):
    """The result of a block of a segment, as the model sees it: only the next block may take it."""

    _pending: _Pending
    _index: int

    @staticmethod
    def __new__(cls, like: _Shape, pending: _Pending) -> StandIn:
        tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            like.shape,
            strides=like.stride,
            dtype=like.dtype,
            device=like.device,
            requires_grad=like.dtype.is_floating_point and pending.requires_grad,
        )
        tensor._pending, tensor._index = pending, like.index
        return tensor  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        name = func.__self__.__name__ if func.__name__ in ("__get__", "__set__") else func.__name__
        if _changes_nothing(func, args, kwargs or {}):
            return args[0]
        if name not in _SHAPE_QUERIES:
            _read(name, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:  # type: ignore[override]
        _read(str(func), args, kwargs)


def call_in_segment(segment: WrappedSegment, index: int, *args: object, **kwargs: object) -> object:
    """Replaces the call of block number `index`."""
    pending = next((leaf._pending for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, StandIn)), None)
    if pending is None:
        if not torch.is_grad_enabled():
            return call_of(segment.members[index], args, kwargs)
        if index:
            _refuse(f"{segment.fqns[index]} was called without what {segment.fqns[index - 1]} returns", segment, index)
        return _start(segment, args, kwargs)
    if pending.segment.members != segment.members or pending.index != index:
        called, awaited = segment.fqns[index], pending.segment.fqns[pending.index]
        _refuse(f"{called} was called where {awaited} was to follow", pending.segment, pending.index)
    for name, expected in pending.arguments.items():
        if not _is_same(expected, arguments_of(args, kwargs).get(name), pending):
            argument = f"its argument {name + 1}" if isinstance(name, int) else f"its {name}"
            what = f"{segment.fqns[index]} was called with another value for {argument} than the block before"
            _refuse(what, segment, index)
    if len(pending.arguments) < len(args) + len(kwargs):
        _refuse(f"{segment.fqns[index]} was called with more arguments than the block before it", segment, index)
    return _next(pending)


def call_of(module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """The module's own call, hooks included."""
    return type(module)._call_impl(module, *args, **kwargs)  # type: ignore[no-untyped-call]


def arguments_of(args: Sequence[object], kwargs: Mapping[str, object]) -> Arguments:
    """Arguments by position and by keyword, in the order of the call."""
    by_position: dict[int | str, object] = dict(enumerate(args))
    return by_position | dict(kwargs)


def next_arguments(output: object, arguments: Arguments) -> Arguments:
    """Arguments of the next block: those of this block, with its output in place of the first argument.

    An output of several tensors replaces the following arguments too, as far as their forms agree (`x, residual`).
    """
    following = dict(arguments)
    first = next(iter(arguments), None)
    if first is None:
        return following
    if not isinstance(output, (tuple, list)) or isinstance(arguments[first], (tuple, list)):
        following[first] = output
        return following
    for name, value in zip(arguments, output):
        if name != first and not _looks_alike(value, arguments[name]):
            break
        following[name] = value
    return following


def same_arguments(expected: Arguments, actual: Arguments) -> bool:
    """Whether a call got the very same objects."""
    return expected.keys() == actual.keys() and all(_is_same(expected[name], actual[name]) for name in expected)


def _start(segment: WrappedSegment, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    returned: list[object] = []
    output = segment.run(segment.wrap, partial(_run_members, segment, returned), segment.members, args, kwargs)
    outputs = tuple(returned[: len(segment.members) - 1])
    return _next(_Pending(segment, 0, arguments_of(args, kwargs), outputs, output))


def _run_members(segment: WrappedSegment, returned: list[object], *args: object, **kwargs: object) -> object:
    """Runs the members, those of a segment inside as a unit; `returned` gets the form of each member's output."""
    arguments, n_args = arguments_of(args, kwargs), len(args)
    unchanged = [leaf for leaf in tree_leaves(list(arguments.values())[1:]) if isinstance(leaf, Tensor)]
    begins = {inner.fqns[0]: inner for inner in segment.inside}
    covered = {fqn for inner in segment.inside for fqn in inner.fqns[1:]}
    for fqn, member in zip(segment.fqns, segment.members):
        if fqn in covered:
            continue
        values, inner = list(arguments.values()), begins.get(fqn)
        member_args, member_kwargs = tuple(values[:n_args]), dict(zip(kwargs, values[n_args:]))
        if inner is not None:
            run_inner = partial(_run_members, inner, returned)
            output = inner.run(inner.wrap, run_inner, inner.members, member_args, member_kwargs)
        else:
            output = call_of(member, member_args, member_kwargs)
            returned.append(_shapes(output, unchanged))
        arguments = next_arguments(output, arguments)
    return output


def _next(pending: _Pending) -> object:
    """The output of the block at `pending.index`."""
    if pending.index == len(pending.segment.members) - 1:
        return pending.output
    returned = pending.returned[pending.index]
    arguments = next_arguments(returned, pending.arguments)
    following = _Pending(pending.segment, pending.index + 1, arguments, pending.returned, pending.output)
    return tree_map(lambda leaf: StandIn(leaf, following) if isinstance(leaf, _Shape) else leaf, returned)


def _shapes(output: object, unchanged: Sequence[Tensor]) -> object:
    """`output` with shapes for its tensors; a tensor of `unchanged`, which the block got, stays."""
    numbers = count()

    def shape_of(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or any(leaf is tensor for tensor in unchanged):
            return leaf
        return _Shape(next(numbers), leaf.shape, leaf.stride(), leaf.dtype, leaf.device)

    return tree_map(shape_of, output)


def _looks_alike(a: object, b: object) -> bool:
    kinds = (Tensor, _Shape)
    return isinstance(a, kinds) and isinstance(b, kinds) and (a.shape, a.dtype) == (b.shape, b.dtype)


def _is_same(expected: object, actual: object, pending: _Pending | None = None) -> bool:
    """Whether tuples, lists and dictionaries hold the same objects; for a shape, the stand-in made of it."""
    if expected is actual:
        return True
    (leaves, form), (actual_leaves, actual_form) = tree_flatten(expected), tree_flatten(actual)
    return form == actual_form and all(_is_same_leaf(a, b, pending) for a, b in zip(leaves, actual_leaves))


def _is_same_leaf(expected: object, actual: object, pending: _Pending | None) -> bool:
    if isinstance(expected, _Shape):
        return isinstance(actual, StandIn) and actual._pending is pending and actual._index == expected.index
    return expected is actual or (
        type(expected) is type(actual) and isinstance(actual, _CONSTANTS) and expected == actual
    )


def _changes_nothing(func: Any, args: Any, kwargs: Mapping[str, object]) -> bool:
    """Whether `func` converts nothing, or drops nothing."""
    if not args or not isinstance(args[0], StandIn):
        return False
    if func is torch.nn.functional.dropout:  # on an empty tensor it does nothing at any rate
        return kwargs.get("p") == 0 or kwargs.get("training") is False
    if func.__name__ not in _CONVERSIONS:
        return False
    empty = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
    return func(empty, *args[1:], **kwargs) is empty


def _read(by: str, args: object, kwargs: object) -> NoReturn:
    pending = next(leaf._pending for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, StandIn))
    before, after = pending.segment.fqns[pending.index - 1 : pending.index + 1]
    _refuse(f"What {before} returns was to go to {after} alone, and {by} reads it", pending.segment, pending.index)


def _refuse(what: str, segment: WrappedSegment, index: int) -> NoReturn:
    first, *_, last = segment.fqns
    raise InvalidPolicy(
        f"{what}, while {first} to {last} are recomputed as one segment.",
        hint=_ONE_BY_ONE,
        neighbours=segment.fqns[index - 1 : index + 1],
    )
