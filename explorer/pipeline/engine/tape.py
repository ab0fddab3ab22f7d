"""Tape of a model's forward, recorded once, so that any stretch of the forward can run alone.

A pipeline stage has to run "from block 3 to block 7" of a forward that is plain Python. The forward is therefore
observed once, on one microbatch, and recorded as steps: calls of whole modules and the tensor functions between the
modules, with the values that flow from step to step.

    ids ──▶ embed ──▶ (+) ──▶ blocks.0 ──▶ blocks.1 ──▶ norm ──▶ matmul ──▶ logits        modules and functions
     0        1        2         3            4          5         6                      values

(1) Python's decisions are frozen. A forward that decides by a tensor's value is refused, unless the value depends on
    no input (positions, masks) and is therefore always the same.
(2) A tensor that leaves a block by an attribute instead of by return is found there and is a value like any other.
(3) Parameters, buffers and tensor attributes are named by path, so the tape plays on any copy of the model.

No torch.fx and no torch.export: modules stay themselves, hooks, policies and class names included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves, tree_map

from explorer.engine.model.loaded import call
from explorer.engine.state.bits import tensor_leaves
from explorer.errors import InvalidPlan

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout,
         torch.memory_format, slice, type(Ellipsis), range)  # fmt: skip
READS_VALUES = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "__array__", "__complex__"}


@dataclass(frozen=True)
class Value:
    """The tensor number `index` of the forward."""

    index: int


@dataclass(frozen=True)
class Path:
    """A parameter, buffer or tensor attribute of the model."""

    dotted: str


@dataclass(frozen=True)
class Step:
    """A call of a module or function. `target` is a fqn or a function; Value and Path replace tensors in arguments."""

    target: str | Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    output: object
    side_outputs: tuple[tuple[str, Value], ...] = ()
    """Tensors found in attributes of the module after its call: path and value."""
    grad: bool = True
    random: bool = False

    @property
    def name(self) -> str:
        return self.target if isinstance(self.target, str) else _function_name(self.target)

    @property
    def reads(self) -> set[int]:
        return {leaf.index for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Value)}

    @property
    def writes(self) -> set[int]:
        returned = {leaf.index for leaf in tree_leaves(self.output) if isinstance(leaf, Value)}
        return returned | {value.index for _, value in self.side_outputs}

    @property
    def paths(self) -> set[str]:
        return {leaf.dotted for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Path)}


@dataclass(frozen=True)
class Meta:
    """Shape, type and gradient of one value on the recorded microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    producer: str

    @property
    def n_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.producer} {'x'.join(map(str, self.shape))} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Tape:
    """A recorded forward. Values 0..n_inputs-1 are the tensors of the inputs, in order of their leaves."""

    steps: tuple[Step, ...]
    n_inputs: int
    output: object
    """The model's return value with Value in place of tensors."""
    metas: tuple[Meta, ...]


