"""Operators with arithmetic like a matrix product for which this package has no formula.

FLOPs without these operators are too low, so the figure names the ones that a step called.
"""

from __future__ import annotations

from typing import Any

from explorer.engine.watch.flops import formula, functional

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
KNOWN_LIBRARIES = frozenset(("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "rngprims"))
"""Namespaces whose operators do no such arithmetic, except for MATRIX_KIND."""


def is_uncounted(operator: Any) -> bool:
    """Whether FLOPs may be too low because of `operator`: torch's by name, all operators of unknown libraries."""
    if formula(operator) is not None:
        return False
    name = str(getattr(functional(getattr(operator, "_overloadpacket", operator)), "__name__", operator))
    library = getattr(operator, "namespace", "aten")
    if library == "higher_order":
        return name.startswith("triton_kernel_wrapper")
    return name in MATRIX_KIND or library not in KNOWN_LIBRARIES
