"""Tensors of a run, on disk, and their distances in several measures because each measure has blind spots.

Bits are compared as bits, so NaN equals only the same NaN. Every distance is computed in float64.
`TensorDiff.verdict` tells rounding from a difference by a float64 reference, never by an absolute tolerance.

Tensors of a run lie in a file and are read one by one. In memory they were as large as the largest run.
"""

from __future__ import annotations

import hashlib
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from explorer.engine.state.bits import INTEGERS, dense, same_bits
from explorer.record.comparison import Presence, TensorDiff

Tensors = Mapping[str, Tensor | None]
"""Tensors by name, detached and on the CPU; None if the run has no tensor of the name (a missing gradient)."""

LENGTH_ROUNDS = 512 * torch.finfo(torch.float32).eps
"""Allowed relative error of a step's length: Adam's 1 - 0.999 ** n in float32 is right to 3e-5."""
DISK = Path("/var/tmp")
"""Default folder, on a disk by custom while /tmp may lie in memory; TMPDIR overrides it."""
SMALL_BYTES = 4096
"""Tensors up to this size stay in memory: most of a model's tensors, and little of its bytes."""
PRESENCE: dict[tuple[bool, bool], Presence] = {
    (True, True): "both", (True, False): "baseline only", (False, True): "candidate only",
}  # fmt: skip
_MAX_INT64 = 2**63 - 1

Kind = TypeVar("Kind", bound=TensorDiff)


@dataclass(frozen=True)
class Yardstick:
    """The scale of a difference: the baseline's rerun and the same step in float64."""

    rerun: Tensors = field(default_factory=dict)
    reference: Tensors = field(default_factory=dict)
    epsilon: float = torch.finfo(torch.float32).eps
    """Machine epsilon of the coarsest floating type of the run (the autocast type under autocast)."""
    before: Tensors = field(default_factory=dict)
    """Values before the step of parameters that every run moves by an optimizer with equal gradients."""

    @cached_property
    def median_norm(self) -> float:
        """Median of the norms of the reference's floating tensors: the scale of the run."""
        norms = [_norm(tensor) for tensor in self.reference.values() if tensor is not None and is_floating(tensor)]
        return statistics.median(norms) if norms else 0.0

    def tiny(self, reference: Tensor) -> float:
        """float32 epsilon (float64's for a float64 run) times the scale of the run or of the tensor, the larger one."""
        epsilon = min(self.epsilon, torch.finfo(torch.float32).eps)
        return epsilon * max(self.median_norm, _norm(reference))

    def errors(self, name: str, reference: Tensor, *values: Tensor) -> list[float]:
        """Distance of each of `values` from `reference`. An optimizer step may be off by LENGTH_ROUNDS in length."""
        exact, before = in_double(reference), self.before.get(name)
        gaps = [in_double(value) - exact for value in values]
        if before is not None and _norm(step := exact - in_double(before)):
            lengths = [float(torch.vdot(step.flatten(), gap.flatten()).real) / _norm(step) ** 2 for gap in gaps]
            gaps = [gap - x * step if abs(x) <= LENGTH_ROUNDS else gap for gap, x in zip(gaps, lengths)]
        return [_norm(gap) for gap in gaps]

    def trusts(self, reference: Tensor, baseline_error: float) -> bool:
        """Whether the float64 run followed the baseline closely enough to judge the candidate.

        Other random numbers or another branch in float64 put the baseline far off. Half of the digits must agree (sqrt
        of epsilon), or the tensor must be zero on the run's scale. A tensor that is zero in float64 (the gradient
        of a bias before a norm) may reach sqrt(epsilon) of the run's scale.
        """
        norm, half = _norm(reference), math.sqrt(self.epsilon)
        floor = max(half * norm, 10 * self.tiny(reference))
        if norm <= self.epsilon * baseline_error:
            floor = max(floor, half * self.median_norm)
        return math.isfinite(baseline_error) and baseline_error <= floor


def differences(kind: type[Kind], baseline: Tensors, candidate: Tensors, yardstick: Yardstick) -> tuple[Kind, ...]:
    """One record for each name: first the baseline's names in order, then names of the candidate alone."""
    names = [*baseline, *(name for name in candidate if name not in baseline)]
    return tuple(difference(kind, name, baseline.get(name), candidate.get(name), yardstick) for name in names)


def difference(
    kind: type[Kind], name: str, baseline: Tensor | None, candidate: Tensor | None, yardstick: Yardstick
) -> Kind:
    """The difference of two tensors, of equal or other shapes; None on one side alone is a difference."""
    present = baseline if baseline is not None else candidate
    if present is None:
        return kind(name=name, shape=(), dtype="", presence="neither", bitwise=True)
    diff = kind(
        name=name,
        shape=tuple(present.shape),
        dtype=str(present.dtype).removeprefix("torch."),
        presence=PRESENCE[baseline is not None, candidate is not None],
        bitwise=False,
    )
    if baseline is None or candidate is None:
        return diff
    baseline, candidate = dense(baseline), dense(candidate)
    if baseline.shape != candidate.shape or baseline.dtype != candidate.dtype:
        return diff
    same = same_bits(baseline, candidate)
    if not is_floating(baseline):
        far = 0 if same else (baseline.to(torch.int64) - candidate.to(torch.int64)).abs().max()
        return replace(diff, bitwise=same, max_abs=float(far))
    distances = _no_distances(baseline) if same else _distances(baseline, candidate)
    diff = replace(diff, bitwise=same, **distances, **_against(yardstick, name, baseline, candidate))
    return replace(diff, never_rounds="") if same else diff


