"""The programs whose recompute settings are read: transformers, torchtitan, Megatron-LM and torch_remat.

Each program has the settings that count as its own, and a function that returns what the settings mean.
"""

from __future__ import annotations

from collections.abc import Iterable

from explorer.plan.imports.settings_format import (
    CannotSay,
    Meaning,
    Settings,
    SettingsFormat,
    last,
    layer_lists,
    longest_list,
    not_read,
    number_in,
    whole,
    within,
)
from explorer.plan.names import Fqns, above, is_within, listed, some
from explorer.plan.policy.block_names import regions_named
from explorer.record.graph import ModelGraph
from explorer.record.policy import Unit

# transformers: `activation_checkpointing` of its TrainingArguments, and until v6 `gradient_checkpointing`. TRL, axolotl
# and LLaMA-Factory take the same; LLaMA-Factory recomputes unless `disable_gradient_checkpointing` is true. Recomputed
# are all layers, or every n-th from the first, counted through vision tower, encoder and decoder together.

_HF_SWITCHES = ("activation_checkpointing", "gradient_checkpointing")
_HF_KWARGS = {f"{name}_kwargs" for name in _HF_SWITCHES}
_HF_OFF_SWITCH, _HF_OF_LLAMA_FACTORY = "disable_gradient_checkpointing", "finetuning_type"
_HF_OPTIONS = ("use_reentrant", "preserve_rng_state", "determinism_check", "early_stop")


def _is_hf_setting(path: str) -> bool:
    parts = path.split(".")
    names = (*_HF_SWITCHES, _HF_OFF_SWITCH, _HF_OF_LLAMA_FACTORY)
    return "fsdp_config" not in parts and (parts[-1] in names or not _HF_KWARGS.isdisjoint(parts))


def _read_hf(settings: Settings, graph: ModelGraph) -> Meaning:
    section = {path: value for path, value in settings.items() if _is_hf_setting(path)}
    switches = {path: value for path, value in section.items() if last(path) in _HF_SWITCHES}
    kwargs = {last(path): value for path, value in section.items() if not _HF_KWARGS.isdisjoint(path.split("."))}
    off = {path: value for path, value in section.items() if last(path) == _HF_OFF_SWITCH}
    switches |= {path: not _hf_true_or_false(path, value) for path, value in off.items()}
    if not switches and any(last(path) == _HF_OF_LLAMA_FACTORY for path in section):
        switches[_HF_OFF_SWITCH] = True  # its default
    if len({_hf_true_or_false(path, value) for path, value in switches.items()}) > 1:
        raise CannotSay(f"{' and '.join(switches)} say different things.", "Leave out the older name.")
    on = [path for path, value in settings.items() if value]
    wrapped = [path for path in on if path.endswith("fsdp_config.activation_checkpointing")]
    unread = (
        *(f"{path} is not read: FSDP would wrap the layers itself." for path in wrapped),
        *(f"{path}: {_HF_OFFLOAD}" for path in on if last(path) == "activation_offloading"),
    )
    if not any(switches.values()):
        return Meaning(reasons=unread, notes=("It is off there: nothing is recomputed.",))
    layers, counted = _hf_layers(graph)
    every = kwargs.pop("every_n_layers", 1)
    if type(every) is not int or every < 1:
        raise CannotSay(f"every_n_layers is {every!r}.", "It is a number from 1 on.")
    offload = (f"offload: {_HF_OFFLOAD}",) if kwargs.pop("offload", None) else ()
    return Meaning(
        units=whole(layers[::every]),
        options={name: kwargs[name] for name in _HF_OPTIONS if name in kwargs},
        reasons=(*unread, *counted, *offload, *not_read(kwargs, _HF_OPTIONS)),
        notes=_HF_ENGINE + (_HF_LLAMA_FACTORY if _HF_OFF_SWITCH in map(last, switches) else ()),
    )


_HF_OFFLOAD = "there the inputs of the layers wait in the memory of the host; here they stay."
_HF_LLAMA_FACTORY = (f"LLaMA-Factory recomputes unless {_HF_OFF_SWITCH} is true; its use_reentrant_gc is not read.",)
_HF_ENGINE = ("Where use_reentrant is not given, transformers 5 takes off, as here; transformers 4 took on.",)


