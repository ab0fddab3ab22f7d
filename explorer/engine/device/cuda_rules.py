"""A step without data, played as CUDA would run it: the operators that torch replaces on a GPU, by torch's own rules.

The play runs on fake CPU tensors. torch's dispatcher takes other implementations of an operator while the block lasts:
1. autocast casts by CUDA's lists, which differ from the CPU's (aten/src/ATen/autocast_mode.h);
2. dropout is one operator that keeps a mask of one byte an element (`fused dropout`, ATen/native/Dropout.cpp);
3. attention takes the kernel that torch takes on the card: what each keeps for backward differs.

The implementations are those of the whole process: a play for a card belongs in a process of its own.

The order of attention's kernels, each with its conditions (sdp_utils.cpp and attention.cpp of torch 2.13):
a. cuDNN's on cards of capability 9 and 10, whose wheels bring cuDNN 9.15.1 or later since torch 2.11;
b. flash, in half precision without a mask;
c. the memory-efficient kernel, with rows that the card's matrix units can load, without grouped queries;
d. plain operators.
All but the last keep their log-sum-exp in float32. What their backward holds while it runs is in kernel_memory.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

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
LOWER = _words("""
addmv addr mv einsum chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
""")
"""Operators that autocast runs in half precision on CUDA and leaves alone on the CPU."""
LOWER_ON_BOTH = _words("""
conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input _convolution.deprecated
prelu addmm matmul mm linalg_vecdot linear addbmm baddbmm bmm scaled_dot_product_attention
""")
"""Operators that autocast runs in half precision on both."""
PROMOTED = _words("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
"""Operators that autocast runs on inputs cast to the widest type among them."""
LEFT_TO_THE_CPU = LOWER_ON_BOTH | _words(
    "conv1d.padding conv2d.padding conv3d.padding _native_multi_head_attention mkldnn_rnn_layer index_copy"
)
"""Operators whose rule of the CPU's autocast stays in force."""
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
Kernel = Callable[..., object]
Casts = dict[int, tuple[Tensor, Tensor]]
"""Parameters and their copies in half precision, by the parameter's id: autocast makes each copy once."""


@contextmanager
def cuda_rules(capability: str = "", version: str = "") -> Iterator[None]:
    """Operators inside follow the rules of a card of that compute capability (`9.0`) under that version of torch.

    Empty: of 8.0, and of the newest version that is known.

    Not for use in a process that runs anything else meanwhile.
    """
    library = torch.library.Library("aten", "IMPL")  # noqa: TOR901
    casts: Casts = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that an operator is replaced
        target = _Target(tuple(map(int, (capability or "8.0").split("."))), drops_by_sixteenths=version != "2.11")
        rules = list(_rules(target, casts))
        names = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
        casts_of_cpu = {name.removeprefix("aten::") for name in names}
        for name in casts_of_cpu - LEFT_TO_THE_CPU - {name for name, *_ in rules}:
            library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")
        for name, kernel, key in rules:
            library.impl(name, kernel, key)
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        """autocast's exit calls this by its name in torch."""
        casts.clear()
        clear()

    torch.clear_autocast_cache = clear_both
    try:
        yield
    finally:
        torch.clear_autocast_cache = clear
        library._destroy()


def _rules(target: _Target, casts: Casts) -> Iterator[tuple[str, Kernel, str]]:
    """(operator, implementation, dispatch key) of each rule."""
    for name in FLOAT32:
        yield name, _on_cast(operator(name), lambda _: Tensor.float), "AutocastCPU"
    for name in FLOAT32_RESULT:
        yield name, _with_float32_result(operator(name)), "AutocastCPU"
    for name in LOWER:
        yield name, _on_cast(operator(name), lambda _: partial(_lowered, casts)), "AutocastCPU"
    for name in PROMOTED:
        yield name, _on_cast(operator(name), _promoting), "AutocastCPU"
    yield "binary_cross_entropy", _refuse_binary_cross_entropy, "AutocastCPU"
    yield "dropout", _dropout, "AutogradCPU"
    yield "scaled_dot_product_attention", partial(attention, target), "AutogradCPU"


