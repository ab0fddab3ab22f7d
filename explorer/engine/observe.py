"""One forward of an unwrapped model, watched operator by operator: the raw facts behind the block graph.

    module hooks    who is running (a stack of blocks)        operators belong to the innermost
    dispatch mode   which operator ran, on which storages     data flows from a storage's writer to its readers
    saved tensors   what autograd keeps for backward          each storage once, parameters and buffers apart

What a C++ autograd node keeps outside of saved tensors is not seen by torch's hooks (pytorch, saved_tensors_hooks).
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from explorer.engine.data_flow import DataFlow, Place, dense
from explorer.engine.flops import formula
from explorer.engine.rng import image, imported_numpy
from explorer.record.graph import Trait

Identity = tuple[int, int]
"""Address of a storage, and when it was made."""
PLAIN_OUTPUTS = (Tensor, type(None), bool, int, float, str)


@dataclass
class Seen:
    """What one module did; bytes and FLOPs with everything below it."""

    n_calls: int = 0
    output_bytes: int = 0
    flops: int = 0
    first_call: int = 0
    """Number of the operator before which it was first called."""
    last_exit: int = 0
    signature: int = 0
    """Hash of its operators in order."""
    rerun_flops: int = 0
    """Of each call, what ran until its last tensor was saved: there recompute stops early."""
    returned: list[tuple[Identity, ...]] = field(default_factory=list)
    """Storages that each call gave back."""
    saved: dict[int, int] = field(default_factory=dict)
    """Bytes by storage."""
    traits: set[Trait] = field(default_factory=set)


class Observation(TorchDispatchMode):
    """Between enter and exit every operator of `model` is seen. Run it on a copy; hooks are removed on exit."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.modules = dict(model.named_modules())
        self.seen = {fqn: Seen() for fqn in self.modules}
        self.flow = DataFlow((*model.parameters(), *model.buffers()))
        self._model = model
        self._stack: list[str] = []
        self._entered: list[dict[str, Any]] = []
        self._open = ExitStack()
        self._formulas: dict[Any, Callable[..., int] | None] = {}
        self._born: dict[int, int] = {}
        """When the storage that now lies at an address was made: addresses are handed out again."""
        self._saved_in: dict[Identity, list[set[tuple[str, int]]]] = defaultdict(list)
        """Of each storage, the stacks of calls (block, number) whose operations saved it."""

    def __enter__(self) -> Observation:
        for fqn, module in self.modules.items():
            before = module.register_forward_pre_hook(self._before(fqn), prepend=True, with_kwargs=True)
            after = module.register_forward_hook(self._after(fqn), with_kwargs=True, always_call=True)
            self._open.callback(before.remove)
            self._open.callback(after.remove)
        self._open.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor))
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._open.close()
        self._add_up_containers()

    def saved_outside(self, fqn: str) -> tuple[bool, ...]:
        """Of each storage that a call of the block returned, whether others save it; empty where its calls differ."""
        calls = self.seen[fqn].returned
        if len({len(call) for call in calls}) != 1:
            return ()
        held = [
            [any((fqn, number) not in stack for stack in self._saved_in[one]) for one in call]
            for number, call in enumerate(calls)
        ]
        return tuple(any(column) for column in zip(*held))

    def _add_up_containers(self) -> None:
        """A container is never called itself (ModuleList): what its children did is its own."""
        for fqn, seen in reversed(self.seen.items()):
            if seen.n_calls:
                continue
            for name, _ in self.modules[fqn].named_children():
                child = self.seen.get(f"{fqn}.{name}".lstrip("."), Seen())
                seen.saved |= child.saved
                seen.flops += child.flops
                seen.rerun_flops += child.rerun_flops

    def _identity(self, address: int) -> Identity:
        return address, self._born.get(address, -1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        block = self._stack[-1] if self._stack else None
        random_before = _torch_position(args) if torch.Tag.nondeterministic_seeded in func.tags else None
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and dense(leaf)]
        place = self._place(block, func.overloadpacket.__name__) if block is not None else None
        if place is not None:
            shape_only = func.overloadpacket.__name__.endswith("_like") or "new_" in func.overloadpacket.__name__
            for tensor in read:
                self.flow.reads(place, tensor, shape_only=shape_only)
        out = func(*args, **kwargs)
        if place is not None:
            self._flowed(place, func, read, out)
            self._saw(func, args, kwargs, out, random_before)
        self.flow.now += 1
        return out

    def _place(self, block: str, op: str) -> Place:
        if not self.modules[block]._modules:
            return Place(block)
        ran: Counter[str] = self._entered[-1]["ops"]
        ran[op] += 1
        return Place(block, op, ran[op])

    def _flowed(self, place: Place, func: Any, read: list[Tensor], out: Any) -> None:
        written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and dense(leaf)]
        given = {t.untyped_storage()._cdata for t in read}
        made = {t.untyped_storage()._cdata for t in written} - given
        self._born.update(dict.fromkeys(made, self.flow.now))
        self.flow.writes(place, written, given, mutable=func._schema.is_mutable)

    def _saw(self, func: Any, args: Any, kwargs: Any, out: Any, random_before: Any) -> None:
        self._count(func, args, kwargs, out)
        for fqn in self._stack:
            self.seen[fqn].signature = hash((self.seen[fqn].signature, str(func)))
        if random_before is not None:
            self._drew(func, kwargs, moved=random_before != _torch_position(args))
        elif not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            for fqn in self._stack:
                self.seen[fqn].traits.discard("rng_last")

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func not in self._formulas:
            self._formulas[func] = formula(func)
        count = self._formulas[func]
        if count is not None:
            flops = int(count(*args, **kwargs, out_val=out))
            for fqn in self._stack:
                self.seen[fqn].flops += flops

    def _drew(self, func: Any, kwargs: dict[str, Any], *, moved: bool) -> None:
        own = isinstance(kwargs.get("generator"), torch.Generator)
        for fqn in self._stack:
            traits = self.seen[fqn].traits
            if own:
                traits.add("own_generator")
            elif moved:
                traits.add("uses_rng")
            # RReLU stores the noise it drew; where it comes last, early stop leaves it half done (pytorch #193671).
            (traits.add if moved and "rrelu" in str(func) else traits.discard)("rng_last")

    def _pack(self, tensor: Tensor) -> Tensor:
        for fqn, entered in zip(self._stack, self._entered):
            entered["until"] = self.seen[fqn].flops - entered["flops"]
        if dense(tensor):
            storage = tensor.untyped_storage()
            self._saved_in[self._identity(storage._cdata)].append(
                {(fqn, self.seen[fqn].n_calls - 1) for fqn in self._stack}
            )
            if storage._cdata not in self.flow.constant:
                for fqn in self._stack:
                    self.seen[fqn].saved[storage._cdata] = storage.nbytes()
        return tensor

    def _before(self, fqn: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            seen = self.seen[fqn]
            if not seen.n_calls:
                seen.first_call = self.flow.now
            seen.n_calls += 1
            self._stack.append(fqn)
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            versions = [(t, t._version) for t in tensors]
            self._entered.append({"rng": _outside_position(), "versions": versions, "flops": seen.flops, "until": 0})
            self._entered[-1]["ops"] = Counter()
            positional = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            if not any(tensor.requires_grad for tensor in positional):
                seen.traits.add("inputs_need_no_grad")
            if tensors and not positional:
                seen.traits.add("tensors_in_kwargs_only")
            if any(_is_cache(name, value) for name, value in (*kwargs.items(), *(("", arg) for arg in args))):
                seen.traits.add("keeps_cache")

        return hook

    def _after(self, fqn: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            seen = self.seen[fqn]
            self._stack.pop()
            before, now = self._entered.pop(), _outside_position()
            seen.rerun_flops += before["until"]
            seen.last_exit = self.flow.now
            if before["rng"][0] != now[0]:
                seen.traits.add("python_rng")
            if before["rng"][1] is not None and before["rng"][1] != now[1]:
                seen.traits.add("numpy_rng")
            if any(tensor._version != version for tensor, version in before["versions"]):
                seen.traits.add("changes_inputs")
            tensors = [leaf for leaf in _leaves(output) if isinstance(leaf, Tensor) and dense(leaf)]
            if self._stack and not module._modules:
                self.flow.handed_on(fqn, tensors)
            unique = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
            seen.output_bytes += sum(unique.values())
            seen.returned.append(tuple(map(self._identity, unique)))
            if not _is_flat(output):
                seen.traits.add("nested_outputs")
            if any(_is_cache("", part) for part in (output if isinstance(output, tuple) else (output,))):
                seen.traits.add("keeps_cache")

        return hook


def _torch_position(args: Any) -> bytes:
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    if tensors and tensors[0].is_cuda:
        return image(torch.cuda.get_rng_state(tensors[0].device))
    return image(torch.get_rng_state())


def _outside_position() -> tuple[Any, Any]:
    numpy = imported_numpy()
    return random.getstate(), image(numpy.random.get_state()) if numpy is not None else None


def _is_cache(name: str, value: Any) -> bool:
    return value is not None and (name in ("past_key_values", "layer_past", "cache") or "Cache" in type(value).__name__)


def _is_flat(output: Any) -> bool:
    parts = output if type(output) in (tuple, list) else (output,)
    return all(isinstance(part, PLAIN_OUTPUTS) for part in parts)


def _leaves(output: Any) -> list[Any]:
    return tree_leaves(output.to_tuple() if hasattr(output, "to_tuple") else output)