def _hf_true_or_false(path: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise CannotSay(f"{path} is {value!r}.", "It is true or false.")
    return value


def _hf_layers(graph: ModelGraph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Layers that transformers can recompute; if the model has none, its numbered layers and a sentence."""
    if layers := tuple(block.fqn for block in graph.blocks if "checkpointing_layer" in block.traits):
        return layers, ()
    if not (lists := layer_lists(graph)):
        raise CannotSay(f"{graph.model.target} has neither layers of transformers nor numbered layers.")
    counted = f"{graph.model.target} has no layer of transformers; counted instead: {some(tuple(lists))} by number."
    return tuple(fqn for fqns in lists.values() for fqn in fqns), (counted,)


# torchtitan: the section `activation_checkpoint`, by mode: none, full, selective (every n-th layer, or by operator).
# Its stride counts from one: every second layer is layers 1, 3, 5. Since 2026 modes are subcommands without a stride,
# and a test runs torchtitan 0.3.0 itself beside what is read. The stride is read by the grammar of 2025.

_TITAN_OPTIONS = ("preserve_rng_state", "determinism_check", "early_stop")
_TITAN_ELSEWHERE = ("mode", "selective_ac_option", "debug", "memory_budget", "visualize_memory_budget_pareto")
"""Settings that choose the mode, and settings that change no recompute."""
_TITAN_SAVED = tuple(
    f"aten.{name}.default"
    for name in (
        "mm", "linear", "bmm", "addmm", "_scaled_mm", "convolution", "convolution_backward", "upsample_bilinear2d",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention_math",
        "_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward", "_efficient_attention_forward",
        "max", "topk",
    )
)  # fmt: skip
"""Operators of torch whose results the selective mode of 0.3.0 keeps."""


def _is_titan_setting(path: str) -> bool:
    return "activation_checkpoint" in path.split(".")[:-1]


def _read_titan(settings: Settings, graph: ModelGraph) -> Meaning:
    section = dict(_titan_switched(last(path), value) for path, value in settings.items() if _is_titan_setting(path))
    mode = section.get("mode", "selective")
    if mode == "none":
        return Meaning(notes=("Its mode is none: nothing is recomputed.",))
    if mode == "memory_budget":
        why = "a memory budget lets the compiler choose among operators and names no blocks."
        raise CannotSay(why, "Type a budget on the page, or run `plan MODEL --budget 60%`.")
    if mode not in ("full", "selective"):
        raise CannotSay(f"there is no mode {mode!r}.", "There are none, full, selective and memory_budget.")
    holder, layers = longest_list(graph)
    option = section.get("selective_ac_option", "op")
    units, lost = (whole(layers), ()) if mode == "full" else _titan_selective(option, layers)
    notes = [] if holder == "layers" else [f"It counts the blocks in `layers`; here those in `{holder}` are counted."]
    if "preserve_rng_state" not in section:
        notes.append("preserve_rng_state is not said: its releases differ; here random numbers are set back.")
    # Its wrapper always lets a recompute run to its end, where torch would stop at what backward needs.
    options = {"early_stop": False, **{name: section[name] for name in _TITAN_OPTIONS if name in section}}
    unread = not_read(section, (*_TITAN_OPTIONS, *_TITAN_ELSEWHERE))
    return Meaning(units=units, options=options, reasons=(*lost, *unread), notes=tuple(notes))


def _titan_switched(name: str, value: object) -> tuple[str, object]:
    """`--activation_checkpoint.no-preserve-rng-state` is preserve_rng_state, off."""
    plain = name.removeprefix("no_")
    is_off = plain != name and plain in _TITAN_OPTIONS and isinstance(value, bool)
    return (plain, not value) if is_off else (name, value)


def _titan_selective(option: object, layers: Fqns) -> tuple[tuple[Unit, ...], tuple[str, ...]]:
    if str(option) == "op":
        units = (Unit(blocks=(fqn,), action="save_ops", save_ops=_TITAN_SAVED) for fqn in layers)
        return tuple(units), (_TITAN_BY_OPERATOR,)
    if (stride := number_in(str(option))) is None:
        raise CannotSay(f"selective_ac_option is {option!r}.", "It is op, or a number of layers.")
    stride = stride or 1  # 0 means every layer there
    return whole(layers[stride - 1 :: stride]), ()


_TITAN_BY_OPERATOR = (
    "In selective mode it keeps the results of attention and of every second matrix product of a layer, and "
    "recomputes the others; here the results of attention and of all matrix products are kept."
)


# Megatron-LM: `--recompute-granularity full` with a method and a number of layers, or `selective` with modules. `block`
# is the first N layers of every (virtual) stage, `uniform` goes through all layers in segments of N. AMD Primus adds a
# list of numbers, `recompute_layer_ids`.

_MEGATRON_KEYS = ("granularity", "method", "num_layers", "modules", "activations", "layer_ids")
_MEGATRON_MODULES = {
    "core_attn": ("core_attention", "core_attn"),
    "mlp": ("mlp", "feed_forward", "ffn"),
    "moe": ("moe", "block_sparse_moe"),
    "shared_experts": ("shared_experts", "shared_expert"),
}
"""Modules of its selective mode, and the names of such blocks in models."""
_MEGATRON_NOTES = (
    "It recomputes by a reentrant engine of its own; here torch's non-reentrant one does: the same gradients.",
    "Read by its documented grammar; Megatron-LM itself was not run.",
)


def _is_megatron_setting(path: str) -> bool:
    return last(path).startswith("recompute_")


def _read_megatron(settings: Settings, graph: ModelGraph) -> Meaning:
    plain = {last(path): value for path, value in settings.items()}
    flags = {name.removeprefix("recompute_"): value for name, value in plain.items() if _is_megatron_setting(name)}
    unread = not_read(flags, _MEGATRON_KEYS, "recompute_")
    granularity = flags.get("granularity") or ("selective" if flags.get("activations") or "modules" in flags else None)
    if granularity is None:
        return Meaning(reasons=unread, notes=("Without recompute_granularity nothing is recomputed there.",))
    holder, layers = longest_list(graph)
    n_layers = plain.get("num_layers", len(layers))
    other = (f"They are for {n_layers} layers; this model has {len(layers)}.",) if n_layers != len(layers) else ()
    if granularity == "selective":
        units, lost = _megatron_selective(flags.get("modules") or "core_attn", graph, layers)
    elif granularity == "full":
        units, lost = _megatron_full(flags, plain, graph, layers)
    else:
        raise CannotSay(f"there is no granularity {granularity!r}.", "There are full and selective.")
    counted = f"Its layers are the blocks in `{holder}`." if holder else "Its layers are the model's own blocks."
    return Meaning(units=units, reasons=(*other, *lost, *unread), notes=(counted, *_MEGATRON_NOTES))


def _megatron_full(
    flags: dict[str, object], plain: dict[str, object], graph: ModelGraph, layers: Fqns
) -> tuple[tuple[Unit, ...], tuple[str, ...]]:
    if ids := flags.get("layer_ids"):
        return whole(layers[i] for i in _megatron_numbers(ids, len(layers))), ()
    method, n = flags.get("method"), flags.get("num_layers", 1)
    if method not in ("block", "uniform"):
        raise CannotSay(f"recompute_method is {method!r}.", "With granularity full it is block or uniform.")
    if type(n) is not int or n < 1:
        raise CannotSay(f"recompute_num_layers is {n!r}.", "It is a number of layers.")
    stages, lost = _megatron_stages(plain, layers)
    if method == "block":
        return whole(fqn for stage in stages for fqn in stage[:n]), lost
    groups = [stage[i : i + n] for stage in stages for i in range(0, len(stage), n)]
    unordered = [group for group in groups if any(graph.next_in_turn.get(a) != b for a, b in zip(group, group[1:]))]
    if unordered:
        why = f"{listed(unordered[0], between=' and ')} cannot be recomputed together here: each layer runs by itself."
        return whole(layers), (*lost, why)
    return tuple(Unit(blocks=group) for group in groups), lost


def _megatron_stages(plain: dict[str, object], layers: Fqns) -> tuple[list[Fqns], tuple[str, ...]]:
    """The layers of each (virtual) stage; all stages have the same length."""
    if "pipeline_model_parallel_layout" in plain:
        return [layers], ("The pipeline layout is not read: all layers are taken for one stage.",)
    n_ranks = plain.get("pipeline_model_parallel_size", 1)
    per_chunk = plain.get("num_layers_per_virtual_pipeline_stage")
    if per_chunk is not None and (type(per_chunk) is not int or per_chunk < 1):
        raise CannotSay(f"num_layers_per_virtual_pipeline_stage is {per_chunk!r}.", "It is a number from 1 on.")
    n_stages = len(layers) // per_chunk if per_chunk else n_ranks
    if type(n_stages) is not int or n_stages < 1 or len(layers) % n_stages:
        raise CannotSay(f"{len(layers)} layers do not go evenly into {n_stages} stages.")
    size = len(layers) // n_stages
    return [layers[i : i + size] for i in range(0, len(layers), size)], ()


def _megatron_selective(modules: object, graph: ModelGraph, layers: Fqns) -> tuple[tuple[Unit, ...], tuple[str, ...]]:
    names = dict.fromkeys(map(str, modules) if isinstance(modules, list) else str(modules).split())
    blocks = {name: within(graph, layers, _MEGATRON_MODULES.get(name, ())) for name in names}
    lost = [name for name in names if not blocks[name]]
    units = whole(fqn for fqns in blocks.values() for fqn in fqns)
    if not units:
        raise CannotSay(f"no block of this model stands for {listed(lost, between=' or ')}.", _MEGATRON_INSIDE)
    are, them = ("is", "it") if len(lost) == 1 else ("are", "them")
    return units, (f"{listed(lost)} {are} recomputed there; this model has no block for {them}.",) if lost else ()


_MEGATRON_INSIDE = (
    "What runs inside a block's forward cannot be chosen by itself; fused attention recomputes its core anyway."
)


def _megatron_numbers(ids: object, n_layers: int) -> Iterable[int]:
    texts = [str(number).strip() for number in (ids if isinstance(ids, list) else str(ids).split(","))]
    numbers = {text: number_in(text) for text in texts}
    wrong = [text for text, number in numbers.items() if number is None or number >= n_layers]
    if wrong:
        raise CannotSay(f"there is no layer {wrong[0]}; they go from 0 to {n_layers - 1}.")
    return sorted({number for number in numbers.values() if number is not None})


# torch_remat as torchtitan configures it: `RematAC.Config(save_regions=["attention.qkv"])`. Each layer is replayed but
# for the regions, whose names (patterns) are relative to a layer.


def _is_remat_setting(path: str) -> bool:
    return last(path) == "save_regions"


def _read_remat(settings: Settings, graph: ModelGraph) -> Meaning:
    (regions,) = (value for path, value in settings.items() if _is_remat_setting(path))
    names = regions if isinstance(regions, list) else [regions]
    if not all(isinstance(name, str) for name in names):
        raise CannotSay(f"save_regions is {regions!r}.", "It is a list of names of regions.")
    _, layers = longest_list(graph)
    holders = set(layers)
    relative = {fqn: fqn.removeprefix(f"{layer}.") for fqn in graph.by_fqn for layer in above(fqn) if layer in holders}
    regions_of = regions_named(dict.fromkeys(names), set(relative.values()))
    saved_regions = set().union(*regions_of.values())
    saved = {fqn for fqn, region in relative.items() if region in saved_regions}
    unknown = [name for name, regions in regions_of.items() if not regions]
    reasons = [f"{listed(unknown)} is kept there; no block has this name, so it is recomputed here."] if unknown else []
    if saved:
        reasons.append("There a layer is replayed around its kept regions; here the blocks beside them are recomputed.")
    return Meaning(
        units=whole(fqn for layer in layers for fqn in _beside(layer, saved, graph)),
        options={"preserve_rng_state": False, "early_stop": False, "determinism_check": "none"},
        reasons=tuple(reasons),
        notes=("It sets no generator back: `check` names the blocks that draw random numbers.",),
    )


def _beside(fqn: str, saved: set[str], graph: ModelGraph) -> Fqns:
    """The largest called blocks at or below `fqn` that hold no kept block."""
    if fqn in saved or not graph.by_fqn[fqn].n_calls and not graph.children[fqn]:
        return ()
    if not any(is_within(name, fqn) for name in saved):
        return (fqn,)
    return tuple(name for child in graph.children[fqn] for name in _beside(child.fqn, saved, graph))


PROGRAMS = (
    SettingsFormat("transformers", "transformers 5.23", _is_hf_setting, _read_hf),
    SettingsFormat("torchtitan", "torchtitan of 2025, or 0.3.0", _is_titan_setting, _read_titan),
    SettingsFormat("Megatron-LM", "Megatron-LM of 2026-08-22 (d98e8a6)", _is_megatron_setting, _read_megatron),
    SettingsFormat("torch_remat", "torch_remat 0.2.2", _is_remat_setting, _read_remat),
)
