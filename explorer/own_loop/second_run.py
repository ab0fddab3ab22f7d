"""What a second forward of the same batch needs: the state before it, the saved tensors, the gradients of the outputs.

Autograd saves the tensors of a call in boxes. After a refusal the boxes are emptied: variables of the loop may hold the
graph, and a graph cannot be freed while it is held.
Source: https://docs.pytorch.org/docs/stable/notes/autograd.html (hooks for saved tensors)
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks

from explorer.engine.state.bits import same_bits
from explorer.engine.state.rng import RngState
from explorer.engine.watch.scopes import without_operation
from explorer.engine.watch.state_changes import tensors_in

Reached = tuple[Node | None, int]
"""An output of an operation, as in `next_functions`."""


class NotHealed(Exception):
    """Why a refusal cannot be undone: the text of a note on the error."""


class _Box:
    """A saved tensor that the healer can let go of."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = without_operation(tensor)
        self.version = tensor._version

    def open(self) -> Tensor:
        """The tensor. Raises RuntimeError after a change in place, as autograd does without hooks."""
        if self.tensor is None:
            raise RuntimeError("The saved tensors of this step were freed, because the step ran again.")
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"version {self.tensor._version} of a {tuple(self.tensor.shape)} tensor, {self.version} was expected."
            )
        return self.tensor


@dataclass(frozen=True)
class _Buffer:
    module: nn.Module
    name: str
    tensor: Tensor
    version: int
    content: Tensor | None
    """None for a buffer that no earlier forward has moved."""

    @property
    def moved(self) -> bool:
        """Statistics of a BatchNorm change without a new version: their content is compared."""
        if self.tensor._version != self.version or self.module._buffers.get(self.name) is not self.tensor:
            return True
        return self.content is not None and not same_bits(self.tensor, self.content)


class StateBefore:
    """State that a forward moves: generators, buffers, and plain numbers of modules."""

    def __init__(self, model: nn.Module, moving: set[int] | None) -> None:
        """`moving` are the ids of buffers that forwards move; None if no forward has run: all are copied."""
        self._rng = RngState.capture(model)
        named = ((module, name, b) for module in model.modules() for name, b in module._buffers.items())
        self.buffers = [
            _Buffer(module, name, b, b._version, b.clone() if moving is None or id(b) in moving else None)
            for module, name, b in named
            if b is not None
        ]
        self._numbers = [
            (vars(module), {name: value for name, value in vars(module).items() if type(value) in (bool, int, float)})
            for module in model.modules()
        ]

    def restore(self) -> None:
        """Raises NotHealed for a buffer that moved for the first time."""
        self._rng.restore()
        for buffer in self.buffers:
            if buffer.content is None:
                if not buffer.moved:
                    continue
                raise NotHealed(f"the buffer {buffer.name} moved for the first time, and there is no copy of it")
            buffer.module._buffers[buffer.name] = buffer.tensor
            with torch.no_grad():
                buffer.tensor.copy_(buffer.content)
        for attributes, numbers in self._numbers:
            attributes.update(numbers)


@dataclass(eq=False)
class ForwardCall:
    """A call of the model whose backward is still to come."""

    args: tuple[object, ...]
    kwargs: dict[str, object]
    before: StateBefore
    autocast: list[torch.autocast] = field(default_factory=list)
    boxes: list[weakref.ref[_Box]] = field(default_factory=list)
    outputs: list[Reached] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """Gradient of each output that has arrived, by its number."""

    def pack(self, tensor: Tensor) -> _Box:
        box = _Box(tensor)
        self.boxes.append(weakref.ref(box))
        return box

    def run(self, inner: Callable[..., object]) -> object:
        """One forward. Autograd's tensors are saved in boxes."""
        self.boxes = []
        with ExitStack() as stack:
            for context in self.autocast:
                stack.enter_context(context)
            stack.enter_context(saved_tensors_hooks(self.pack, _Box.open))
            return inner(*self.args, **self.kwargs)

    def listen(self, output: object) -> None:
        """Notes the gradient of each output tensor when it arrives."""
        for i, tensor in enumerate(computed_tensors(output)):
            self.outputs.append((tensor.grad_fn, tensor.output_nr))
            tensor.register_hook(functools.partial(self.gradients.__setitem__, i))

    def free(self) -> None:
        """Lets go of every saved tensor."""
        for reference in self.boxes:
            if (box := reference()) is not None:
                box.tensor = None
        self.boxes = []
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def computed_tensors(output: object) -> list[Tensor]:
    """Tensors in a model's output that an operation made."""
    return [tensor for tensor in tensors_in([output]) if tensor.grad_fn is not None]


def walk(start: Iterator[Reached] | Sequence[Reached], ends: set[Reached]) -> Iterator[Reached]:
    """Each output of each node that a backward from `start` reaches, once. The walk does not go beyond `ends`."""
    seen: set[Reached] = set()
    waiting = list(start)
    while waiting:
        reached = waiting.pop()
        if reached in seen or reached[0] is None:
            continue
        seen.add(reached)
        yield reached
        if reached not in ends:
            waiting.extend(reached[0].next_functions)


def autocast_contexts() -> list[torch.autocast]:
    """Contexts of the autocast that is on now."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    enabled = torch.is_autocast_cache_enabled()
    return [torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=enabled) for kind in kinds]
