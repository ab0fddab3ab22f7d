"""Common cards by name, any other card by its size, and what CUDA's kernels take on them for themselves.

`total_bytes` is what torch reports. Where a message of torch is the source, it has two decimals of GiB, so the figure
is known to 5 MiB. Drivers differ too: messages on A100 cards of 80 GB name 79.14 to 79.25 GiB.

Workspaces of cuBLAS and the scratch of some kernels follow rules (`torch_rules.py`, `kernel_scratch.py`). An operator
whose kernel takes its results and nothing else is in RESULTS_ALONE. An operator whose kernel takes memory of a known
kind is in UNKNOWN. All others are named as operators without a rule.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from msgspec.structs import replace

from explorer.errors import BadInput, nearest
from explorer.plan.card.allocator_options import parse_options
from explorer.plan.card.kernel_scratch import REDUCTIONS
from explorer.plan.card.torch_rules import parse_torch
from explorer.plan.names import operator_word
from explorer.plan.sizes import mib, parse_bytes
from explorer.record.allocations import Allocations
from explorer.record.base import limits
from explorer.record.card import Card, UnknownMemory

GIB, MIB = 1 << 30, 1 << 20
DRIVER_BYTES = (256 << 20, 800 << 20)
"""Assumed share of driver and context where it is not known. No source: the H200 has 751 MiB, the B200 853 MiB."""

LARGEST_CARD = limits(Card, "total_bytes")[1]

CARDS: dict[str, Card] = {
    # csdiywithme/cs336-assignment2-systems at bb85bbf8: messages of refused requests, torch 2.11. A forward left 15.88
    # of 181,845.88 MiB free. Two optimizers left 55.88 and 197.88 MiB, both of 181,777.88 MiB.
    "b200": Card(
        name="B200",
        total_bytes=182_631 * MIB,
        taken_bytes=int(785.12 * MIB),
        taken_in_backward_bytes=int(853.12 * MIB),
        capability="10.0",
        multiprocessors=148,
    ),
    # vllm-project/vllm, issue 27508
    "h100": Card(name="H100 80GB", total_bytes=int(79.11 * GIB), capability="9.0", multiprocessors=132),
    # tests/golden/h200: total and the share of driver and context, torch 2.11. A convolution takes 16 MiB more.
    "h200": Card(
        name="H200",
        total_bytes=150_109_880_320,
        taken_bytes=718_077_952,
        taken_in_backward_bytes=787_283_968,
        capability="9.0",
        multiprocessors=132,
    ),
    # levihsu/OOTDiffusion, issue 235
    "a100-80gb": Card(name="A100 80GB", total_bytes=int(79.25 * GIB), capability="8.0", multiprocessors=108),
    # threestudio-project/threestudio, issue 402
    "a100-40gb": Card(name="A100 40GB", total_bytes=int(39.56 * GIB), capability="8.0", multiprocessors=108),
    # NVlabs/Eagle, issue 68
    "l40": Card(name="L40", total_bytes=int(44.40 * GIB), capability="8.9", multiprocessors=142),
    # ArcInstitute/evo2, issue 190
    "l4": Card(name="L4", total_bytes=int(22.03 * GIB), capability="8.9", multiprocessors=58),
    # ali-vilab/VGen, issue 104
    "rtx4090": Card(name="RTX 4090", total_bytes=int(23.64 * GIB), capability="8.9", multiprocessors=128),
    # GaoLii/DSP, issue 10
    "rtx3090": Card(name="RTX 3090", total_bytes=int(23.70 * GIB), capability="8.6", multiprocessors=82),
    # Zheng-Chong/CatVTON, issue 133; older drivers left more (14.76 GiB in bupticybee/FastLoRAChat, issue 6)
    "t4": Card(name="T4", total_bytes=int(14.56 * GIB), capability="7.5", multiprocessors=40),
}


def parse_card(text: str, options: str = "", torch: str = "") -> Card:
    """The card named `text`, in any case and with or without spaces, or a card of that size (`24GiB`).

    `options` are its allocator's, `torch` is its version. CUBLAS_WORKSPACE_CONFIG of this process decides its
    workspaces. Raises BadInput for texts that cannot be read, and for a size that driver and context may fill alone.
    """
    parse_options(options)
    return replace(_card_named(text), options=options, torch=parse_torch(torch))


def _card_named(text: str) -> Card:
    if (card := listed_card(text)) is not None:
        return card
    hint = f"Name one of {', '.join(CARDS)}, or the card's memory: 24GiB."
    try:
        n_bytes = parse_bytes(text)
    except BadInput as error:
        why = f"{text[:60]!r} is neither a card that is listed here nor a size."
        raise BadInput(why, hint=nearest(text.lower(), CARDS) or hint) from error
    if n_bytes > LARGEST_CARD:
        raise BadInput(f"No card has {mib(n_bytes)}.", hint=hint)
    if n_bytes <= DRIVER_BYTES[1]:
        driver = mib(DRIVER_BYTES[1])
        raise BadInput(f"No step fits a card of {mib(n_bytes)}: driver and context may take {driver} of it.", hint=hint)
    return _as_set_here(Card(name=f"a card of {mib(n_bytes)}", total_bytes=n_bytes))


def listed_card(text: str) -> Card | None:
    """The card of CARDS that `text` names, in any case and with or without spaces; None for other texts."""
    key = re.sub(r"[\s-]", "", text.lower())
    return next((_as_set_here(card) for name, card in CARDS.items() if name.replace("-", "") == key), None)


def _as_set_here(card: Card) -> Card:
    return replace(card, cublas=os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))


def capacity_bytes(card: Card) -> int:
    """What the allocator can reserve in a training. An unknown share of the driver counts as the largest assumed."""
    return max(0, card.total_bytes - (DRIVER_BYTES[1] if card.driver_bytes is None else card.driver_bytes))


PRODUCTS = re.compile(r"\baten\.(mm|bmm|addmm|baddbmm|addbmm|mv|addmv|dot|linear|matmul)\b")
MOST_NAMES = 6
WITHOUT_RULE = "operators without a rule"
WITHOUT_MEMORY = ("", "prim", "profiler")
"""Libraries of operators that take nothing; empty: no operator."""

UNKNOWN: tuple[tuple[str, str], ...] = (
    (r"(cudnn_|mkldnn_|slow_|thnn_)?_?conv.*|_?convolution.*", "workspaces of cuDNN for convolutions"),
    (r".*(lstm|gru|rnn).*", "workspaces of cuDNN for recurrent layers"),
    (r".*batch_norm.*", "what cuDNN's batch norm keeps for backward"),
    (r"native_layer_norm_backward|_fused_rms_norm_backward", "partial sums of a norm of more than 65,536 rows"),
    (r"logsumexp", "temporaries of logsumexp"),
    (r"bernoulli|normal", "temporaries of random draws"),
    (r"embedding_dense_backward|_?index_put.*|index_add.*|_embedding_bag.*", "sorted indices of a scattered gradient"),
    (r".*cudnn_attention.*", "workspaces of cuDNN for attention"),
    (r"sort|topk|kthvalue|median|mode|_?unique.*|multinomial|randperm.*|(log)?cum.*|_cum.*|nonzero.*|masked_select"
     r"|bincount|histc|repeat_interleave", "temporaries of sorts and scans"),
    (r"_?linalg_.*|cholesky.*|triangular_solve|geqrf|ormqr", "workspaces of cuSOLVER"),
    (r"_fft_.*", "workspaces of cuFFT"),
    (r".*grouped_mm|.*scaled_mm.*|.*sparse.*|quantiz.*|fake_quant.*",
     "temporaries of grouped, sparse or quantised products"),
)  # fmt: skip
"""Operators whose CUDA kernels take memory of a known kind, without a bound. Source: ATen/native/cuda and cudnn."""
RESULTS_ALONE = frozenset(re.findall(r"\w+", """
adamw_8bit scales_of_8_bits weight_of_4_bits
abs _adaptive_avg_pool2d _adaptive_avg_pool2d_backward add addbmm addcdiv addcmul addmm addmv all amax amin any arange
argmax argmin as_strided atan2 avg_pool2d avg_pool2d_backward baddbmm binary_cross_entropy
binary_cross_entropy_backward bitwise_and bitwise_not bitwise_or bmm cat ceil celu clamp clamp_max clamp_min clone
constant_pad_nd contiguous copy cos cosh detach diagonal_backward div dot dropout elu elu_backward embedding empty
empty_like empty_strided eq erf erfinv exp exp2 expand expm1 fill flip floor fmod full full_like _fused_adam
_fused_adamw _fused_rms_norm _fused_sgd gather ge gelu gelu_backward glu glu_backward gt
hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward huber_loss
huber_loss_backward index index_fill index_select isfinite isinf isnan kl_div le leaky_relu leaky_relu_backward lerp
lift_fresh linalg_vector_norm linear linspace _local_scalar_dense log log10 log1p log2 log_sigmoid_backward
log_sigmoid_forward _log_softmax _log_softmax_backward_data logical_and logical_not logical_or lt masked_fill matmul
max max_pool2d_with_indices max_pool2d_with_indices_backward maximum mean min minimum mish mish_backward mm mse_loss
mse_loss_backward mul mv native_dropout native_dropout_backward native_group_norm native_group_norm_backward
native_layer_norm ne neg new_empty new_empty_strided new_full new_ones new_zeros
nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward ones ones_like pow rand rand_like randint
randn randn_like reciprocal reflection_pad1d reflection_pad2d relu remainder repeat replication_pad2d _reshape_copy
roll round rsqrt rsub scalar_tensor _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention
_scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention
_scaled_dot_product_flash_attention_backward scatter scatter_add select_backward select_scatter sgn sigmoid
sigmoid_backward sign silu silu_backward sin slice_backward slice_scatter smooth_l1_loss smooth_l1_loss_backward
_softmax _softmax_backward_data softplus softplus_backward split sqrt square stack std sub sum tan tanh tanh_backward
threshold_backward _to_copy tril tril_indices triu triu_indices trunc uniform _unsafe_index _unsafe_view
upsample_bilinear2d upsample_bilinear2d_backward upsample_nearest2d upsample_nearest2d_backward var var_mean where
xlogy zero zeros zeros_like
"""))  # fmt: skip
"""Operators whose CUDA kernels take their results alone, or scratch by a rule of `engine/device/kernel_memory.py`.

