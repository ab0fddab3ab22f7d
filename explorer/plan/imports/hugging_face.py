"""transformers: `activation_checkpointing` of its TrainingArguments, until v6 also `gradient_checkpointing`.

TRL, axolotl and LLaMA-Factory take the same; the last recomputes unless `disable_gradient_checkpointing` is true.
All layers, or every n-th from the first: it counts its own layers through vision tower, encoder and decoder together.
"""

from __future__ import annotations

from typing import Any

from explorer.plan.imports.dialect import Dialect, Said, layer_lists, reading, refused, whole
from explorer.plan.imports.settings import Settings, last
from explorer.plan.names import some
from explorer.record.graph import ModelGraph
from explorer.record.policy_file import Reading

_VERSION = "transformers 5.23"
_SWITCHES = ("activation_checkpointing", "gradient_checkpointing")
_KWARGS = tuple(f"{name}_kwargs" for name in _SWITCHES)
_OFF_SWITCH, _OF_LLAMA_FACTORY = "disable_gradient_checkpointing", "finetuning_type"
_OPTIONS = ("use_reentrant", "preserve_rng_state", "determinism_check", "early_stop")


def _says(path: str) -> bool:
    parts = path.split(".")
    return "fsdp_config" not in parts and (
        parts[-1] in (*_SWITCHES, _OFF_SWITCH, _OF_LLAMA_FACTORY) or any(part in _KWARGS for part in parts)
    )


def _read(settings: Settings, graph: ModelGraph) -> Reading:
    own = {path: value for path, value in settings.items() if _says(path)}
    switches = {path: value for path, value in own.items() if last(path) in _SWITCHES}
    kwargs = {last(path): value for path, value in own.items() if any(part in _KWARGS for part in path.split("."))}
    switches |= {path: not _true_or_false(path, value) for path, value in own.items() if last(path) == _OFF_SWITCH}
    if not switches and any(last(path) == _OF_LLAMA_FACTORY for path in own):
        switches[_OFF_SWITCH] = True  # what it does by default
    if len({_true_or_false(path, value) for path, value in switches.items()}) > 1:
        raise refused(_VERSION, f"{' and '.join(switches)} say different things.", "Leave out the older name.")
    unread = tuple(
        f"{path} is not read: FSDP would wrap the layers itself."
        for path, value in settings.items()
        if value and path.endswith("fsdp_config.activation_checkpointing")
    ) + tuple(
        f"{path}: {_OFFLOAD}" for path, value in settings.items() if value and last(path) == "activation_offloading"
    )
    if not any(switches.values()):
        return reading(_VERSION, graph, Said(reasons=unread, notes=("It is off there: nothing is recomputed.",)))
    layers, counted = _layers(graph)
    every, options, doubts = _kwargs(kwargs)
    meant = Said(
        units=whole(layers[::every]),
        options=tuple(options.items()),
        reasons=(*unread, *counted, *doubts),
        notes=_ENGINE + (_LLAMA_FACTORY if _OFF_SWITCH in map(last, switches) else ()),
    )
    return reading(_VERSION, graph, meant)


_OFFLOAD = "there the inputs of the layers wait in the memory of the host; here they stay."
_LLAMA_FACTORY = (f"LLaMA-Factory recomputes unless {_OFF_SWITCH} is true; its use_reentrant_gc is not read.",)
_ENGINE = ("Where use_reentrant is not given, transformers 5 takes off, as here; transformers 4 took on.",)


def _true_or_false(path: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise refused(_VERSION, f"{path} is {value!r}.", "It is true or false.")
    return value


def _layers(graph: ModelGraph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those that transformers can recompute itself; of another model its numbered layers, with a sentence."""
    own = tuple(block.fqn for block in graph.blocks if "checkpointing_layer" in block.traits)
    if own:
        return own, ()
    lists = layer_lists(graph)
    if not lists:
        raise refused(_VERSION, f"{graph.model.target} has neither layers of transformers nor numbered layers.")
    counted = f"{graph.model.target} has no layer of transformers; counted instead: {some(tuple(lists))} by number."
    return tuple(fqn for layers in lists.values() for fqn in layers), (counted,)


def _kwargs(given: dict[str, Any]) -> tuple[int, dict[str, Any], tuple[str, ...]]:
    """Stride, options of the policy, and what is lost."""
    every = given.get("every_n_layers", 1)
    if type(every) is not int or every < 1:
        raise refused(_VERSION, f"every_n_layers is {every!r}.", "It is a number from 1 on.")
    options = {name: given[name] for name in _OPTIONS if name in given}
    other = sorted(set(given) - {*_OPTIONS, "every_n_layers", "offload"})
    doubts = [f"{name} is not read." for name in other]
    if given.get("offload"):
        doubts.insert(0, f"offload: {_OFFLOAD}")
    return every, options, tuple(doubts)


HUGGING_FACE = Dialect(name="transformers", written_for=_VERSION, says=_says, read=_read)
