"""Scaled dot-product attention by the kernel that torch takes on a card: what each keeps for backward differs.

The order, each kernel with its conditions (sdp_utils.cpp and attention.cpp of
torch 2.13, in ATen/native/transformers):
1. cuDNN's on cards of capability 9 and 10, whose wheels bring cuDNN 9.15.1 or later since torch 2.11;
2. flash, in half precision without a mask;
3. the memory-efficient kernel, with rows that the card's matrix units can load, without grouped queries;
4. plain operators.
All but the last keep their log-sum-exp in float32. Flash's backward also holds sums in float32 while it runs
(`mha_bwd` of flash_api.cpp). cuDNN's is not public, and the efficient one's depends on the variant of the kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
HALF = (torch.float16, torch.bfloat16)
MOST_CUDNN_HEAD = 128
MOST_FLASH_HEAD = 256
FLASH_ROWS = 128
"""Rows of a query to which flash's backward pads its sums."""
MASK_GRAIN = 8
"""Elements to which the memory-efficient kernel pads the rows of a mask."""


class _Call(NamedTuple):
    """The arguments of one attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def is_half(self) -> bool:
        return self.query.dtype in HALF

    @property
    def head(self) -> int:
        return self.query.shape[-1]

    @property
    def trains(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)

    @property
    def has_equal_heads(self) -> bool:
        return self.query.shape[1] == self.key.shape[1] == self.value.shape[1]


def attention(capability: tuple[int, ...], *arguments: Any, **options: Any) -> Tensor:
    """`scaled_dot_product_attention` on a card of that compute capability; the dispatcher leaves defaults out."""
    call = _Call(**dict(zip(ATTENTION, arguments)), **options)
    if _is_dense(call):
        if _is_for_cudnn(call, capability):
            return _cudnn(call)
        if _is_for_flash(call, capability):
            return _flash(call)
        if _is_for_efficient(call, capability):
            return _efficient(call)
    math = torch.ops.aten._scaled_dot_product_attention_math
    rest = {"scale": call.scale, "enable_gqa": call.enable_gqa}
    plain: Tensor = math(*call.tensors, _added(call), call.dropout_p, call.is_causal, **rest)[0]
    return plain


def _is_dense(call: _Call) -> bool:
    """Whether shapes and strides suit the fused kernels: four dimensions, equal batches, heads that divide."""
    query, key, value = call.tensors
    return (
        all(tensor.dim() == 4 and tensor.stride(-1) == 1 and tensor.numel() for tensor in call.tensors)
        and query.shape[0] == key.shape[0] == value.shape[0]
        and (call.has_equal_heads or (call.enable_gqa and query.shape[1] % key.shape[1] == 0))
    )


def _is_for_cudnn(call: _Call, capability: tuple[int, ...]) -> bool:
    heads = (call.head, call.value.shape[-1])
    return (
        capability[0] in (9, 10)
        and call.is_half
        and all(head % 8 == 0 and head <= MOST_CUDNN_HEAD for head in heads)
        and call.key.shape[2] != 1
        and not call.dropout_p * 16 % 1
        and not (call.dropout_p and call.query.shape[2] == 1)
    )


def _is_for_flash(call: _Call, capability: tuple[int, ...]) -> bool:
    # With 8.6, 8.9 and 12.x the backward of wide heads does not fit the memory of a multiprocessor.
    is_narrow = call.head <= 192 or (call.head > 224 and not call.dropout_p)
    return (
        capability >= (8, 0)
        and call.is_half
        and call.attn_mask is None
        and call.head == call.key.shape[-1] == call.value.shape[-1] <= MOST_FLASH_HEAD
        and not (call.is_causal and call.query.shape[2] != call.key.shape[2])
        and (is_narrow or not call.trains or not ((8, 6) <= capability <= (8, 9) or capability[0] == 12))
    )


def _is_for_efficient(call: _Call, capability: tuple[int, ...]) -> bool:
    types = (torch.float32, *HALF) if capability >= (8, 0) else (torch.float32, torch.float16)
    grain = _aligned_elements(call.is_half, capability)
    return (
        call.query.dtype in types
        and call.has_equal_heads
        and call.head == call.key.shape[-1]
        and call.head % grain == call.value.shape[-1] % grain == 0
    )


def _aligned_elements(is_half: bool, capability: tuple[int, ...]) -> int:
    """Elements that a row has to be a multiple of (`minimum_gemm_alignment`)."""
    has_matrix_units = capability >= (8, 0) or (capability >= (7, 0) and is_half)
    return (8 if is_half else 4) if has_matrix_units else 1


def _cudnn(call: _Call) -> Tensor:
    output: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *call.tensors, _added(call), call.trains, call.dropout_p, call.is_causal, False, scale=call.scale
    )[0]
    return output


def _flash(call: _Call) -> Tensor:
    scale = call.head**-0.5 if call.scale is None else call.scale
    padded = [_padded(tensor, 8) for tensor in call.tensors]
    output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        *padded, call.dropout_p, call.is_causal, False, scale=scale
    )[0]
    return output[..., : call.head] if output.shape[-1] != call.head else output


def flash_backward(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`_scaled_dot_product_flash_attention_backward` with the tensors that it makes for itself, in its order."""
    gradient, query, key = arguments[:3]
    with torch._C._AutoDispatchBelowAutograd():
        results: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *arguments, **options
        )
        n_batch, n_heads, length, head = query.shape
        rows, wide = -(-length // FLASH_ROWS) * FLASH_ROWS, -(-head // 32) * 32 if head <= 128 else -(-head // 64) * 64
        sums = [torch.empty(n_batch, n_heads, rows), torch.empty(n_batch, rows, n_heads, wide)]
        if key.shape[1] != n_heads:  # the gradients of shared heads are summed from one of each
            sums += [torch.empty(n_batch, key.shape[2], n_heads, head, dtype=query.dtype) for _ in ("key", "value")]
        if not gradient.transpose(1, 2).is_contiguous():
            sums.append(gradient.transpose(1, 2).contiguous())
    return results


def _efficient(call: _Call) -> Tensor:
    mask = _added(call)
    if mask is not None:
        if mask.stride(-1) != 1 or any(stride % MASK_GRAIN for stride in mask.stride()[:-1]):
            n = mask.shape[-1]
            mask = torch.nn.functional.pad(mask, (0, MASK_GRAIN - n % MASK_GRAIN))[..., :n]
        mask = mask.expand(*call.query.shape[:-1], call.key.shape[-2])
    output: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        *call.tensors, mask, call.trains, call.dropout_p, call.is_causal, scale=call.scale
    )[0]
    return output


def _added(call: _Call) -> Tensor | None:
    """The mask as a tensor that is added to the scores."""
    mask = call.attn_mask
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=call.query.dtype))


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    """The last dimension filled up to a multiple."""
    short = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, short)) if short else tensor
