"""Scratch of CUDA's reductions: memory that a kernel takes while it runs and returns before it ends.

A reduction of many elements to few results is divided among blocks of threads. Each block leaves its part in a buffer,
and a counter for each result says which block is the last and adds them up. The bytes follow from shape, strides and
the card's multiprocessors. `tests/golden/imaginary` holds the rule against torch's own code, by version of torch.

Source: setReduceConfig and gpu_reduce_kernel in ATen/native/cuda/Reduce.cuh of torch 2.11 to 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, prod

from explorer.plan.card.torch_rules import UNKNOWN_CAPABILITY
from explorer.record.card import Card

WARP = 32
MOST_THREADS = 512
VECTOR = 4
"""Elements that one load of a thread takes."""
LEAST_VALUES, MOST_VALUES = 16, 256
"""Elements that one thread should add at least and at most."""
INDEX_BYTES = 2**31
"""A tensor that ends beyond this offset is reduced in halves, one after the other."""
COUNTER_BYTES = 4
HALF_BYTES = 2
RESIDENT_THREADS = {"7.5": 1024, "8.6": 1536, "8.7": 1536, "8.9": 1536, "11.0": 1536, "12.0": 1536, "12.1": 1536}
"""Threads that a multiprocessor holds, by compute capability; 2,048 on all others. Source: CUDA programming guide."""

REDUCTIONS = frozenset({
    "sum", "mean", "nansum", "linalg_vector_norm", "amax", "amin", "max", "min", "argmax", "argmin", "std", "var",
    "std_mean", "var_mean", "any", "all", "mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss",
    "binary_cross_entropy",
})  # fmt: skip
"""Operators that take such scratch."""


@dataclass(frozen=True)
class Reduction:
    """A tensor, and the dimensions over which it is reduced."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    reduced: frozenset[int]
    n_bytes: int
    """Of an element."""
    part_bytes: int
    """Of what a block leaves for one result: the accumulator, which may hold an index or moments too."""


@dataclass(frozen=True)
class _Dimension:
    size: int
    stride: int
    result_stride: int
    """0: the dimension is reduced."""


@dataclass(frozen=True)
class _Layout:
    """Dimensions as torch's iterator has them, and the reach of a block of threads over them."""

    dimensions: tuple[_Dimension, ...]
    inputs: int
    """Elements that become one result."""
    results: int

    @property
    def n_reduced(self) -> int:
        return sum(dimension.result_stride == 0 for dimension in self.dimensions)

    @property
    def is_along_memory(self) -> bool:
        """Whether neighbours in memory are added to each other."""
        n_reduced = self.n_reduced
        if n_reduced == len(self.dimensions):
            return True
        return n_reduced > 0 and self.dimensions[0].stride < self.dimensions[n_reduced].stride

    @property
    def first(self) -> _Dimension | None:
        """The dimension along which a block lies; None: a single element."""
        if not self.dimensions:
            return None
        return self.dimensions[0 if self.is_along_memory else self.n_reduced]


def reduction_scratch(reduction: Reduction, card: Card) -> tuple[tuple[int, ...], ...]:
    """Bytes of the buffers of each part of the reduction, one part after the other; empty: none is taken.

    A part has a buffer and its counters. In half precision, parts also add to results in full precision.
    """
    if prod(reduction.shape) == 0 or card.multiprocessors is None:
        return ()
    n_parts, whole = 1, reduction
    while (half := _half(reduction)) is not None:
        reduction, n_parts = half, 2 * n_parts
    scratch = _scratch(_layout(reduction), reduction.part_bytes, card)
    if n_parts > 1 and reduction.n_bytes == HALF_BYTES:
        scratch = (_layout(whole).results * reduction.part_bytes, *scratch)
    return (scratch,) * n_parts if scratch else ()


