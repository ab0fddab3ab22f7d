"""Megatron-LM: recompute flags, and the layout string of its pipeline.

`--recompute-method block` recomputes the first N layers of every (virtual) stage; nothing chooses single layers. The
layout is written in its own grammar: `E` embedding, `t` a transformer layer, `L` head and loss, `|` between stages.
"""

from __future__ import annotations

from explorer.errors import InvalidPlan
from explorer.plan.export.layers import Layers, first_of, fullest_list, layers_of, prefix_of
from explorer.plan.export.outcome import Target
from explorer.record.policy_file import Export, PolicyFile
from explorer.record.run import PipelinePlan

_VERSION = "Megatron-LM of 2026-08-22 (d98e8a6)"
MEGATRON = Target(name="megatron", written_for=_VERSION, fixed=(("use_reentrant", True),), nested=False)
LAYOUT = Target(name="megatron-layout", written_for=_VERSION)


def to_megatron(file: PolicyFile) -> Export:
    """Flags. Without a plan all layers are one stage."""
    blocks = MEGATRON.recomputed(file.policy)
    if not blocks:
        return MEGATRON.exported(file.policy, "# No recompute flags: every layer keeps what it saves.\n")
    layers = layers_of(blocks)
    if isinstance(layers, str):
        return MEGATRON.refused(layers, "Choose whole layers, or export for primus or torchtitan.")
    stages = layers.stages(file.pipeline) if file.pipeline is not None else [list(range(max(layers.chosen) + 1))]
    n = prefix_of(stages, layers.chosen) if file.pipeline is not None else len(layers.chosen)
    text = f"--recompute-granularity full --recompute-method block --recompute-num-layers {n}\n"
    return MEGATRON.exported(file.policy, text if n else _NONE, there=layers.names(first_of(stages, n)), note=_NOTE)


_NONE = "# No recompute flags: recomputing the first layers of every stage would be further from the policy.\n"
_NOTE = "The first layers of every stage are counted: with another pipeline size or layout other layers run again."


def to_layout(file: PolicyFile) -> Export:
    """The stages of the plan. Raises InvalidPlan where the file has none."""
    if file.pipeline is None:
        raise InvalidPlan(
            "The policy file holds no pipeline plan.",
            hint="`python -m explorer pipeline MODEL --stages 4 --out FILE` writes one.",
        )
    layers = fullest_list(file.pipeline)
    fault = "No stage holds a numbered layer." if layers is None else _fault(file.pipeline, layers)
    if layers is None or fault:
        return LAYOUT.refused(fault, "Cut between whole layers only.")
    counts = [len(numbers) for numbers in layers.stages(file.pipeline)]
    stages = [f"t*{n}" if n > 1 else "t" * n for n in counts]
    stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}L"
    text = f'--pipeline-model-parallel-layout "{"|".join(stages)}"\n'
    note = _LAYOUT_NOTE.format(n=len(counts))
    return Export(target=LAYOUT.name, written_for=LAYOUT.written_for, text=text, notes=(note,))


_LAYOUT_NOTE = (
    "The {n} stages go round the ranks: their number has to be a multiple of --pipeline-model-parallel-size, and "
    "--num-layers the number of layers. It replaces --decoder-first-pipeline-num-layers and its kin."
)


def _fault(plan: PipelinePlan, layers: Layers) -> str:
    """Where something that is no layer stands between layers."""
    order = [fqn for blocks in plan.stages for fqn in blocks]
    numbered = [place for place, fqn in enumerate(order) if fqn.rpartition(".")[0] == layers.parent]
    within = order[numbered[0] : numbered[-1] + 1]
    other = [fqn for fqn in within if fqn.rpartition(".")[0] != layers.parent]
    if other:
        return f"{other[0]} stands between layers, and a layout knows embedding, layers and head only."
    first = next(j for j, blocks in enumerate(plan.stages) if order[numbered[0]] in blocks)
    last = next(j for j, blocks in enumerate(plan.stages) if order[numbered[-1]] in blocks)
    if any(order.index(fqn) < numbered[0] for blocks in plan.stages[1 : first + 1] for fqn in blocks):
        return "What lies before the first layer is on several stages, and a layout has one embedding."
    if any(order.index(fqn) > numbered[-1] for blocks in plan.stages[last:-1] for fqn in blocks):
        return "What lies behind the last layer is on several stages, and a layout has one head."
    return ""
