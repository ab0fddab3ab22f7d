"""A step without data, played as CUDA would run it: the operators that torch replaces on a GPU, by torch's own rules.

The play runs on fake CPU tensors. torch's dispatcher takes other implementations of an operator while the block lasts:
1. autocast casts by CUDA's lists, which differ from the CPU's (aten/src/ATen/autocast_mode.h);
2. dropout is one operator that keeps a mask of one byte an element (`fused dropout`, ATen/native/Dropout.cpp);
3. attention takes the flash kernel for half precision without a mask (ATen/native/transformers/cuda/sdp_utils.cpp).
   Other attention takes the memory-efficient kernel if its rows are multiples of 16 bytes, and plain operators else.
   Both kernels keep their log-sum-exp in float32.

The implementations are those of the whole process: a play for a card belongs in a process of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FLOAT32 = _words("""
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
_upsample_bicubic2d_aa norm.Scalar norm.ScalarOpt_dim
""")
"""Operators that autocast runs on inputs cast to float32."""
FLOAT32_RESULT = _words("""
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
"""Operators that autocast gives float32 as their `dtype`; no input is cast."""
LOWER = _words("addmv addr mv chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
"""Operators that autocast runs in half precision on CUDA and leaves alone on the CPU. The others are cast by both."""
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
MOST_FLASH_HEAD = 256
Kernel = Callable[..., Any]


@contextmanager
def cuda_rules() -> Iterator[None]:
    """Operators inside follow CUDA's rules. Not for use in a process that runs anything else meanwhile."""
    library = torch.library.Library("aten", "IMPL")  # noqa: TOR901
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that an operator is replaced
        for name, kernel, key in _rules():
            library.impl(name, kernel, key)
        for name in _cpu_lists() - FLOAT32 - FLOAT32_RESULT:
            library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")
    try:
        yield
    finally:
        library._destroy()


def _rules() -> Iterator[tuple[str, Kernel, str]]:
    """(operator, implementation, dispatch key) of each rule."""
    for name in FLOAT32:
        yield name, _cast_to(operator(name), lambda: torch.float32), "AutocastCPU"
    for name in FLOAT32_RESULT:
        yield name, _with_float32_result(operator(name)), "AutocastCPU"
    for name in LOWER:
        yield name, _cast_to(operator(name), lambda: torch.get_autocast_dtype("cpu")), "AutocastCPU"
    yield "dropout", _dropout, "AutogradCPU"
    yield "scaled_dot_product_attention", _attention, "AutogradCPU"


def operator(name: str) -> Any:
    """`pow.Tensor_Scalar`: the overload of aten; without a dot, the default."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


LISTED_ON_CUDA = _words("""
conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input _convolution.deprecated prelu addmm matmul mm linalg_vecdot linear addbmm baddbmm bmm
_native_multi_head_attention mkldnn_rnn_layer scaled_dot_product_attention cat stack index_copy
""")
"""Operators on a list of the CPU for which CUDA's autocast does the same."""


def _cpu_lists() -> set[str]:
    """Operators that the CPU's autocast casts to float32 and CUDA's leaves alone."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    return {name.removeprefix("aten::") for name in names} - LISTED_ON_CUDA


def _is_cast(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.device.type == "cpu"
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _cast_to(function: Any, dtype: Callable[[], torch.dtype]) -> Kernel:
    def cast(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(cast, value))
        return value.to(dtype()) if _is_cast(value) else value

    def kernel(*arguments: Any, **options: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return function(*cast(arguments), **{name: cast(value) for name, value in options.items()})

    return kernel


def _with_float32_result(function: Any) -> Kernel:
    names = [argument.name for argument in function._schema.arguments]

    def kernel(*arguments: Any, **options: Any) -> Any:
        values = dict(zip(names, arguments)) | options
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            if _is_cast(arguments[0]) and values.get("dtype") is None:
                at = names.index("dtype")
                return function(*arguments[:at], **(options | {"dtype": torch.float32}))
            return function(*arguments, **options)

    return kernel


def _dropout(tensor: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or tensor.numel() == 0:
        return tensor
    dropped: Tensor = torch.ops.aten.native_dropout(tensor, p, train)[0]
    return dropped


ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _attention(*arguments: Any, **options: Any) -> Tensor:
    """Arguments are those of `scaled_dot_product_attention`; the dispatcher leaves defaults out."""
    values = dict(zip(ATTENTION, arguments)) | options
    query, key, value = values["query"], values["key"], values["value"]
    attn_mask, scale = values.get("attn_mask"), values.get("scale")
    dropout_p, is_causal = values.get("dropout_p", 0.0), values.get("is_causal", False)
    grouped = values.get("enable_gqa", False)
    head = query.shape[-1]
    half = query.dtype in (torch.float16, torch.bfloat16)
    is_flash = half and attn_mask is None and head <= MOST_FLASH_HEAD
    is_aligned = is_flash or head * query.element_size() % 16 == 0
    if query.dim() != 4 or head != value.shape[-1] or query.dtype == torch.float64 or not is_aligned:
        math = torch.ops.aten._scaled_dot_product_attention_math
        plain: Tensor = math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped)[0]
        return plain
    scale = head**-0.5 if scale is None else scale
    if is_flash:
        padded = [_padded(tensor, 8) for tensor in (query, key, value)]
        flash = torch.ops.aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)
        result: Tensor = flash[0]
        return result[..., :head] if result.shape[-1] != head else result
    if grouped and query.shape[-3] != key.shape[-3]:
        n = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(n, -3), value.repeat_interleave(n, -3)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needs_gradient, dropout_p, is_causal, scale=scale
    )
    attended: Tensor = efficient[0]
    return attended


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    """The last dimension filled up to a multiple, as the flash kernel asks for it."""
    short = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, short)) if short else tensor
