"""FLOPs counted from shapes by torch's formulas, plus formulas for operators that torch lacks or counts wrongly.

Torch counts fused attention on CUDA only, and never counts fused recurrent layers and grouped products. With torch's
formulas alone a model would cost less on one device than on another. For a convolution's backward torch counts the
gradient of the weight as if every output channel met every input channel: `groups` times too many.
A multiply-add is two FLOPs; element-wise operators count as nothing (torch.utils.flop_counter). FLOPs without an
operator that has arithmetic like a matrix product and no formula are too low, so figures name such operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import conv_flop_count, flop_registry

aten = torch.ops.aten

Formula = Callable[..., int]


def formula(operator: object) -> Formula | None:
    """The formula of an operator, called with the operator's arguments and `out_val`; None if it counts as nothing.

    `operator` is the argument of a dispatch mode: an OpOverload, or a higher-order operator.
    """
    packet = functional(getattr(operator, "_overloadpacket", operator))
    return OURS.get(packet) or _of_shapes(flop_registry.get(packet))


def functional(packet: object) -> object:
    """The functional form of an in-place operator, with equal arguments: `aten.addmm` for `aten.addmm_`."""
    name = str(getattr(packet, "__name__", ""))
    return getattr(aten, name[:-1], packet) if name.endswith("_") and packet is getattr(aten, name, None) else packet


def _of_shapes(torchs: Formula | None) -> Formula | None:
    """Torch's formula, evaluated once for each set of shapes: its walk through all arguments costs 30 us a call."""
    inner = getattr(torchs, "__wrapped__", None)
    if inner is None:
        return torchs

    @lru_cache(maxsize=4096)
    def remembered(args: Any, out_shape: Any, kwargs: Any) -> int:
        return int(inner(*args, out_shape=out_shape, **dict(kwargs)))

    def count(*args: object, out_val: object = None, **kwargs: object) -> int:
        return remembered(_shapes(args), _shapes(out_val), _shapes(tuple(kwargs.items())))

    return count


def _shapes(value: object) -> object:
    """The value with shapes in place of tensors and tuples in place of lists."""
    if isinstance(value, torch.Tensor):
        return value.shape
    return tuple(_shapes(part) for part in value) if isinstance(value, (tuple, list)) else value


def _product(_: object, left: Any, right: Any, *__: object, out_val: object = None, **___: object) -> int:
    """FLOPs of a product that is added: each element of `left` meets each column of `right`."""
    return 2 * left.numel() * (right.shape[-1] if right.dim() > 1 else 1)


def _of_matrices(left: Any, right: Any, *_: object, out_val: object = None, **__: object) -> int:
    return 2 * int(left.numel()) * int(right.shape[-1])


def _of_vectors(left: Any, right: object, *, out_val: object = None) -> int:
    """FLOPs of mv, dot and vdot: each element of `left` once."""
    return 2 * int(left.numel())


def _of_each(left: Sequence[Any], right: Sequence[Any], *_: object, out_val: object = None, **__: object) -> int:
    return sum(2 * first.numel() * int(second.shape[-1]) for first, second in zip(left, right))


def _grouped(left: Any, right: Any, *_: object, out_val: Any = None, **__: object) -> int:
    """FLOPs of a grouped product. Groups split the rows of `left`, the columns of `right` or the shared dimension."""
    if left.dim() == 2 or right.dim() == 3:
        return _of_matrices(left, right)
    return int(2 * out_val.numel() * left.shape[-1])


def _trilinear(*args: Any, out_val: object = None) -> int:
    """FLOPs of two products; the first sums over dimensions that the third factor lacks (Bilinear, Linear.cpp)."""
    factors, expanded, summed = args[:3], args[3:6], args[6]
    unroll_dim = args[7] if len(args) > 7 else 1
    n_dims = factors[0].dim() + len(expanded[0])
    sizes = [_with_ones(factor.shape, places, n_dims) for factor, places in zip(factors, expanded)]
    full = [max(column) for column in zip(*sizes)]
    first = [full[i] if i == unroll_dim else max(sizes[0][i], sizes[1][i]) for i in range(n_dims)]
    gone = [i for i in summed if i in expanded[2] and i != unroll_dim]
    return 2 * prod(first) + 2 * prod(size for i, size in enumerate(full) if i not in gone)


def _with_ones(shape: Sequence[int], places: Sequence[int], n_dims: int) -> list[int]:
    rest = iter(shape)
    return [1 if i in places else next(rest) for i in range(n_dims)]


