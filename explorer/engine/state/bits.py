"""Bytes of a tensor of any kind, and the comparison of two tensors bit by bit.

    sparse ─▶ indices, values    quantised ─▶ integers, scales    nested ─▶ values, sizes    MKLDNN ─▶ its dense copy
    wrapper subclass (DTensor: its local shard), functorch's wrapper ─▶ the tensors inside
    meta, fake, freed, not yet made, on an imaginary card ─▶ none
    the zero of forward differentiation, which has no memory ─▶ zeros

Tensors without bytes are compared by form alone. A kernel that does not know a kind of tensor may end the process, so
each kind has its own way to its parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch, _len_torch_dispatch_stack  # type: ignore[attr-defined]
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

_NOT_MADE = (UninitializedBuffer, UninitializedParameter)
_PLAIN = (Tensor, torch.nn.Parameter)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type of each element size, in which bits are compared and counted."""
_BY_ROWS = Tensor.crow_indices, Tensor.col_indices, Tensor.values
_BY_COLUMNS = Tensor.ccol_indices, Tensor.row_indices, Tensor.values
_COMPRESSED = {
    torch.sparse_csr: _BY_ROWS,
    torch.sparse_bsr: _BY_ROWS,
    torch.sparse_csc: _BY_COLUMNS,
    torch.sparse_bsc: _BY_COLUMNS,
    torch.sparse_coo: (Tensor._indices, Tensor._values),
}


def tensor_leaves(tree: object) -> list[Tensor]:
    """Every tensor among the leaves of lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal in shape, type and every bit, NaN payloads and the sign of zero included."""
    if _form(left) != _form(right):
        return False
    lefts, rights = contents(left), contents(right)
    return len(lefts) == len(rights) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.to(a.device)) for a, b in zip(lefts, rights)
    )


def parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors with the bytes of `tensor`, not copied: itself, or the tensors inside a sparse or wrapper tensor.

    A part is strided, quantised, nested or opaque to Python (MKLDNN), and of one memory; a part may have no bytes.
    """
    with _unseen():
        return tuple(_parts(tensor))


def n_bytes(*tensors: Tensor) -> int:
    """Bytes of all parts of all tensors; of a sharded tensor, the bytes in this process."""
    with _unseen():
        pieces = (piece for tensor in tensors for piece in _parts(tensor))
        return sum(piece.untyped_storage().nbytes() if piece.is_quantized else piece.nbytes for piece in pieces)


def storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Storages behind `tensor`, of zero bytes if freed; an empty list if Python has no access to the memory."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided and not _functorch.is_functorch_wrapped_tensor(tensor):
        has_none = tensor.is_meta or tensor._is_zerotensor()
        return [] if has_none else [tensor.untyped_storage()]  # the common case: a recorder asks at every operator
    with _unseen():
        return [storage for part in _parts(tensor) if (storage := _storage(part)) is not None]


def contents(tensor: Tensor) -> tuple[Tensor, ...]:
    """The bits of `tensor` as integer tensors, equal for equal tensors; empty for a tensor without bytes."""
    with _unseen():
        return tuple(bits for part in _parts(tensor) for bits in _contents(part))


def dense(tensor: Tensor) -> Tensor:
    """The value of `tensor` as one plain tensor on the CPU, detached; empty for a tensor without bytes.

    A plain CPU tensor shares its memory with the result. Several parts become one row of float64.
    """
    with _unseen():
        if tensor.layout in _COMPRESSED:
            return _plain(tensor).to_dense().cpu()
        values = [value for part in _parts(tensor) if (value := _dense(part)) is not None]
    if len(values) == 1:
        return values[0]
    rows = [_real(value).flatten().double() for value in values]
    return torch.cat(rows) if rows else torch.empty(0)


@contextmanager
def _unseen() -> Iterator[None]:
    """Hides reads from dispatch modes, subclasses and functorch: a read is no operator of the program."""
    functorch_off = torch._C._DisableFuncTorch()  # type: ignore[attr-defined]
    modes_off = _disable_current_modes() if _len_torch_dispatch_stack() else nullcontext()
    with functorch_off, torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), modes_off:
        yield


def _parts(tensor: Any) -> Iterator[Tensor]:
    if isinstance(tensor, _NOT_MADE):
        return
    if _functorch.is_functorch_wrapped_tensor(tensor):
        yield from _parts(_functorch.get_unwrapped(tensor))
    elif tensor.layout in _COMPRESSED:
        yield from (part(_plain(tensor)) for part in _COMPRESSED[tensor.layout])
    elif type(tensor) in _PLAIN or _has_own_memory(tensor):
        yield _plain(tensor)
    else:
        values = [getattr(tensor, name) for name in _names_inside(tensor)]
        yield from (part for value in values if isinstance(value, Tensor) for part in _parts(value))


def _names_inside(tensor: object) -> list[str]:
    """Attributes of a wrapper that hold its tensors. The cached lengths of a ragged tensor are no content."""
    if hasattr(tensor, "__tensor_flatten__"):
        return [name for name in tensor.__tensor_flatten__()[0] if not name.endswith("_seqlen_tensor")]
    return [name for name, value in sorted(vars(tensor).items()) if isinstance(value, Tensor) and value is not tensor]


def _has_own_memory(tensor: Tensor) -> bool:
    try:
        storage = tensor.untyped_storage()
        return storage.device != tensor.device or storage.data_ptr() >= 0  # a fake tensor's bytes are on "meta"
    except (RuntimeError, NotImplementedError):  # a wrapper; an opaque tensor has no attributes with tensors
        return not _names_inside(tensor)


def _plain(tensor: Tensor) -> Tensor:
    """The tensor without gradient and without its subclass's behaviour, in the same memory."""
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        return tensor.detach()


