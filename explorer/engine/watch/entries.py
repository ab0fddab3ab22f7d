"""What a block's code finds at its entry, in forward and again in the recompute.

    forward     step 0 ─▶ block reads 0          the root counts: step 1
    recompute             block reads 1          nothing moved twice, and this gradient belongs to another forward

Nothing has to move twice, and no tensor of this step has to differ: `step // 10` is wrong in one step of ten. State
that a block moves itself is the concern of the state audit and of the probe (compare/probe.py).
A value that differs counts only if the code reads it, see state/code_reads.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from explorer.engine.policy import units
from explorer.engine.policy.units import Wrap
from explorer.engine.state.code_reads import CodeReads, is_followed
from explorer.engine.state.reachable import OF_TORCH_OR_POLICY
from explorer.engine.state.state_diff import Images, Path, differences_in, short_text
from explorer.record.late_read import LateRead

_MOST_OBJECTS = 20_000
"""Objects that the walk at one entry visits at most."""
_SETTINGS: Mapping[str, Callable[[], object]] = {
    "torch's default dtype": torch.get_default_dtype,
    "torch's default device": torch.get_default_device,
    "the precision of float32 products": torch.get_float32_matmul_precision,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "flash attention": torch.backends.cuda.flash_sdp_enabled,
    "memory-efficient attention": torch.backends.cuda.mem_efficient_sdp_enabled,
    "plain attention": torch.backends.cuda.math_sdp_enabled,
}
Place = tuple[str, str, bool]
"""Block or file, name, and whether the value counts without a look at the code."""


@dataclass
class EntryCall:
    """One call of a unit."""

    block: str
    """First block of the unit."""
    modules: tuple[nn.Module, ...]
    at_entry: dict[Place, object] | None = None
    """Plain copies of all values; None before the forward."""
    moved: dict[Place, list[Path]] = field(default_factory=dict)
    """Paths of the parts that the forward of the call changed."""


class EntryWatch:
    """Compares, for each call of a unit, what its code reads in forward with what it reads in the recompute.

    `reads` has the differences since it was cleared, by block, owner and name. A cache that the first step fills
    differs in the first step alone, so two steps settle a difference.
    """

    def __init__(self, model: nn.Module) -> None:
        self._fqns = {module: fqn for fqn, module in model.named_modules()}
        self._codes: dict[tuple[nn.Module, ...], CodeReads] = {}
        self._images = Images(model, most_objects=_MOST_OBJECTS, tensors={})
        self.reads: dict[tuple[str, str, str], LateRead] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The context around steps of a model that carries a policy."""
        run = units._run

        def watched(
            wrap: Wrap, function: Callable[..., object], modules: Sequence[nn.Module], args: Any, kwargs: Any
        ) -> object:
            if wrap.unit.action == "offload":
                return run(wrap, function, modules, args, kwargs)
            call = EntryCall(wrap.fqn, tuple(modules))
            return run(wrap, partial(self._run, call, function), modules, args, kwargs)

        units._run = watched
        try:
            yield
        finally:
            units._run = run

    def _run(self, call: EntryCall, function: Callable[..., object], *args: Any, **kwargs: Any) -> object:
        if call.at_entry is not None:
            self.again(call)
            return function(*args, **kwargs)
        self.begin(call)
        output = function(*args, **kwargs)
        self.end(call)
        return output

    def begin(self, call: EntryCall) -> None:
        """The forward of a call begins."""
        call.at_entry = self.look(call)

    def end(self, call: EntryCall) -> None:
        """The forward of a call is over."""
        at_exit, at_entry = self.look(call), call.at_entry or {}
        with _disable_current_modes():  # a comparison is no operator of the model
            for place, value in at_exit.items():
                call.moved[place] = [path for path, _, _ in differences_in(at_entry.get(place), value)]

    def again(self, call: EntryCall) -> dict[Place, object]:
        """The call runs again: adds to `reads`, and returns the values at this entry."""
        values = self.look(call)
        with _disable_current_modes():
            self._compare(call, values)
        return values

    def look(self, call: EntryCall) -> dict[Place, object]:
        """Plain copies of all values that the call may read, at this moment."""
        values: dict[Place, object] = {("", name, True): value for name, value in _settings()}
        images = self._images.later()
        code = self._code(call)
        with torch.no_grad(), _disable_current_modes():
            for module in dict.fromkeys(child for root in call.modules for child in root.modules()):
                fqn = self._fqns.get(module, type(module).__qualname__)
                values.update({(fqn, *name): value for name, value in _state_of(module, images)})
            for place in code.places.values():
                with suppress(KeyError):  # a name that is gone
                    values["", place.path, False] = images.image(place.value)
            for variable in code.variables:
                with suppress(LookupError):  # not set, and without a default
                    values["", f"the context variable {variable.name}", True] = images.image(variable.get())
        return values

    def guards_itself(self, call: EntryCall) -> bool:
        """Whether the code of the call asks if it runs again."""
        return self._code(call).guards_itself

    def _code(self, call: EntryCall) -> CodeReads:
        if call.modules not in self._codes:
            self._codes[call.modules] = CodeReads(call.modules)
        return self._codes[call.modules]

    def _compare(self, call: EntryCall, values: dict[Place, object]) -> None:
        assert call.at_entry is not None
        block = call.block
        for place in {**call.at_entry, **values}:
            for path, forward, recompute in differences_in(call.at_entry.get(place), values.get(place)):
                moved = any(_is_inside(path, part) or _is_inside(part, path) for part in call.moved.get(place, ()))
                if self._is_read(call, place, path, moved=moved):
                    read = LateRead(
                        block=block, owner=place[0], name=_text(place[1], path),
                        in_forward=_short(forward), in_recompute=_short(recompute),
                    )  # fmt: skip
                    self.reads.setdefault((block, read.owner, read.name), read)

    def _is_read(self, call: EntryCall, place: Place, path: Path, *, moved: bool) -> bool:
        _, name, always = place
        if moved and (always or self.guards_itself(call)):
            return False
        if always:
            return True
        return self._code(call).uses.reads((*name.split(".")[-1:], *path), moved_by_block=moved)


