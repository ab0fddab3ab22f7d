"""Segments where no Sequential runs them: consecutive blocks that the model calls one after the other.

    for block in blocks:
        x = block(x, mask)    blocks.0: all of the segment runs, in one checkpoint; what it returns is a stand-in
                              blocks.1: given that, and else what blocks.0 was given, it returns another one
                              blocks.2: the last returns what the segment returned

1. A stand-in knows its shape, and what the model may do next. No other state is kept: a pass that is given up leaves
   none, and several may be under way.
2. Whoever else reads a stand-in (an addition between blocks, a head on hidden states) is told so by an error: nothing
   is computed from what is not there.
3. Calls are taken over in front of a block's hooks. Those see what the block is really given and what it returns, once
   in forward and once when it runs again, as inside a Sequential. An instance's own `_call_impl` goes along when the
   model is copied or pickled; a `_compiled_call_impl` would not.
4. Without gradients blocks run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from explorer.errors import InvalidPolicy

Arguments = Mapping[int | str, Any]
"""What one call is given: by place, then by keyword."""
_CONSTANTS = (int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_ASKED_OF_SHAPES = frozenset(
    {"shape", "device", "dtype", "layout", "ndim", "requires_grad", "is_cpu", "is_cuda", "is_meta", "is_sparse"}
    | {"is_quantized", "itemsize", "nbytes", "size", "dim", "stride", "numel", "nelement", "ndimension", "get_device"}
    | {"element_size", "is_contiguous", "is_floating_point", "is_complex", "__len__", "__hash__"}
)
"""What a stand-in answers."""
_CONVERSIONS = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda"})
"""What a stand-in answers with itself where nothing is to be converted."""
_ONE_BY_ONE = "Recompute these blocks one by one, each as a unit of its own."


@dataclass(frozen=True)
class InTurn:
    """One segment, on each of its blocks."""

    fqns: tuple[str, ...]
    members: tuple[nn.Module, ...]
    run: Callable[..., Any]
    """Takes how the segment is recomputed, the function that is, its modules, arguments and keyword arguments."""
    how: Any


@dataclass(frozen=True)
class _Ahead:
    """What is to be done with what the block before returned."""

    segment: InTurn
    place: int
    """Place of the block that may be given it."""
    given: Arguments
    """What that block has to be given, with shapes where stand-ins go."""
    returned: tuple[Any, ...]
    """What each block but the last returned, with shapes instead of the tensors that it made."""
    output: Any

    @property
    def requires_grad(self) -> bool:
        return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(self.output))


@dataclass(frozen=True, eq=False)
class _Shape:
    """What the tensor number `index` that a block returned looks like."""

    index: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class StandIn(Tensor):
    """What the model gets from a block of a segment: to be handed on to the next one, and for nothing else."""

    _ahead: _Ahead
    _index: int

    @staticmethod
    def __new__(cls, like: _Shape, ahead: _Ahead) -> StandIn:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            like.shape,
            strides=like.stride,
            dtype=like.dtype,
            device=like.device,
            requires_grad=like.dtype.is_floating_point and ahead.requires_grad,
        )
        made._ahead, made._index = ahead, like.index
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__self__.__name__ if func.__name__ in ("__get__", "__set__") else func.__name__
        if _returns_what_it_is_given(func, args, kwargs or {}):
            return args[0]
        if name not in _ASKED_OF_SHAPES:
            _read(name, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        _read(str(func), args, kwargs)


def called_in_turn(segment: InTurn, place: int, *args: Any, **kwargs: Any) -> Any:
    """Instead of the call of block number `place`."""
    ahead = next((leaf._ahead for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, StandIn)), None)
    if ahead is None:
        if not torch.is_grad_enabled():
            return call_of(segment.members[place], args, kwargs)
        if place:
            _refuse(f"{segment.fqns[place]} was called without what {segment.fqns[place - 1]} returns", segment, place)
        return _begun(segment, args, kwargs)
    if ahead.segment.members != segment.members or ahead.place != place:
        called, awaited = segment.fqns[place], ahead.segment.fqns[ahead.place]
        _refuse(f"{called} was called where {awaited} was to follow", ahead.segment, ahead.place)
    for name, expected in ahead.given.items():
        if not _same(expected, arguments_of(args, kwargs).get(name), ahead):
            argument = f"its argument {name + 1}" if isinstance(name, int) else f"its {name}"
            what = f"{segment.fqns[place]} was called with another value for {argument} than the block before"
            _refuse(what, segment, place)
    if len(ahead.given) < len(args) + len(kwargs):
        _refuse(f"{segment.fqns[place]} was called with more arguments than the block before it", segment, place)
    return _next(ahead)


def call_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The module's own call, hooks included."""
    return type(module)._call_impl(module, *args, **kwargs)  # type: ignore[no-untyped-call]