def relative_distance(expected: Tensors, actual: Tensors) -> float | None:
    """|actual - expected| / |expected| over all tensors together; absent tensors count as zero.

    None if the quotient is not finite: `expected` is zero, or a tensor has infinite elements.
    """
    gaps, scales = [0.0], [0.0]
    for name, tensor in expected.items():
        other = actual.get(name)
        if tensor is not None:
            scales.append(_norm(tensor))
            gaps.append(_norm(in_double(tensor) - (0 if other is None else in_double(other))))
        elif other is not None:
            gaps.append(_norm(other))
    gap, scale = math.hypot(*gaps), math.hypot(*scales)
    if not scale:
        return None if gap else 0.0
    distance = gap / scale
    return distance if math.isfinite(distance) else None


def worst_distance(expected: Tensors, actual: Tensors) -> float:
    """The largest |actual - expected| of a tensor, in shares of its norm or of the median norm, the larger one.

    Infinite if a tensor is absent on one side, has another shape, or is not finite.
    """
    present = {name: tensor for name, tensor in expected.items() if tensor is not None}
    if present.keys() != {name for name, tensor in actual.items() if tensor is not None}:
        return math.inf
    norms = {name: _norm(tensor) for name, tensor in present.items()}
    median, distances = statistics.median(norms.values() or (0.0,)), [0.0]
    for name, tensor in present.items():
        other = actual[name]
        if other is None or other.shape != tensor.shape:
            return math.inf
        gap, scale = _norm(in_double(other) - in_double(tensor)), max(norms[name], median)
        distances.append(gap / scale if scale else gap)
    return max(math.inf if math.isnan(distance) else distance for distance in distances)


def epsilon_of(gradients: Tensors, formats: Collection[torch.dtype]) -> float:
    """Machine epsilon of the coarsest floating type among `formats` and the types of `gradients`."""
    types = {tensor.dtype for tensor in gradients.values() if tensor is not None and is_floating(tensor)} | {*formats}
    return max(torch.finfo(dtype).eps for dtype in types or {torch.get_default_dtype()})


def is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def max_ulp(left: Tensor, right: Tensor) -> int | None:
    """Largest distance between two elements in representable numbers; None for complex or wholly infinite tensors.

    The bit pattern of a float, with the negative half mirrored, counts the floats from zero: distances are integers.
    """
    if left.is_complex():
        return None
    finite = left.isfinite() & right.isfinite()
    ordered = [_ordered(side[finite]) for side in (left, right)]
    if not ordered[0].numel():
        return None
    high, low = torch.maximum(*ordered), torch.minimum(*ordered)
    distance = high - low
    if bool((distance < 0).any()):  # only float64 of opposite signs can be further apart than int64 counts
        return _MAX_INT64
    return int(distance.max())


def _distances(baseline: Tensor, candidate: Tensor) -> dict[str, float | int | None]:
    n_mismatch = int((baseline.isfinite() != candidate.isfinite()).sum())
    n_nonfinite = int((~candidate.isfinite()).sum())
    both = baseline.isfinite() & candidate.isfinite()
    left, right = in_double(baseline[both]), in_double(candidate[both])
    norms = _norm(left), _norm(right)
    return {
        "n_nonfinite_mismatch": n_mismatch,
        "n_nonfinite": n_nonfinite,
        "max_abs": float((right - left).abs().max()) if left.numel() else None,
        "relative_norm": _quotient(_norm(right - left), norms[0]),
        "max_ulp": max_ulp(baseline, candidate),
        "cosine": _cosine(left, right, norms),
        "norm_ratio": _quotient(norms[1], norms[0]),
        "baseline_norm": norms[0],
    }


def step_distances(baseline: Tensor, candidate: Tensor, before: Tensor) -> dict[str, float | None]:
    """Distance between two moves from `before`, as fields of a ParameterDiff."""
    start, first, second = (in_double(tensor) for tensor in (before, baseline, candidate))
    left, right, gap = first - start, second - start, second - first
    norms = _norm(left), _norm(right)
    return {
        "step_distance": _quotient(_norm(gap), norms[0]),
        "step_ratio": _quotient(norms[1], norms[0]),
        "step_cosine": _cosine(left, right, norms),
        "decay_cosine": _cosine(gap, start, (_norm(gap), _norm(start))),
    }


