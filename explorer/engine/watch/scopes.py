"""Hooks of the instruments: the running block of each thread, the borders of backward, and saved tensors.

Forward hooks alone miss the recompute of a block: a policy sits inside the block's `forward`, below its hooks, so the
block is silent when it runs again. The recompute scope that the policy opens closes this gap.
Hooks are registered with always_call: early stop leaves a forward by an exception.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from explorer.engine.policy.units import observe_recompute
from explorer.engine.watch.modes import DispatchMode, never_compiled


class Frame:
    """Running blocks of one thread, as indices into `BlockScopes.fqns`; 0 is the model itself."""

    def __init__(self) -> None:
        self.stack: list[int] = [0]
        """Innermost last; the first entry stands for "outside every block"."""
        self.reruns: list[int] = []
        """Open recompute scopes, innermost last."""


class _Local(threading.local):
    """The frame of the calling thread; Python calls `__init__` again in each thread."""

    def __init__(self, new_frame: Callable[[], Frame]) -> None:
        self.frame = new_frame()


class Listener:
    """Callbacks in the thread of the event, after the frame has changed. A subclass overrides those that it needs."""

    def entered(self, block: int, frame: Any, inputs: object) -> None:
        """A block begins; `inputs` is None if unknown, else (args, kwargs)."""

    def left(self, block: int, frame: Any, output: object) -> None:
        """A block ends; `output` is None if unknown."""

    def rerun_changed(self, frame: Any) -> None:
        """A recompute of a segment starts or ends; the blocks of the segment are entered and left one by one."""


class BlockScopes:
    """Hooks on every module of `model` between enter and exit; exit removes all hooks.

    A module with several names has its first name here. `segments` are the first blocks of a policy's longer units.
    """

    def __init__(
        self,
        model: nn.Module,
        listener: Listener,
        *,
        segments: Collection[str] = (),
        new_frame: Callable[[], Frame] = Frame,
    ) -> None:
        self.modules = dict(model.named_modules())
        self.fqns = tuple(self.modules)
        number = {module: i for i, module in enumerate(self.modules.values())}
        self.index = {fqn: number[module] for fqn, module in model.named_modules(remove_duplicate=False)}
        self._segments = frozenset(segments)
        self._listener = listener
        self.local = _Local(new_frame)
        self._open = ExitStack()

    @property
    def frame(self) -> Frame:
        """Frame of the calling thread."""
        return self.local.frame

    @property
    def is_in_block(self) -> bool:
        """Whether the calling thread is inside a forward of the model."""
        return len(self.frame.stack) > 1

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            for i, module in enumerate(self.modules.values()):
                before, after = ModuleHook(self._before, i), ModuleHook(self._after, i)
                opened.enter_context(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
                opened.enter_context(module.register_forward_hook(after, always_call=True))
            opened.enter_context(observe_recompute(self._rerun))
            self._open = opened.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def close(self) -> None:
        """Removes all hooks."""
        self._open.close()

    @never_compiled
    def _before(self, block: int, module: nn.Module, args: object, kwargs: object) -> None:
        self._enter(block, (args, kwargs))

    @never_compiled
    def _after(self, block: int, module: nn.Module, args: object, output: object) -> None:
        self._leave(block, output)

    def _rerun(self, fqn: str, entering: bool) -> None:
        """A recompute of a policy's unit starts or ends."""
        frame, block = self.frame, self.index.get(fqn, 0)
        if entering:
            frame.reruns.append(block)
        else:
            frame.reruns.pop()
        if fqn in self._segments:
            self._listener.rerun_changed(frame)
        elif entering:
            self._enter(block)
        else:
            self._leave(block)

    def _enter(self, block: int, inputs: object = None) -> None:
        frame = self.frame
        frame.stack.append(block)
        self._listener.entered(block, frame, inputs)

    def _leave(self, block: int, output: object = None) -> None:
        """Leaves `block`, and inner blocks that an exception ended without a hook."""
        frame = self.frame
        if block not in frame.stack[1:]:
            return
        while True:
            last = frame.stack.pop()
            self._listener.left(last, frame, output if last == block else None)
            if last == block:
                return


class BlockWatch(DispatchMode, Listener):
    """A dispatch mode that knows the running block: `scopes` has its hooks between enter and exit."""

    def __init__(
        self, model: nn.Module, *, segments: Collection[str] = (), new_frame: Callable[[], Frame] = Frame
    ) -> None:
        super().__init__()
        self.scopes = BlockScopes(model, self, segments=segments, new_frame=new_frame)

    @property
    def running(self) -> str:
        """Name of the innermost running block of the calling thread; empty for the model itself."""
        return self.scopes.fqns[self.scopes.frame.stack[-1]]

    def __enter__(self) -> Self:
        self.scopes.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self.scopes.__exit__(*exc)


