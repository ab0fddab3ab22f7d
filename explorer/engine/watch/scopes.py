"""The running block of each thread, and whether the block runs again for backward.

Forward hooks alone miss the recompute of a block: a policy sits inside the block's `forward`, below its hooks, so the
block is silent when it runs again. The recompute scope that the policy opens closes this gap.
Hooks are registered with always_call: early stop leaves a forward by an exception.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Protocol, Self

from torch import nn

from explorer.engine.policy.recompute import observe_recompute
from explorer.engine.watch.here_only import HereOnly
from explorer.engine.watch.uncompiled import never_compiled


class Listener(Protocol):
    """Callbacks in the thread of the event, after the frame has changed. Unknown values are None."""

    def entered(self, block: int, frame: Frame, inputs: Any) -> None: ...

    def left(self, block: int, frame: Frame, output: Any) -> None: ...

    def rerun_changed(self, frame: Frame) -> None:
        """A recompute of a segment starts or ends; the blocks of the segment are entered and left one by one."""
        ...


class Frame:
    """Running blocks of one thread, as indices into `BlockScopes.fqns`; 0 is the model itself."""

    def __init__(self) -> None:
        self.stack: list[int] = [0]
        """Innermost last; the first entry stands for "outside every block"."""
        self.reruns: list[int] = []
        """Open recompute scopes, innermost last."""


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
        self._new_frame = new_frame
        self._local = threading.local()
        self._open = ExitStack()

    @property
    def frame(self) -> Frame:
        """Frame of the calling thread."""
        try:
            return self._local.frame  # type: ignore[no-any-return]
        except AttributeError:
            frame = self._local.frame = self._new_frame()
            return frame

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            for i, module in enumerate(self.modules.values()):
                before = HereOnly(self._before, i)
                opened.callback(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
                after = HereOnly(self._after, i)
                opened.callback(module.register_forward_hook(after, always_call=True).remove)
            opened.enter_context(observe_recompute(self._rerun))
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()

    @never_compiled
    def _before(self, block: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._enter(block, (args, kwargs))

    @never_compiled
    def _after(self, block: int, module: nn.Module, args: Any, output: Any) -> None:
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

    def _enter(self, block: int, inputs: Any = None) -> None:
        frame = self.frame
        frame.stack.append(block)
        self._listener.entered(block, frame, inputs)

    def _leave(self, block: int, output: Any = None) -> None:
        """Leaves `block`, and inner blocks that an exception ended without a hook."""
        frame = self.frame
        if block not in frame.stack[1:]:
            return
        while True:
            last = frame.stack.pop()
            self._listener.left(last, frame, output if last == block else None)
            if last == block:
                return