def operator(name: str) -> object:
    """`pow.Tensor_Scalar`: the overload of aten; without a dot, the default."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _is_cast(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.device.type == "cpu"
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _on_cast(function: Any, casting: Callable[[list[object]], Callable[[Tensor], Tensor]]) -> Kernel:
    """`function` on cast tensors. `casting` says how tensors are cast, given all arguments.

    Tensors of a list are cast in their order, arguments from the last to the first: C++ leaves the order of arguments
    open, and torch's compiler takes the last first. The order shows in the addresses.
    """

    def kernel(*arguments: object, **options: object) -> object:
        cast_one = casting([*arguments, *options.values()])

        def cast(value: Any) -> object:
            if isinstance(value, list | tuple):
                return type(value)(map(cast, value))
            return cast_one(value) if _is_cast(value) else value

        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            named = {name: cast(value) for name, value in reversed(options.items())}
            return function(*reversed([cast(value) for value in reversed(arguments)]), **named)

    return kernel


def _lowered(casts: Casts, tensor: Tensor) -> Tensor:
    """`tensor` in half precision. Copies of parameters stay until autocast ends, as `cached_cast` keeps them."""
    dtype = torch.get_autocast_dtype("cpu")
    is_parameter = tensor.requires_grad and tensor.is_leaf and tensor.dtype == torch.float32 and not tensor._is_view()
    if not (is_parameter and torch.is_autocast_cache_enabled()):
        return tensor.to(dtype)
    if id(tensor) not in casts:
        casts[id(tensor)] = tensor, tensor.to(dtype)
    return casts[id(tensor)][1]


def _promoting(arguments: list[object]) -> Callable[[Tensor], Tensor]:
    leaves = (leaf for value in arguments for leaf in (value if isinstance(value, list | tuple) else (value,)))
    is_float32 = any(leaf.dtype == torch.float32 for leaf in leaves if _is_cast(leaf))
    dtype = torch.float32 if is_float32 else torch.get_autocast_dtype("cpu")
    return lambda tensor: tensor.to(dtype)


def _refuse_binary_cross_entropy(*_: object, **__: object) -> object:
    raise RuntimeError("binary_cross_entropy is refused under autocast on CUDA: take binary_cross_entropy_with_logits")


def _with_float32_result(function: Any) -> Kernel:
    names = [argument.name for argument in function._schema.arguments]

    def kernel(*arguments: object, **options: object) -> object:
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
HALF = (torch.float16, torch.bfloat16)
MOST_CUDNN_HEAD: dict[tuple[int, ...], int] = {(9, 0): 256}
"""By compute capability, 128 on others. Measured on imaginary cards under torch 2.11 and 2.13."""
MOST_FLASH_HEAD = 256
MASK_GRAIN = 8
"""Elements to which the memory-efficient kernel pads the rows of a mask."""


class _Target(NamedTuple):
    """What decides the kernel of an attention."""

    capability: tuple[int, ...]
    drops_by_sixteenths: bool
    """Whether cuDNN takes chances of dropout that are multiples of 1/16 only: torch 2.11 asks it for any."""


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


def attention(target: _Target, *arguments: Any, **options: Any) -> Tensor:
    """`scaled_dot_product_attention` on such a card; the dispatcher leaves defaults out."""
    capability = target.capability
    call = _Call(**dict(zip(ATTENTION, arguments)), **options)
    if _is_dense(call):
        if _is_for_cudnn(call, target):
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


def _is_for_cudnn(call: _Call, target: _Target) -> bool:
    capability = target.capability
    heads = (call.head, call.value.shape[-1])
    return (
        capability[0] in (9, 10)
        and call.is_half
        and all(head % 8 == 0 and head <= MOST_CUDNN_HEAD.get(capability, 128) for head in heads)
        and call.key.shape[2] != 1
        and not (target.drops_by_sixteenths and call.dropout_p * 16 % 1)
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
    has_matrix_units = capability >= (8, 0) or (capability >= (7, 0) and call.is_half)
    grain = (8 if call.is_half else 4) if has_matrix_units else 1  # `minimum_gemm_alignment`: elements of a row
    return (
        call.query.dtype in types
        and call.has_equal_heads
        and call.head == call.key.shape[-1]
        and call.head % grain == call.value.shape[-1] % grain == 0
    )


def _cudnn(call: _Call) -> Tensor:
    output: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *call.tensors, _added(call), call.trains, call.dropout_p, call.is_causal, False, scale=call.scale
    )[0]
    return output


def _flash(call: _Call) -> Tensor:
    scale = call.head**-0.5 if call.scale is None else call.scale
    padded = [_padded(tensor) for tensor in call.tensors]
    output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        *padded, call.dropout_p, call.is_causal, False, scale=scale
    )[0]
    return output[..., : call.head] if output.shape[-1] != call.head else output


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


def _padded(tensor: Tensor) -> Tensor:
    """The last dimension filled up to a multiple of 8."""
    short = -tensor.shape[-1] % 8
    return torch.nn.functional.pad(tensor, (0, short)) if short else tensor
