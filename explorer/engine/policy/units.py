"""Runs the units of a policy through torch.utils.checkpoint.

A standalone file of a policy is made of this source: it needs torch, segments.py, offload.py and OutsideRng alone.

1. A unit's `forward` becomes a functools.partial around the original: no wrapper module, no closure. Names,
   state_dict, isinstance and pickle therefore stay the same, and a deep copy runs its own weights.
2. A segment (consecutive children of one parent) is wrapped on the Sequential that runs the children. Under other
   parents the call of each block is replaced, see segments.py.
3. An ancestor and its descendants may both be units; descendants run inside their ancestor's checkpoint.
4. Keyword arguments are passed by position and bound again inside the checkpoint. Reentrant checkpointing refuses
   keywords. Non-reentrant checkpointing holds their tensors itself, and a unit around the checkpoint cannot free them.
   An argument that is given twice is passed once. Inside a unit, torch gives each place a tensor of its own at the
   recompute. nn.MultiheadAttention then computes differently, because query, key and value are not one tensor.

A checkpointed block runs twice in one step: in forward, and again in backward to make what it did not keep. The second
run must compute exactly what the first run did and leave no trace. `Recomputing` surrounds each second run; it is made
in forward, where it can still read the generators. On entry, undone in reverse order on exit:

5. Copies replace the running statistics: the second run moves the copies, which are then dropped. torch alone moves
   the statistics of a BatchNorm twice (pytorch #96136).
6. Generators that torch does not stash return to their state at the forward; on exit they get their later state back.
7. `is_recomputing()` becomes true in the thread that recomputes; on CUDA this is autograd's thread, not the caller's.
8. Observers are called, because a block's own hooks stay silent when a policy calls its `forward` directly.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from explorer.engine.policy.offload import offload_saved
from explorer.engine.policy.segments import WrappedSegment, call_in_segment
from explorer.engine.state.rng import OutsideRng
from explorer.record.policy import Policy, Unit

Observer = Callable[[str, bool], None]
"""Called with a unit's first fqn and True when it starts to run again, False when that ends; never in forward."""

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_thread = threading.local()
_observers: list[Observer] = []


@dataclass(frozen=True)
class Wrap:
    """A unit with its policy and outside generators. Copies and pickles of the model include the wrap."""

    unit: Unit
    policy: Policy
    outside: OutsideRng | None = None

    @property
    def fqn(self) -> str:
        """The unit's name: that of its first block."""
        return self.unit.blocks[0]


def replacements(
    modules: Mapping[str, nn.Module], wraps: Sequence[Wrap]
) -> Iterator[tuple[nn.Module, str, functools.partial[object]]]:
    """Each function that the wraps replace: module, attribute, function. Put each in place before the next is taken."""
    by_parent: dict[str, tuple[Wrap, ...]] = {}
    for wrap in wraps:
        if len(wrap.unit.blocks) > 1:
            parent = wrap.fqn.rpartition(".")[0]
            by_parent[parent] = (*by_parent.get(parent, ()), wrap)
    for fqn, segments in by_parent.items():
        if runs_its_children(modules[fqn]):
            yield modules[fqn], "forward", functools.partial(_in_segments, modules[fqn], modules[fqn].forward, segments)
            continue
        for wrap in segments:
            if any(is_inside(wrap, other) for other in segments):
                continue  # the segment around runs it
            segment = _segment_of(wrap, segments, modules)
            for index, member in enumerate(segment.members):
                yield member, "_call_impl", functools.partial(call_in_segment, segment, index)
    for wrap in wraps:
        if len(wrap.unit.blocks) == 1:
            module = modules[wrap.fqn]
            yield module, "forward", functools.partial(_as_unit, module, module.forward, wrap)


def _segment_of(wrap: Wrap, segments: Sequence[Wrap], modules: Mapping[str, nn.Module]) -> WrappedSegment:
    """The segment of `wrap`, with those of `segments` directly inside it."""
    inside = [other for other in segments if is_inside(other, wrap)]
    directly = [one for one in inside if not any(is_inside(one, other) for other in inside)]
    members = tuple(modules[name] for name in wrap.unit.blocks)
    return WrappedSegment(
        wrap.unit.blocks, members, _run_segment, wrap, tuple(_segment_of(one, segments, modules) for one in directly)
    )


def wraps_on(module: nn.Module) -> tuple[Wrap, ...]:
    """The wraps of this module itself; a Sequential may have several."""
    wraps: tuple[Wrap, ...] = ()
    forward, call = module.__dict__.get("forward"), module.__dict__.get("_call_impl")
    if isinstance(forward, functools.partial) and forward.func is _as_unit:
        wraps = (forward.args[2],)
    elif isinstance(forward, functools.partial) and forward.func is _in_segments:
        wraps = forward.args[2]
    if isinstance(call, functools.partial) and call.func is call_in_segment:
        wraps = (*wraps, *_wraps_in(call.args[0]))
    return wraps