def _half(reduction: Reduction) -> Reduction | None:
    """Half of a tensor that is too large for 32-bit offsets, cut where it reaches furthest; None: it is not."""
    reach = [(size - 1) * stride for size, stride in zip(reduction.shape, reduction.strides)]
    if (1 + sum(reach)) * reduction.n_bytes <= INDEX_BYTES:
        return None
    cut, shape = reach.index(max(reach)), list(reduction.shape)
    shape[cut] = -(-shape[cut] // 2)
    return replace(reduction, shape=tuple(shape))


def _layout(reduction: Reduction) -> _Layout:
    """Reduced dimensions first, each kind from the nearest in memory outwards; neighbours that follow on are one."""
    result_stride, dimensions = 1, []
    for at in reversed(range(len(reduction.shape))):
        size, is_reduced = reduction.shape[at], at in reduction.reduced
        if size > 1:
            dimensions.append(_Dimension(size, reduction.strides[at], 0 if is_reduced else result_stride))
        result_stride *= 1 if is_reduced else size
    dimensions.sort(key=lambda dimension: (dimension.result_stride > 0, dimension.stride))
    merged: list[_Dimension] = []
    for dimension in dimensions:
        if merged and _follows(merged[-1], dimension):
            merged[-1] = replace(merged[-1], size=merged[-1].size * dimension.size)
        else:
            merged.append(dimension)
    return _Layout(tuple(merged), inputs=prod(reduction.shape) // result_stride, results=result_stride)


def _follows(inner: _Dimension, outer: _Dimension) -> bool:
    is_same_kind = (inner.result_stride == 0) == (outer.result_stride == 0)
    is_dense = inner.stride * inner.size == outer.stride
    return is_same_kind and is_dense and inner.result_stride * inner.size == outer.result_stride


def _scratch(layout: _Layout, part_bytes: int, card: Card) -> tuple[int, ...]:
    """Buffer and counters. The block of threads is shaped first; then the blocks that share a result are counted."""
    along, vector = layout.is_along_memory, 1
    wide, high = (layout.inputs, layout.results) if along else (layout.results, layout.inputs)
    first = layout.first
    if first is not None and first.stride == 1:
        if not along:
            vector = _result_vector(layout)
            wide //= vector
        elif len(layout.dimensions) == 1:  # torch does so from 128 elements on; fewer take no scratch
            wide //= VECTOR
    width, height = _block(wide, high, MOST_THREADS // vector)
    input_step, result_step = (width, 1) if along else (1, width)
    values = -(-layout.inputs // input_step)
    if values < min(height * LEAST_VALUES, MOST_VALUES):
        return ()  # each row of threads has a result of its own
    input_step *= height
    values = -(-layout.inputs // input_step)
    grid = -(-(layout.results // vector) // result_step)
    target = (card.multiprocessors or 0) * (resident_threads(card) // (width * height))
    if values < MOST_VALUES or grid > target:
        return ()
    blocks = max(min(-(-target // grid), -(-values // LEAST_VALUES)), -(-values // MOST_VALUES))
    if blocks <= 1:
        return ()
    buffer = part_bytes * layout.results * blocks
    return buffer if along else buffer * width * vector, COUNTER_BYTES * grid


def resident_threads(card: Card) -> int:
    """Threads that a multiprocessor of the card holds."""
    return RESIDENT_THREADS.get(card.capability or UNKNOWN_CAPABILITY, 2048)


def _result_vector(layout: _Layout) -> int:
    """Neighbouring results that a thread works on: 4, 2 or 1, as the sizes and strides divide."""
    at = layout.n_reduced
    lengths = [layout.dimensions[at].size]
    lengths += [dimension.stride for number, dimension in enumerate(layout.dimensions) if number != at]
    return gcd(VECTOR, *lengths)


def _block(wide: int, high: int, most: int) -> tuple[int, int]:
    """Width and height of a block of at most `most` threads, powers of two."""
    widest, highest = (min(most, _power_below(size)) for size in (wide, high))
    height = min(highest, most // min(widest, WARP))
    return min(widest, most // height), height


def _power_below(size: int) -> int:
    return 1 << (max(size, 1).bit_length() - 1)


LITTLE_SHARED_MEMORY = {"8.6", "8.9", "12.0", "12.1"}


def attention_tile(card: Card, head: int, dropout_p: float, *, is_half: bool) -> tuple[int, int, bool]:
    """Of the memory-efficient backward: queries and columns of a block of threads, whether it sums keys' gradients too.

    Torch takes the first variant whose shared memory a multiprocessor has. Measured by `benchmarks/imaginary`.
    """
    capability = card.capability or UNKNOWN_CAPABILITY
    has_little = capability in LITTLE_SHARED_MEMORY
    if head <= 64 or (not is_half and (has_little or capability == "7.5")):
        return 64, 64, False
    if head > 128 or not is_half or capability == "7.5":
        return 128, 64, is_half and head > 128
    if not has_little:
        return 128, 128, False
    has_room = head <= 96 and not dropout_p and capability[0] == "8"
    return (128, 64, False) if has_room else (64, 64, True)
