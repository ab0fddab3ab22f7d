"""Translates torch's "tensor at position 46 has different metadata" into a block, an operator and a usual cause.

Positions count the tensors that a checkpointed region saves for backward. torch does not record their operators, so
the region runs a third time. It counts, and notes blocks and lines of the user's code. The step has failed
already; generators are restored, but the third run moves any other state again.
"""

from __future__ import annotations

import re
from contextlib import suppress
from traceback import walk_tb
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn
from torch.utils.checkpoint import CheckpointError

from explorer.engine.device.memory_limit import failure_in_step
from explorer.engine.state.rng import RngState
from explorer.engine.watch.forward import dense, dense_tensors
from explorer.engine.watch.lines import line_of_model
from explorer.engine.watch.modes import writes_arguments
from explorer.engine.watch.scopes import BlockWatch, Frame, looking_at_saved
from explorer.record.failure import Failure

_MISMATCH = re.compile(r"tensor at position (\d+):\nsaved metadata: (.*)\nrecomputed metadata: (.*)")
_SHAPE, _DTYPE = re.compile(r"torch\.Size\(\[([^\]]*)\]\)"), re.compile(r"torch\.(float\w+|bfloat16|\w*int\w*|bool)")
_COUNTS = re.compile(r"during forward: (\d+)\nNumber of tensors saved during recomputation: (\d+)")

CACHE = "a cache of keys and values that forward filled and the recompute fills again: switch the cache off in training"
TOKENS = "another number of rows: a router or a selection that chose otherwise; keep this block, or let it choose once"
TYPES = "another number format: autocast or a cast that was on in one of them alone"
BRANCH = (
    "a branch that depends on what changed in between (a counter, a cache, train or eval mode, autocast, a context "
    "such as sdpa_kernel that is open around forward alone): let forward depend on its inputs alone, or keep this block"
)


def in_words(error: BaseException, model: nn.Module) -> str:
    """The error as a sentence; empty for any error but torch's CheckpointError."""
    if not isinstance(error, CheckpointError):
        return ""
    mismatch = _MISMATCH.search(str(error))
    third, place = _ThirdRun(model), ""
    if (region := _region(error)) is not None:
        frame, inputs = region
        third.run(frame.recompute_fn, inputs)
        place = _first_departure(frame, third.saved)
    of_block = f" of {third.block}" if third.block else ""
    if mismatch is None:
        counts = _COUNTS.search(str(error))
        work = (
            f"forward saved {counts[1]} tensors and the recompute {counts[2]}" if counts else "the recompute saved more"
        )
        return f"The recompute{of_block} did other work than forward: {work}{place}. Usual cause: {BRANCH}."
    position, forward, again = int(mismatch[1]), mismatch[2], mismatch[3]
    # The third run does what the recompute did, but for sizes that grow with each run. The operator of forward is not
    # known: it may be another one.
    shape, origin = third.saved[position] if position < len(third.saved) else ([], "")
    where = f", where {origin}" if origin and len(shape) == len(_numbers(again)) else ""
    return (
        f"The recompute{of_block} made another tensor than forward: saved tensor {position} was {_short(forward)} in "
        f"forward and {_short(again)} in the recompute{where}. Usual cause: {_cause(forward, again)}."
    )


def add_note(error: BaseException, model: nn.Module) -> None:
    """Adds the sentence to torch's CheckpointError, once. The error itself stays as it is, whatever goes wrong here."""
    with suppress(Exception):
        if not hasattr(error, "__notes__") and (sentence := in_words(error, model)):
            error.add_note(sentence)


def _first_departure(frame: Any, saved: list[tuple[list[int], str]]) -> str:
    """The first saved tensor of the third run that is not the tensor of forward; empty where they are alike."""
    forward = [list(metadata["shape"]) for metadata in frame.x_metadatas if isinstance(metadata, dict)]
    pairs = zip(forward, saved)
    i = next((i for i, (shape, again) in enumerate(pairs) if shape != again[0]), min(len(forward), len(saved)))
    if i < len(saved):
        return f"; they first part at saved tensor {i} of the recompute, where {saved[i][1]}"
    return f"; the recompute saves nothing more where {saved[-1][1]}" if saved and i < len(forward) else ""


def failure_in_words(error: BaseException, model: nn.Module) -> Failure:
    """The error of a step as a result, with a translated sentence for a CheckpointError."""
    failure, sentence = failure_in_step(error), in_words(error, model)
    return replace(failure, sentence=sentence) if sentence else failure


class _ThirdRun(BlockWatch):
    """The third run of the region: `saved` holds shape and origin of each saved tensor, in order."""

    notes_higher_order = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.saved: list[tuple[list[int], str]] = []
        self.block = ""
        """The outermost block that the region enters."""
        self._made = {_identity(tensor): f"it is the parameter {name}" for name, tensor in model.named_parameters()}
        self._alive: list[object] = []

    def run(self, function: Any, inputs: Any) -> None:
        rng = RngState.capture()
        try:
            with looking_at_saved(self._note), torch.enable_grad(), self:
                function(*inputs)
        except Exception:  # the third run may fail elsewhere: tensors saved until then count
            return
        finally:
            rng.restore()

    def entered(self, block: int, frame: Frame, inputs: Any) -> None:
        self.block = self.block or self.scopes.fqns[block]

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        result = func(*args, **(kwargs or {}))
        inside = f" in {self.running}" if self.running else ""
        inside += f" ({line})" if (line := line_of_model()) else ""
        for tensor in dense_tensors(result):
            self._alive.append(tensor)  # a freed address would be reused
            if writes_arguments(func) or _identity(tensor) not in self._made:  # no alias of an earlier result
                self._made[_identity(tensor)] = f"{func} returned it{inside}"
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        made = self._made.get(_identity(tensor)) if dense(tensor) else None
        self.saved.append((list(tensor.shape), made or "it went into the block"))


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Tells a view from its base and from other views: each is made by an operator of its own."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _region(error: BaseException) -> tuple[Any, object] | None:
    """torch's record of the checkpoint whose recompute failed, and its arguments, from the frames of the error."""
    for frame, _ in walk_tb(error.__traceback__):
        region: Any = frame.f_locals.get("frame")
        if frame.f_code.co_name == "unpack_hook" and hasattr(region, "recompute_fn") and "args" in frame.f_locals:
            return region, frame.f_locals["args"]
    return None


def _cause(forward: str, again: str) -> str:
    if _numbers(forward) == _numbers(again):
        return TYPES
    first, second = _numbers(forward), _numbers(again)
    if len(first) == len(second):
        differing = [i for i, (a, b) in enumerate(zip(first, second)) if a != b]
        if differing == [0]:
            return TOKENS
        if all(second[i] > first[i] for i in differing):
            return CACHE
    return BRANCH


def _numbers(metadata: str) -> list[int]:
    shape = _SHAPE.search(metadata)
    return [int(number) for number in shape[1].split(",") if number.strip()] if shape else []


def _short(metadata: str) -> str:
    dtype = _DTYPE.search(metadata)
    return f"{tuple(_numbers(metadata))} {dtype[1] if dtype else ''}".strip()