def _is_inside(part: Path, path: Path) -> bool:
    return part[: len(path)] == path


def _short(value: object) -> str:
    return value if isinstance(value, str) else short_text(value)


def _text(name: str, path: Path) -> str:
    """Such as `config.step`, `losses[0]`."""
    return name + "".join(f".{part}" if isinstance(part, str) else f"[{part}]" for part in path)


def _state_of(module: nn.Module, images: Images) -> Iterator[tuple[tuple[str, bool], object]]:
    """State of the module itself. Torch's norms write buffers and do not read them in training."""
    is_of_torch = not is_followed(type(module).__module__)
    yield ("training", True), module.training
    for name, parameter in module._parameters.items():
        if parameter is not None and not parameter.is_inference():
            yield (name, True), f"version {parameter._version}"
    if not is_of_torch:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield (name, False), images.of_tensor(buffer)
    for name, value in vars(module).items():
        if name not in OF_TORCH_OR_POLICY and not isinstance(value, torch.Generator):
            yield (name, is_of_torch), images.image(value)


def _settings() -> Iterator[tuple[str, object]]:
    """Settings of torch, modes and context variables that any code may read."""
    for name, read in _SETTINGS.items():
        yield name, str(read())
    for device in ("cpu", "cuda"):
        enabled = torch.is_autocast_enabled(device)
        yield f"autocast of {device}", str(torch.get_autocast_dtype(device)) if enabled else "off"
    modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
    names = [type(mode).__qualname__ for mode in modes if is_followed(type(mode).__module__)]
    yield "the stack of modes", ", ".join(names) or "empty"