Held against torch's own code on an imaginary card, by a dispatch mode over torch's own samples of operators.
"""
SCRATCH = "scratch of reductions: how many multiprocessors the card has is not known"


def unknown_memory(log: Allocations, allocated: Sequence[int], card: Card) -> tuple[UnknownMemory, ...]:
    """Operators of a step whose memory no rule gives, by kind. `allocated`: bytes after each event; empty: refused."""
    kinds: dict[str, set[int]] = {}
    for number, op in enumerate(log.ops):
        if kind := _kind(op, card):
            kinds.setdefault(kind, set()).add(number)
    ticks: dict[int, int] = {}
    for born, number in zip(log.born, log.op):
        if 0 < born < len(allocated):
            ticks[number] = max(ticks.get(number, 0), allocated[born])
    peak = max(allocated, default=0)
    rows = []
    for what, numbers in kinds.items():
        ops = sorted({operator_word(log.ops[number]) for number in numbers})
        room_bytes = min((peak - ticks[number] for number in numbers if number in ticks), default=None)
        rows.append(UnknownMemory(what=what, ops=tuple(ops[:MOST_NAMES]), room_bytes=room_bytes))
    return tuple(rows)


def _kind(op: str, card: Card) -> str:
    """The kind of memory that an operator may take; empty: none."""
    library, name = op.partition(".")[0], operator_word(op).removesuffix("_")
    if library in WITHOUT_MEMORY:
        return ""
    if library == "aten" and name in REDUCTIONS and card.multiprocessors is None:
        return SCRATCH
    if library == "aten" and (name in RESULTS_ALONE or name.startswith("_foreach_")):
        return ""
    return next((what for pattern, what in UNKNOWN if re.fullmatch(pattern, name)), WITHOUT_RULE)