class ModuleHook(functools.partial[Any]):
    """A hook on one module; copies and unpickled forms of the hook do nothing.

    A training may copy or pickle its model with its hooks (an average of the weights, a checkpoint of the whole model).
    The copy would keep reporting to the instrument, and an instrument cannot be pickled.
    """

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial, (_nothing,)


def _nothing(*args: object, **kwargs: object) -> None:
    """The copy of a hook, or a listener that is not interested."""


@dataclass(eq=False)
class _BackwardListener:
    begins: Callable[[], object]
    ended: Callable[[], object]
    failed: Callable[[Exception], object]
    repaired: Callable[[Exception, Any, Any], object]
    in_forward: Callable[[], bool] | None
    is_inside: bool = False

    def hears(self, name: str) -> bool:
        """Whether the listener takes a call of this function of torch for a backward of the loop."""
        return not self.is_inside and (name == "backward" or self.in_forward is not None and not self.in_forward())


_LISTENERS: list[_BackwardListener] = []
_ANNOUNCED = ("backward", "_engine_run_backward")
"""Functions of torch.autograd that are replaced. `grad`, which files import by name, calls the second."""


@contextmanager
def around_backward(
    begins: Callable[[], object] = _nothing,
    ended: Callable[[], object] = _nothing,
    failed: Callable[[Exception], object] = _nothing,
    repaired: Callable[[Exception, Any, Any], object] = _nothing,
    in_forward: Callable[[], bool] | None = None,
) -> Iterator[None]:
    """Calls `begins` before each backward, `failed` after an error, and `ended` at the end; not for a nested backward.

    `repaired` gets an error first, with the arguments of the backward. If it returns true, the error is dropped.
    With `in_forward` a call of torch.autograd.grad counts too, unless `in_forward()`: forces of a model of energies.
    A user's training loop does not announce its backward. torch.autograd.backward is replaced while anyone listens:
    Tensor.backward and gradient scalers call it. Contexts may end in any order.
    """
    listener = _BackwardListener(begins, ended, failed, repaired, in_forward)
    if not _LISTENERS:
        for name in _ANNOUNCED:
            setattr(torch.autograd, name, _announced(name, getattr(torch.autograd, name)))
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)
        for name in () if _LISTENERS else _ANNOUNCED:
            plain = getattr(getattr(torch.autograd, name), "announces", None)
            if plain is not None:  # None: another library has replaced it meanwhile
                setattr(torch.autograd, name, plain)


def _announced(name: str, plain: Callable[..., object]) -> Callable[..., Any]:
    """`plain` with calls of all listeners, the last one first. Reentrant checkpointing calls it inside itself."""

    @never_compiled
    def backward(*args: object, **kwargs: object) -> object:
        inside = []
        try:
            for listener in _LISTENERS[::-1]:
                if listener.hears(name):
                    listener.begins()
                    listener.is_inside = True
                    inside.append(listener)
            return plain(*args, **kwargs)
        except Exception as error:
            if any(listener.repaired(error, args, kwargs) for listener in inside):
                return None
            for listener in reversed(inside):
                listener.failed(error)
            raise
        finally:
            for listener in reversed(inside):
                listener.is_inside = False
                listener.ended()

    backward.announces = plain  # type: ignore[attr-defined]
    return backward


def after_closure(args: Any, kwargs: Any, after: Callable[[], object]) -> tuple[Any, Any] | None:
    """New arguments of an optimizer's step: `after` runs at the end of each call of its closure. None: no closure."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return None

    def closed() -> object:
        loss = closure()
        after()
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": closed}
    return (args[0], closed, *args[2:]), kwargs


_TRACING = torch._C._TorchDispatchModeKey.PROXY


def looking_at_saved(look: Callable[[Tensor], None], *, lets_go: bool = False) -> saved_tensors_hooks:
    """Calls `look` with each tensor that autograd saves. The tensor stays saved, unless `lets_go`: backward then fails.

    Modes do not see the hook's work. Source: torch.autograd.graph.saved_tensors_hooks.
    """

    def pack(tensor: Tensor) -> Tensor | None:
        if is_tracing():
            return tensor
        look(tensor)
        return None if lets_go else without_operation(tensor)

    return saved_tensors_hooks(pack, lambda tensor: tensor)


def is_tracing() -> bool:
    """Whether a higher-order operator traces its own backward."""
    return torch._C._get_dispatch_mode(_TRACING) is not None


def without_operation(tensor: Tensor) -> Tensor:
    """The tensor without the operation that made it, as the return value of a pack hook.

    Some operations save their own output (exp, softmax, tanh). An output that is not detached would hold the operation
    and thereby itself, until a backward that may never come.
    """
    if tensor.is_leaf:
        return tensor
    with _disable_current_modes():
        return tensor.detach()
