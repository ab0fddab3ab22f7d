"""torchtitan: the section `activation_checkpoint`, by mode: none, full, selective (every n-th layer, or by operator).

Its stride counts from one: every second layer is layers 1, 3, 5. Since 2026 modes are subcommands, without a stride;
what those do is what torchtitan 0.3.0 itself does, by a test that runs it. The stride is read by the grammar of 2025.
"""

from __future__ import annotations

from typing import Any

from explorer.plan.imports.dialect import Dialect, Said, longest_list, reading, refused, whole
from explorer.plan.imports.settings import Settings, last
from explorer.plan.names import Fqns
from explorer.record.graph import ModelGraph
from explorer.record.policy import Unit
from explorer.record.policy_file import Reading

_VERSION = "torchtitan of 2025, or 0.3.0"
_SECTION = "activation_checkpoint"
_OPTIONS = ("preserve_rng_state", "determinism_check", "early_stop")
_ELSEWHERE = ("mode", "selective_ac_option", "debug", "memory_budget", "visualize_memory_budget_pareto")
"""Settings of the modes, and those that change nothing of what runs again."""
_KEPT = tuple(
    f"aten.{name}.default"
    for name in (
        "mm", "linear", "bmm", "addmm", "_scaled_mm", "convolution", "convolution_backward", "upsample_bilinear2d",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention_math",
        "_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward", "_efficient_attention_forward",
        "max", "topk",
    )
)  # fmt: skip
"""Operators of torch's own whose results its selective mode keeps, in 0.3.0."""


def _says(path: str) -> bool:
    return _SECTION in path.split(".")[:-1]


def _read(settings: Settings, graph: ModelGraph) -> Reading:
    section = dict(_switched(last(path), value) for path, value in settings.items() if _says(path))
    mode = section.get("mode", "selective")
    if mode == "none":
        return reading(_VERSION, graph, Said(notes=("Its mode is none: nothing is recomputed.",)))
    if mode == "memory_budget":
        why = "a memory budget lets the compiler choose among operators and names no blocks."
        raise refused(_VERSION, why, "Type a budget on the page, or run `plan MODEL --budget 60%`.")
    if mode not in ("full", "selective"):
        raise refused(_VERSION, f"there is no mode {mode!r}.", "There are none, full, selective and memory_budget.")
    holder, layers = longest_list(_VERSION, graph)
    units, lost = (
        (whole(layers), ()) if mode == "full" else _selective(section.get("selective_ac_option", "op"), layers)
    )
    counted = (
        () if holder == "layers" else (f"It counts the blocks in `layers`; here those in `{holder}` are counted.",)
    )
    unread = tuple(f"{name} is not read." for name in sorted(set(section) - {*_OPTIONS, *_ELSEWHERE}))
    # Its wrapper always lets a recompute run to its end, where torch would stop at what backward needs.
    options = {"early_stop": False, **{name: section[name] for name in _OPTIONS if name in section}}
    meant = Said(
        units=units,
        options=tuple(options.items()),
        reasons=(*lost, *unread),
        notes=(*counted, *_stashes(section)),
    )
    return reading(_VERSION, graph, meant)


def _switched(name: str, value: Any) -> tuple[str, Any]:
    """`--activation_checkpoint.no-preserve-rng-state` says it of preserve_rng_state."""
    plain = name.removeprefix("no_")
    return (plain, not value) if plain != name and plain in _OPTIONS and isinstance(value, bool) else (name, value)


def _selective(option: Any, layers: Fqns) -> tuple[tuple[Unit, ...], tuple[str, ...]]:
    if str(option) == "op":
        return tuple(Unit(blocks=(fqn,), action="save_ops", save_ops=_KEPT) for fqn in layers), (_BY_OPERATOR,)
    if not str(option).isdecimal():
        raise refused(_VERSION, f"selective_ac_option is {option!r}.", "It is op, or a number of layers.")
    stride = int(option) or 1  # 0 means every layer there
    return whole(layers[stride - 1 :: stride]), ()


_BY_OPERATOR = (
    "In selective mode it keeps the results of attention and of every second matrix product of a layer, and "
    "recomputes the others; here the results of attention and of all matrix products are kept."
)


def _stashes(section: dict[str, Any]) -> tuple[str, ...]:
    if "preserve_rng_state" in section:
        return ()
    return ("preserve_rng_state is not said: its releases differ; here random numbers are set back.",)


TORCHTITAN = Dialect(name="torchtitan", written_for=_VERSION, says=_says, read=_read)