def _wraps_in(segment: WrappedSegment) -> tuple[Wrap, ...]:
    return (segment.wrap, *(wrap for inner in segment.inside for wrap in _wraps_in(inner)))  # type: ignore[arg-type]


def runs_its_children(parent: nn.Module) -> bool:
    """Whether `parent` is a Sequential whose forward calls its children one after the other."""
    return isinstance(parent, nn.Sequential) and type(parent).forward is nn.Sequential.forward


def _as_unit(module: nn.Module, forward: Callable[..., object], wrap: Wrap, *args: object, **kwargs: object) -> object:
    return _run(wrap, forward, (module,), args, kwargs)


def _in_segments(
    sequential: nn.Module, forward: Callable[..., object], wraps: tuple[Wrap, ...], value: object
) -> object:
    """A Sequential's forward that runs each segment's children as a unit. One module may be a child several times."""
    return _chain(sequential, tuple(sequential._modules), wraps, value)


def _chain(sequential: nn.Module, names: tuple[str, ...], wraps: tuple[Wrap, ...], value: object) -> object:
    """Runs the children `names`, those of each segment in `wraps` as a unit, with the segments inside it."""
    by_child = {fqn.rpartition(".")[2]: wrap for wrap in outermost_last(wraps) for fqn in wrap.unit.blocks}
    for wrap, part in groupby(names, by_child.get):
        inner_names = tuple(part)
        members = tuple(sequential.get_submodule(name) for name in inner_names)
        if wrap is None:
            for member in members:
                value = member(value)
            continue
        inside = tuple(other for other in wraps if is_inside(other, wrap))
        value = _run(wrap, functools.partial(_chain, sequential, inner_names, inside), members, (value,), {})
    return value


def outermost_last(wraps: Sequence[Wrap]) -> list[Wrap]:
    """`wraps` by ascending number of blocks: of segments inside each other the outermost comes last."""
    return sorted(wraps, key=lambda wrap: len(wrap.unit.blocks))


def is_inside(inner: Wrap, outer: Wrap) -> bool:
    """Whether the segment `inner` is a smaller part of the segment `outer`."""
    return set(inner.unit.blocks) < set(outer.unit.blocks)


def _run_segment(*arguments: Any) -> object:
    """`_run` at the time of the call: an instrument may have replaced it since the policy was applied."""
    return _run(*arguments)


def _run(
    wrap: Wrap,
    function: Callable[..., object],
    modules: Sequence[nn.Module],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    if wrap.unit.action == "offload":
        with offload_saved(modules, name=wrap.fqn):
            return function(*args, **kwargs)
    policy = wrap.policy
    recompute = functools.partial(
        Recomputing, modules, wrap.fqn, running_stats=policy.running_stats, outside=wrap.outside
    )
    if kwargs:
        function, args = functools.partial(_with_keywords, function, tuple(kwargs)), (*args, *kwargs.values())
    once = {id(arg): arg for arg in args}
    if len(once) < len(args):
        order = tuple(list(once).index(id(arg)) for arg in args)
        function, args = functools.partial(_with_repeats, function, order), tuple(once.values())
    if policy.use_reentrant:
        return torch.utils.checkpoint.checkpoint(
            _FirstThenAgain(function, recompute()),
            *args,
            use_reentrant=True,
            preserve_rng_state=policy.preserve_rng_state,
        )
    if unseen := witnesses(args, modules):
        function, args = functools.partial(_without_witnesses, function), (unseen, *args)
    return torch.utils.checkpoint.checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=policy.preserve_rng_state,
        determinism_check=policy.determinism_check,
        early_stop=policy.early_stop,
        context_fn=functools.partial(
            selective_contexts, tuple(operator(name) for name in wrap.unit.save_ops), recompute
        ),
    )


def _with_keywords(function: Callable[..., object], names: Sequence[str], *args: object) -> object:
    """Calls `function` with the last positional arguments bound to `names` as keywords."""
    first = len(args) - len(names)
    return function(*args[:first], **dict(zip(names, args[first:], strict=True)))


def _with_repeats(function: Callable[..., object], order: Sequence[int], *args: object) -> object:
    """Calls `function` with the argument of each place; `order` has its number among `args`."""
    return function(*(args[number] for number in order))


def _without_witnesses(function: Callable[..., object], _: object, *args: object) -> object:
    return function(*args)


