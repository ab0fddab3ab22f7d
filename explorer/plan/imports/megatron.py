"""Megatron-LM: `--recompute-granularity full` with a method and a number of layers, or `selective` with modules.

`block` is the first N layers of every (virtual) stage, `uniform` goes through all layers in segments of N. AMD Primus
adds a list of numbers, `recompute_layer_ids`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from explorer.plan.imports.dialect import Dialect, Said, longest_list, reading, refused, whole, within
from explorer.plan.imports.settings import Settings, last
from explorer.plan.names import Fqns, listed
from explorer.record.graph import ModelGraph
from explorer.record.policy import Unit
from explorer.record.policy_file import Reading

_VERSION = "Megatron-LM of 2026-08-22 (d98e8a6)"
_KEYS = ("granularity", "method", "num_layers", "modules", "activations", "layer_ids")
_MODULES = {
    "core_attn": ("core_attention", "core_attn"),
    "mlp": ("mlp", "feed_forward", "ffn"),
    "moe": ("moe", "block_sparse_moe"),
    "shared_experts": ("shared_experts", "shared_expert"),
}
"""Modules of its selective mode that are blocks elsewhere too, and how those are called."""
_ENGINE = "It recomputes by a reentrant engine of its own; here torch's non-reentrant one does: the same gradients."
_UNRUN = "Read by its documented grammar; Megatron-LM itself was not run."


def _says(path: str) -> bool:
    return last(path).startswith("recompute_")


def _read(settings: Settings, graph: ModelGraph) -> Reading:
    given = {last(path).removeprefix("recompute_"): value for path, value in settings.items() if _says(path)}
    plain = {last(path): value for path, value in settings.items()}
    unread = tuple(f"recompute_{name} is not read." for name in sorted(set(given) - set(_KEYS)))
    granularity = given.get("granularity") or ("selective" if given.get("activations") or "modules" in given else None)
    if granularity is None:
        note = "Without recompute_granularity nothing is recomputed there."
        return reading(_VERSION, graph, Said(reasons=unread, notes=(note,)))
    holder, layers = longest_list(_VERSION, graph)
    n_layers = plain.get("num_layers", len(layers))
    other = (f"They are for {n_layers} layers; this model has {len(layers)}.",) if n_layers != len(layers) else ()
    if granularity == "selective":
        units, lost = _selective(given.get("modules") or "core_attn", graph, layers)
    elif granularity == "full":
        units, lost = _full(given, plain, graph, layers)
    else:
        raise refused(_VERSION, f"there is no granularity {granularity!r}.", "There are full and selective.")
    notes = (
        f"Its layers are the blocks in `{holder}`." if holder else "Its layers are the model's own blocks.",
        _ENGINE,
        _UNRUN,
    )
    return reading(_VERSION, graph, Said(units=units, reasons=(*other, *lost, *unread), notes=notes))


def _full(
    given: dict[str, Any], plain: dict[str, Any], graph: ModelGraph, layers: Fqns
) -> tuple[tuple[Unit, ...], tuple[str, ...]]:
    if ids := given.get("layer_ids"):
        return whole(layers[i] for i in _numbers(ids, len(layers))), ()
    method, n = given.get("method"), given.get("num_layers", 1)
    if method not in ("block", "uniform"):
        raise refused(_VERSION, f"recompute_method is {method!r}.", "With granularity full it is block or uniform.")
    if type(n) is not int or n < 1:
        raise refused(_VERSION, f"recompute_num_layers is {n!r}.", "It is a number of layers.")
    stages, lost = _stages(plain, layers)
    if method == "block":
        return whole(fqn for stage in stages for fqn in stage[:n]), lost
    groups = [stage[i : i + n] for stage in stages for i in range(0, len(stage), n)]
    apart = [group for group in groups if any(graph.next_in_turn.get(a) != b for a, b in zip(group, group[1:]))]
    if apart:
        why = f"{listed(apart[0], between=' and ')} cannot be recomputed together here: each layer runs by itself."
        return whole(layers), (*lost, why)
    return tuple(Unit(blocks=group) for group in groups), lost


def _stages(plain: dict[str, Any], layers: Fqns) -> tuple[list[Fqns], tuple[str, ...]]:
    """The layers of each (virtual) stage, all of the same length."""
    if "pipeline_model_parallel_layout" in plain:
        return [layers], ("The pipeline layout is not read: all layers are taken for one stage.",)
    n_ranks = plain.get("pipeline_model_parallel_size", 1)
    per_chunk = plain.get("num_layers_per_virtual_pipeline_stage")
    if per_chunk is not None and (type(per_chunk) is not int or per_chunk < 1):
        raise refused(_VERSION, f"num_layers_per_virtual_pipeline_stage is {per_chunk!r}.", "It is a number from 1 on.")
    n_stages = len(layers) // per_chunk if per_chunk else n_ranks
    if type(n_stages) is not int or n_stages < 1 or len(layers) % n_stages:
        raise refused(_VERSION, f"{len(layers)} layers do not go evenly into {n_stages} stages.")
    size = len(layers) // n_stages
    return [layers[i : i + size] for i in range(0, len(layers), size)], ()


def _selective(modules: Any, graph: ModelGraph, layers: Fqns) -> tuple[tuple[Unit, ...], tuple[str, ...]]:
    wanted = list(modules) if isinstance(modules, list) else str(modules).split()
    blocks = {name: within(graph, layers, _MODULES.get(name, ())) for name in wanted}
    lost = tuple(f"{name} is recomputed there; this model has no block for it." for name in wanted if not blocks[name])
    units = whole(fqn for fqns in blocks.values() for fqn in fqns)
    if not units:
        raise refused(_VERSION, f"no block of this model stands for {' or '.join(wanted)}.", _INSIDE)
    return units, lost


_INSIDE = (
    "What runs inside of a block's forward cannot be chosen by itself; fused attention recomputes its core anyway."
)


def _numbers(ids: Any, n_layers: int) -> Iterable[int]:
    texts = [str(one).strip() for one in (ids if isinstance(ids, list) else str(ids).split(","))]
    wrong = [text for text in texts if not text.isdecimal() or int(text) >= n_layers]
    if wrong:
        raise refused(_VERSION, f"there is no layer {wrong[0]}; they go from 0 to {n_layers - 1}.")
    return sorted({int(text) for text in texts})


MEGATRON = Dialect(name="Megatron-LM", written_for=_VERSION, says=_says, read=_read)