def record(model: nn.Module, inputs: object, chain: Iterable[str]) -> Tape:
    """Runs `model` once on `inputs` and writes it down. The model's buffers and RNG move: hand in a copy.

    Raises InvalidPlan where the forward cannot be written down, with the place and the reason.
    """
    return _Recorder(model, set(chain)).record(inputs)


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module, chain: set[str]) -> None:
        super().__init__()
        self.model = model
        self.chain = chain
        self.depth = 0
        self.steps: list[Step] = []
        self.metas: list[Meta] = []
        self.numbers: dict[int, int] = {}
        """id of a tensor -> number of the value it holds now (functions in place give it a new one)."""
        self.free: set[int] = set()
        """Values that depend on no input, parameter or random number."""
        self.alive: list[object] = []
        """Everything seen, kept so that no id is used twice."""
        self.entry: tuple[tuple[object, ...], dict[str, object]] = ((), {})
        self.last_module = ""

    def record(self, inputs: object) -> Tape:
        leaves = tensor_leaves(inputs)
        for leaf in leaves:
            self.new_value(leaf, "input")
        hooks = [hook for fqn, module in self.modules() for hook in self.listen(fqn, module)]
        try:
            with self:
                output = call(self.model, inputs)
            lifted = self.lift(output, "the model's output")
        finally:
            for hook in hooks:
                hook.remove()
        return Tape(tuple(self.steps), len(leaves), lifted, tuple(self.metas))

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules that are called whole: all but the ancestors of the chain's blocks."""
        above = {fqn.rsplit(".", n)[0] for fqn in self.chain for n in range(1, fqn.count(".") + 1)} | {""}
        for fqn, module in self.model.named_modules():
            if fqn not in above - self.chain:
                yield fqn, module

    def listen(self, fqn: str, module: nn.Module) -> list[Any]:
        def before(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            if self.depth == 0:
                self.entry = self.lift((args, kwargs), f"the arguments of {fqn}")
            self.depth += 1

        def after(module: nn.Module, args: object, kwargs: object, output: object) -> None:
            self.depth -= 1
            if self.depth == 0:
                self.last_module = fqn
                made = self.new_values(output, fqn)
                self.steps.append(Step(fqn, *self.entry, made, self.side_outputs(fqn, module), torch.is_grad_enabled()))

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if self.depth:
            return func(*args, **kwargs)
        name = _function_name(func)
        if name in READS_VALUES and not self.constant(args):
            raise InvalidPlan(
                f"The model reads a tensor's value ({name}) {self.where()}: which operations follow may depend on it.",
                hint="Move the decision into a block, or run this model unsplit.",
            )
        before = _generator_states()
        output = func(*args, **kwargs)
        if name == "__setitem__":
            func, output = _set_item, args[0]
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(output)):
            positional, named = self.lift((args, kwargs), f"the arguments of {name}")
            random = any(not torch.equal(a, b) for a, b in zip(before, _generator_states(), strict=True))
            made = self.new_values(output, name)
            step = Step(func, positional, named, made, grad=torch.is_grad_enabled(), random=random)
            if not step.paths and not step.random and step.reads <= self.free:
                self.free |= step.writes
            self.steps.append(step)
        return output

    def constant(self, args: tuple[object, ...]) -> bool:
        """Whether the tensors of `args` are the same in every forward."""
        numbers = [self.numbers.get(id(leaf)) for leaf in tensor_leaves(args)]
        return all(number is None or number in self.free for number in numbers)

    def where(self) -> str:
        return f"after {self.last_module}" if self.last_module else "before its first block"

    def new_value(self, tensor: Tensor, producer: str) -> Value:
        self.alive.append(tensor)
        self.numbers[id(tensor)] = len(self.metas)
        self.metas.append(Meta(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, producer))
        return Value(len(self.metas) - 1)

    def new_values(self, output: object, producer: str) -> object:
        numbered: dict[int, Value] = {}

        def number(leaf: object) -> object:
            if isinstance(leaf, Tensor):
                if id(leaf) not in numbered:
                    numbered[id(leaf)] = self.new_value(leaf, producer)
                return numbered[id(leaf)]
            return self.plain(leaf, f"what {producer} returns")

        return tree_map(number, output)

    def lift(self, tree: object, what: str) -> Any:
        """`tree` with Value and Path in place of tensors."""

        def name(leaf: object) -> object:
            if not isinstance(leaf, Tensor):
                return self.plain(leaf, what)
            if id(leaf) in self.numbers:
                return Value(self.numbers[id(leaf)])
            if (path := self.path_of(leaf)) is not None:
                return Path(path)
            if leaf.requires_grad:
                raise InvalidPlan(
                    f"A tensor reaches {what} {self.where()} that no step returned: it leaves a block by a way that "
                    "cannot be followed.",
                    hint="Return it from the block, or keep it in an attribute of the block.",
                )
            self.alive.append(leaf)
            return leaf

        return tree_map(name, tree)

    def plain(self, leaf: object, what: str) -> object:
        if isinstance(leaf, PLAIN) or (callable(leaf) and not isinstance(leaf, nn.Module)):
            return leaf
        raise InvalidPlan(
            f"{what[0].upper()}{what[1:]} hold a {type(leaf).__name__}, and tensors may hide in it.",
            hint="Hand tensors, lists, tuples and dictionaries from block to block; switch a key/value cache off.",
        )

    def path_of(self, tensor: Tensor) -> str | None:
        for fqn, module in self.model.named_modules():
            for attributes in (module._parameters, module._buffers, module.__dict__):
                for key, value in attributes.items():
                    if value is tensor:
                        return f"{fqn}.{key}" if fqn else key
        return None

    def side_outputs(self, fqn: str, module: nn.Module) -> tuple[tuple[str, Value], ...]:
        named = []
        for inner, part in module.named_modules():
            for key, value in part.__dict__.items():
                if isinstance(value, Tensor) and value.grad_fn is not None and id(value) not in self.numbers:
                    path = ".".join(piece for piece in (fqn, inner, key) if piece)
                    named.append((path, self.new_value(value, path)))
        return tuple(named)


def _function_name(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", None) or resolve_name(function) or "function"


def _set_item(tensor: Tensor, index: Any, value: Any) -> Tensor:
    tensor[index] = value
    return tensor


def _generator_states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states