def _quotient(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _cosine(left: Tensor, right: Tensor, norms: tuple[float, float]) -> float | None:
    if not all(norms):
        return None
    inner = torch.vdot((right / norms[1]).flatten(), (left / norms[0]).flatten())
    return max(-1.0, min(1.0, float(inner.real)))


def _against(yardstick: Yardstick, name: str, baseline: Tensor, candidate: Tensor) -> dict[str, float | str | None]:
    distances: dict[str, float | str | None] = {}
    rerun = yardstick.rerun.get(name)
    if rerun is not None and rerun.shape == baseline.shape:
        noise = _norm(in_double(baseline) - in_double(rerun))
        if math.isfinite(noise):
            distances["noise"] = noise
    reference = yardstick.reference.get(name)
    if reference is None or reference.shape != baseline.shape:
        return distances
    baseline_error, candidate_error = yardstick.errors(name, reference, baseline, candidate)
    if not yardstick.trusts(reference, baseline_error) or not math.isfinite(candidate_error):
        return {**distances, "never_rounds": "The step in float64 did not follow this tensor closely enough to judge."}
    tiny = yardstick.tiny(reference)
    if name in yardstick.before:
        tiny = torch.finfo(baseline.dtype).eps / 4 * _norm(reference)
    return {**distances, "baseline_error": baseline_error, "candidate_error": candidate_error, "tiny": tiny}


def _no_distances(tensor: Tensor) -> dict[str, float | int | None]:
    n_nonfinite = int((~tensor.isfinite()).sum())
    distances: dict[str, float | int | None] = {"n_nonfinite": n_nonfinite, "max_abs": 0.0}
    if not n_nonfinite:
        distances["baseline_norm"] = _norm(tensor)
    if not tensor.is_complex():
        distances["max_ulp"] = 0
    if tensor.any():
        distances |= {"relative_norm": 0.0, "cosine": 1.0, "norm_ratio": 1.0}
    return distances


def _ordered(tensor: Tensor) -> Tensor:
    bits = tensor.contiguous().view(INTEGERS[tensor.element_size()]).to(torch.int64)
    lowest = -(2 ** (8 * tensor.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)


def in_double(tensor: Tensor) -> Tensor:
    """The tensor in float64, or in complex128 if it is complex."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(in_double(tensor)))


class _File:
    """A file without a name, which is deleted with the last reference to a tensor in it."""

    def __init__(self) -> None:
        folder = DISK if "TMPDIR" not in os.environ and os.access(DISK, os.W_OK) else None
        self.open: Any = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115

    def __del__(self) -> None:
        if hasattr(self, "open"):
            self.open.close()


@dataclass(frozen=True)
class _Extent:
    file: _File
    offset: int
    n_bytes: int
    dtype: torch.dtype
    shape: torch.Size


class TensorsOnDisk(Mapping[str, Tensor | None]):
    """Tensors by name; every read returns a detached copy on the CPU."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor | None]], like: Tensors | None = None) -> None:
        """Writes `tensors`, except tensors that equal those of `like` bit by bit: both share one extent."""
        self._file: _File | None = None
        self._end = 0
        self._extents: dict[str, _Extent | Tensor | None] = {}
        for name, tensor in tensors:
            self._extents[name] = None if tensor is None else self._put(name, dense(tensor), like or {})

    def __getitem__(self, name: str) -> Tensor | None:
        extent = self._extents[name]
        if not isinstance(extent, _Extent):
            return extent
        buffer = np.empty(extent.n_bytes, dtype=np.uint8)
        _transfer(os.preadv, extent.file, buffer, extent.offset)
        return torch.from_numpy(buffer).view(extent.dtype).reshape(extent.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._extents)

    def __len__(self) -> int:
        return len(self._extents)

    def _put(self, name: str, tensor: Tensor, like: Tensors) -> _Extent | Tensor | None:
        earlier = like.get(name)
        if isinstance(like, TensorsOnDisk) and earlier is not None and same_bits(earlier, tensor):
            return like._extents[name]
        if tensor.nbytes <= SMALL_BYTES:
            return tensor.clone()
        try:
            return self._write(tensor)
        except OSError:  # a full disk: memory may still have room
            return tensor.clone()

    def _write(self, tensor: Tensor) -> _Extent:
        if self._file is None:
            self._file = _File()
        content = _bytes_of(tensor)
        extent = _Extent(self._file, self._end, content.nbytes, tensor.dtype, tensor.shape)
        _transfer(os.pwritev, self._file, content, self._end)
        self._end += content.nbytes
        return extent


def _transfer(call: Callable[..., int], file: _File, array: Any, offset: int) -> None:
    """Reads or writes all of `array` at `offset`: a model that forks shares the file's position with its copy."""
    rest, fd = memoryview(array), file.open.fileno()
    while rest.nbytes:
        n_bytes = call(fd, [rest], offset)
        if not n_bytes:
            raise OSError("A file of tensors ended before the last one.")
        rest, offset = rest[n_bytes:], offset + n_bytes


def _bytes_of(tensor: Tensor) -> Any:
    """The bytes of a dense tensor as a numpy array."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def fingerprint(tensor: Tensor) -> bytes:
    """Hash of a tensor's bytes, 32 bytes long."""
    return hashlib.blake2b(_bytes_of(dense(tensor)), digest_size=32).digest()