def _euclidean(left: Any, right: Any, *_: object, out_val: object = None) -> int:
    """FLOPs of |a - b|² = |a|² - 2ab + |b|², as one product of vectors with two extra elements."""
    return int(2 * left.numel() // left.shape[-1] * (left.shape[-1] + 2) * right.shape[-2])


def _cdist(left: Any, right: Any, p: float, mode: int | None = None, *, out_val: object = None) -> int:
    """FLOPs of cdist: element-wise up to 25 vectors a side, a product above (torch.cdist); modes 1, 2 override."""
    is_product = p == 2 and (mode == 1 or (not mode and max(left.shape[-2], right.shape[-2]) > 25))
    return _euclidean(left, right) if is_product else 0


def _conv_tbc(tokens: object, weight: Any, *_: object, out_val: Any = None, **__: object) -> int:
    return int(2 * out_val.numel() * weight.shape[0] * weight.shape[1])


def _convolution_backward(grad: Any, tokens: Any, weight: Any, *args: Any, out_val: Any = None) -> int:
    """FLOPs of backward: the gradients of input and weight each take as many multiply-adds as forward."""
    transposed, needed = args[-4], args[-1]
    forward = conv_flop_count(list(tokens.shape), list(weight.shape), list(grad.shape), transposed=transposed)
    return int(forward * sum(needed[:2]))


def _recurrent(tokens: Any, *weights: Any, backward: bool = False) -> int:
    """FLOPs of a recurrent layer: each token meets each weight matrix once, twice in backward (input and weight)."""
    n_tokens = tokens.numel() // tokens.shape[-1]
    n_weights = sum(weight.numel() for weight in weights if weight.dim() == 2)
    return 2 * n_tokens * n_weights * (2 if backward else 1)


def _mkldnn_rnn(tokens: object, *args: object, out_val: object = None, backward: bool = False, **_: object) -> int:
    return _recurrent(tokens, *args[:4], backward=backward)


def _cudnn_rnn(
    tokens: object, weights: Any, *_: Any, out_val: object = None, backward: bool = False, **__: object
) -> int:
    return _recurrent(tokens, *weights, backward=backward)


_BY_NAMES: dict[str, Formula] = {
    "convolution_backward convolution_backward_overrideable": _convolution_backward,
    "mv dot vdot": _of_vectors,
    "addmm addmv addbmm baddbmm": _product,  # torch's formulas of the common products take 9 us a call
    "mm bmm": _of_matrices,
    "_foreach_mm": _of_each,
    "_int_mm": _of_matrices,
    "_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2": _grouped,
    "_trilinear": _trilinear,
    "_euclidean_dist": _euclidean,
    "_cdist_forward": _cdist,
    "conv_tbc": _conv_tbc,
    "_scaled_dot_product_flash_attention_for_cpu": flop_registry[aten._scaled_dot_product_flash_attention],
    "_scaled_dot_product_flash_attention_for_cpu_backward": flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
    "mkldnn_rnn_layer": _mkldnn_rnn,
    "mkldnn_rnn_layer_backward": partial(_mkldnn_rnn, backward=True),
    "_cudnn_rnn": _cudnn_rnn,
    "_cudnn_rnn_backward": partial(_cudnn_rnn, backward=True),
}
OURS: dict[object, Formula] = {
    getattr(aten, name): count for names, count in _BY_NAMES.items() for name in names.split() if hasattr(aten, name)
}
"""Formulas of the operators that this torch has."""
NAMES = """
_cholesky_solve_helper _linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet _linalg_solve_ex _linalg_svd cholesky
cholesky_inverse geqrf linalg_cholesky_ex linalg_eig linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex
linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_qr
linalg_solve_triangular ormqr triangular_solve
_fft_c2c _fft_c2r _fft_r2c
_cslt_sparse_mm _sparse_addmm _sparse_mm _sparse_mm_reduce_impl _sparse_mm_reduce_impl_backward
_sparse_semi_structured_addmm _sparse_semi_structured_linear _sparse_semi_structured_mm _sparse_sparse_matmul _spsolve
hspmm smm sparse_sampled_addmm sspaddmm
_dyn_quant_matmul_4bit _mixed_dtypes_linear _scaled_mm_v2 _weight_int4pack_mm _weight_int4pack_mm_for_cpu
_weight_int8pack_mm linear matmul mkldnn_linear mkldnn_linear_backward
_native_multi_head_attention _scaled_dot_product_fused_attention_overrideable
_scaled_dot_product_fused_attention_overrideable_backward _transformer_encoder_layer_fwd miopen_rnn miopen_rnn_backward
"""
MATRIX_KIND = frozenset(NAMES.split())
"""Operators of torch: decompositions, Fourier transforms, sparse and quantized products, fused layers."""
KNOWN_LIBRARIES = frozenset(("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "fsdp", "rngprims"))
"""Namespaces whose operators do no such arithmetic, except for MATRIX_KIND."""


def lacks_formula(operator: object) -> bool:
    """Whether FLOPs may be too low because of `operator`: torch's by name, all operators of unknown libraries."""
    if formula(operator) is not None:
        return False
    name = str(getattr(functional(getattr(operator, "_overloadpacket", operator)), "__name__", operator))
    library = getattr(operator, "namespace", "aten")
    if library == "higher_order":
        return name.startswith("triton_kernel_wrapper")
    return name in MATRIX_KIND or library not in KNOWN_LIBRARIES