def witnesses(args: tuple[object, ...], modules: Sequence[nn.Module]) -> tuple[torch.Tensor, ...]:
    """One tensor for each device of `modules` that no tensor of `args` is on; the CPU needs none.

    torch stashes only the generators of devices that it finds among the positional arguments of `checkpoint`
    (get_device_states). Without witnesses a unit that moves its input to another device would draw other dropout masks
    at recompute. torch looks into a tuple of witnesses, and autograd saves none of its tensors.
    """
    tensors = [tensor for module in modules if (tensor := next(module.parameters(), None)) is not None]
    devices = {leaf.device for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
    unseen = {tensor.device: tensor for tensor in tensors if tensor.device not in devices}
    return tuple(tensor for device, tensor in unseen.items() if device.type not in ("cpu", "meta"))


class _FirstThenAgain:
    """Reentrant checkpointing has no context_fn: its function runs plainly at first, then inside `recomputing`."""

    def __init__(self, function: Callable[..., object], recomputing: Recomputing) -> None:
        self._function, self._recomputing = function, recomputing
        self._is_first = True
        self.fqn = recomputing.fqn

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of the unit's modules."""
        return (parameter for module in self._recomputing.modules for parameter in module.parameters())

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self._is_first:
            self._is_first = False
            return self._function(*args, **kwargs)
        with self._recomputing:
            return self._function(*args, **kwargs)


def is_of_a_policy(function: object, context: object) -> bool:
    """Whether a call of torch.utils.checkpoint is a unit's, from its function and its `context_fn`."""
    return isinstance(function, _FirstThenAgain) or getattr(context, "func", None) is selective_contexts


def operator(name: str) -> object:
    """The operator `namespace.operator.overload` of torch.ops. Raises AttributeError for an unknown name."""
    parts = name.split(".")
    if len(parts) != 3:
        raise AttributeError(name)
    return functools.reduce(getattr, parts, torch.ops)


def selective_contexts(
    save_ops: tuple[object, ...], recompute: Callable[..., AbstractContextManager[object]]
) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """The two contexts of torch's `context_fn`: around the forward, and around each recompute.

    `recompute` is called at the start of the forward, because it reads the states of the outside generators.
    """
    if not save_ops:
        return contextlib.nullcontext(), recompute()
    forward, again = create_selective_checkpoint_contexts(list(save_ops))
    return forward, recompute(inside=again)


def is_recomputing() -> bool:
    """True inside a block that runs again for backward, in the thread that runs it."""
    return getattr(_thread, "depth", 0) > 0


@contextmanager
def observe_recompute(observer: Observer) -> Iterator[None]:
    """Calls `observer` whenever a recompute of a unit starts or ends, in any thread."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


class Recomputing:
    """Context in which `modules` run again. It can be entered repeatedly and inside itself: second order does both.

    `inside` is a further context that is entered last.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        fqn: str = "",
        *,
        running_stats: str = "once",
        outside: OutsideRng | None = None,
        inside: AbstractContextManager[object] | None = None,
    ) -> None:
        self.modules, self.fqn, self._outside, self._inside = modules, fqn, outside, inside
        self._hides_statistics = running_stats == "once"
        self._at_forward = outside.read() if outside else ()
        self._open: list[ExitStack] = []
        """A stack, because one block can run again while it runs again: second order, nested checkpoints."""

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            if self._hides_statistics:
                opened.enter_context(_copied_statistics(self.modules))  # 5.
            if self._outside is not None:  # 6. The step outside of this block has drawn more numbers.
                opened.callback(self._outside.write, self._outside.read())
                self._outside.write(self._at_forward)
            opened.enter_context(_announced(self.fqn))
            if self._inside is not None:
                opened.enter_context(self._inside)
            self._open.append(opened.pop_all())
        return self

    def __exit__(self, *exc: Any) -> None:
        # Early stop also ends here, by an exception of torch.
        self._open.pop().__exit__(*exc)


@contextmanager
def _announced(fqn: str) -> Iterator[None]:
    """A recompute of the unit `fqn`, as `is_recomputing` and the observers see it (7. and 8.)."""
    _thread.depth = getattr(_thread, "depth", 0) + 1
    for observer in tuple(_observers):
        observer(fqn, True)
    try:
        yield
    finally:
        for observer in reversed(tuple(_observers)):
            observer(fqn, False)
        _thread.depth -= 1


@contextmanager
def _copied_statistics(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Copies stand in for the statistics of BatchNorm and InstanceNorm; the originals return."""
    norms = dict.fromkeys(m for module in modules for m in module.modules() if isinstance(m, _NormBase))
    tracking = [norm for norm in norms if norm.track_running_stats]
    hidden = [
        (norm, name, b) for norm in tracking for name in _STATISTICS if (b := norm._buffers.get(name)) is not None
    ]
    for norm, name, buffer in hidden:
        norm._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for norm, name, buffer in hidden:
            norm._buffers[name] = buffer