def arguments_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """By place and by keyword, in the order of the call."""
    by_place: dict[int | str, Any] = dict(enumerate(args))
    return by_place | dict(kwargs)


def handed_on(output: Any, given: Arguments) -> Arguments:
    """What the next block is given: the same, but for what this one returned instead of what it was given first.

    Of several things returned, others too where they look like what stands in their place (`x, residual`).
    """
    following = dict(given)
    first = next(iter(given), None)
    if first is None:
        return following
    if not isinstance(output, (tuple, list)) or isinstance(given[first], (tuple, list)):
        following[first] = output
        return following
    for name, value in zip(given, output):
        if name != first and not _alike(value, given[name]):
            break
        following[name] = value
    return following


def same_arguments(expected: Arguments, actual: Arguments) -> bool:
    """Whether a call was given the very same objects."""
    return expected.keys() == actual.keys() and all(_same(expected[name], actual[name]) for name in expected)


def _begun(segment: InTurn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    returned: list[Any] = []

    def all_of_them(*args: Any, **kwargs: Any) -> Any:
        given, n_args = arguments_of(args, kwargs), len(args)
        unchanged = [leaf for leaf in tree_leaves(list(given.values())[1:]) if isinstance(leaf, Tensor)]
        for member in segment.members:
            values = list(given.values())
            output = call_of(member, values[:n_args], dict(zip(kwargs, values[n_args:])))
            if len(returned) < len(segment.members) - 1:
                returned.append(_shapes(output, unchanged))
            given = handed_on(output, given)
        return output

    output = segment.run(segment.how, all_of_them, segment.members, args, kwargs)
    return _next(_Ahead(segment, 0, arguments_of(args, kwargs), tuple(returned), output))


def _next(ahead: _Ahead) -> Any:
    """What the block at `ahead.place` returns."""
    if ahead.place == len(ahead.segment.members) - 1:
        return ahead.output
    returned = ahead.returned[ahead.place]
    given = handed_on(returned, ahead.given)
    following = _Ahead(ahead.segment, ahead.place + 1, given, ahead.returned, ahead.output)
    return tree_map(lambda leaf: StandIn(leaf, following) if isinstance(leaf, _Shape) else leaf, returned)


def _shapes(output: Any, unchanged: Sequence[Tensor]) -> Any:
    """`output` with shapes for its tensors; a block may also return a tensor of `unchanged` that it was given."""
    numbers = count()

    def shape_of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or any(leaf is tensor for tensor in unchanged):
            return leaf
        return _Shape(next(numbers), leaf.shape, leaf.stride(), leaf.dtype, leaf.device)

    return tree_map(shape_of, output)


def _alike(one: Any, other: Any) -> bool:
    kinds = (Tensor, _Shape)
    return isinstance(one, kinds) and isinstance(other, kinds) and (one.shape, one.dtype) == (other.shape, other.dtype)


def _same(expected: Any, actual: Any, ahead: _Ahead | None = None) -> bool:
    """The same objects in the same places of tuples, lists and dictionaries; of shapes the stand-ins made of them."""
    if expected is actual:
        return True
    (leaves, form), (actual_leaves, actual_form) = tree_flatten(expected), tree_flatten(actual)
    return form == actual_form and all(_is(one, other, ahead) for one, other in zip(leaves, actual_leaves))


def _is(expected: Any, actual: Any, ahead: _Ahead | None) -> bool:
    if isinstance(expected, _Shape):
        return isinstance(actual, StandIn) and actual._ahead is ahead and actual._index == expected.index
    return expected is actual or (
        type(expected) is type(actual) and isinstance(actual, _CONSTANTS) and expected == actual
    )


def _returns_what_it_is_given(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether `func` converts nothing, or drops nothing."""
    if not args or not isinstance(args[0], StandIn):
        return False
    if func is torch.nn.functional.dropout:  # on an empty tensor it does nothing at any rate
        return kwargs.get("p") == 0 or kwargs.get("training") is False
    if func.__name__ not in _CONVERSIONS:
        return False
    empty = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
    return func(empty, *args[1:], **kwargs) is empty


def _read(by: str, args: Any, kwargs: Any) -> NoReturn:
    ahead = next(leaf._ahead for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, StandIn))
    before, after = ahead.segment.fqns[ahead.place - 1 : ahead.place + 1]
    _refuse(f"What {before} returns was to go to {after} alone, and {by} reads it", ahead.segment, ahead.place)


def _refuse(what: str, segment: InTurn, place: int) -> NoReturn:
    first, *_, last = segment.fqns
    raise InvalidPolicy(
        f"{what}, while {first} to {last} are recomputed as one segment.",
        hint=_ONE_BY_ONE,
        neighbours=segment.fqns[place - 1 : place + 1],
    )