def _storage(part: Tensor) -> torch.UntypedStorage | None:
    """The storage of a part; None for opaque, meta and fake tensors, which have no memory here."""
    try:
        storage = part.untyped_storage()
        return storage if storage.device.type == part.device.type != "meta" else None
    except (RuntimeError, NotImplementedError):
        return None


def _contents(part: Tensor) -> Iterator[Tensor]:
    if part.layout is not torch.strided:
        yield _as_integers(part.to_dense())
    elif _has_no_bytes(part) or (part.is_cuda and _is_imaginary()):
        return
    elif part.is_quantized or part.is_nested:  # no kernel reads their elements: the whole memory is read
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            yield torch.empty(0, dtype=torch.uint8, device=part.device).set_(part.untyped_storage())
        yield from map(_as_integers, _beside(part))
    else:
        yield _as_integers(part)


def _is_imaginary() -> bool:
    from explorer.engine.imaginary.seen import sees_imaginary_card  # only for CUDA: a training loop loads few modules

    return sees_imaginary_card()


def _beside(part: Any) -> Iterator[Tensor]:
    """Sizes and strides of a nested tensor, or scales and zero points of a quantised tensor."""
    if part.is_nested:
        yield from (part._nested_tensor_size(), part._nested_tensor_strides(), part._nested_tensor_storage_offsets())
    elif part.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        yield torch.tensor([part.q_scale(), part.q_zero_point()], dtype=torch.float64)
    else:
        yield from (part.q_per_channel_scales(), part.q_per_channel_zero_points())


def _dense(part: Tensor) -> Tensor | None:
    if part.layout is not torch.strided:
        return part.to_dense().cpu()
    if _has_no_bytes(part):
        return None
    if part.is_nested:
        return torch.cat([row.flatten() for row in part.unbind()]).cpu()
    if part.is_floating_point() and part.element_size() == 1:  # float8 has no arithmetic, and float32 holds its values
        return part.float().cpu()
    return part.dequantize().cpu() if part.is_quantized else part.cpu()


def _has_no_bytes(part: Tensor) -> bool:
    storage = _storage(part)
    return bool(part.numel()) and (storage is None or not storage.nbytes())


def _as_integers(tensor: Tensor) -> Tensor:
    whole = _real(tensor).contiguous()
    return whole if whole.dtype is torch.bool else whole.view(INTEGERS[whole.element_size()])


def _real(tensor: Tensor) -> Tensor:
    whole = tensor.resolve_conj().resolve_neg()
    return torch.view_as_real(whole) if whole.is_complex() else whole


def _form(tensor: Tensor) -> tuple[object, ...]:
    """Type and shape of a tensor. The shape of a nested tensor is left out: its ragged length is a unique symbol."""
    if isinstance(tensor, _NOT_MADE):
        return type(tensor), tensor.dtype
    if tensor.is_nested:
        return tensor.dtype, tensor.layout, tensor.dim()
    return tensor.dtype, tensor.layout, tensor.is_quantized, tuple(tensor.shape)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one, gathered from all ranks; any other tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def is_sparse_equal(gradient: Tensor, other: Tensor) -> bool:
    """A sparse gradient equals a dense one. SGD adds its repeated rows one by one, so it stays as it is."""
    return gradient.is_sparse and torch.equal(gradient.to_dense(), other.to_dense())


def laid_out_as(parameter: Any, value: Tensor) -> Tensor:
    """`value` sharded over the ranks like `parameter`, or with the rows of a sparse gradient."""
    if parameter.layout is torch.sparse_coo and value.layout is torch.strided:
        return value.sparse_mask(parameter.coalesce())
    if not hasattr(parameter, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, parameter.device_mesh, parameter.placements)
