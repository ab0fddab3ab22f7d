"""Blocks as names and as numbers: the target `names`, and the two targets of Megatron-LM.

`decoder.layers.3` is layer 3 of `decoder.layers`. Megatron's `--recompute-method block` recomputes the first N layers
of every (virtual) stage, and nothing chooses single layers. Its pipeline layout has a grammar: `E` embedding, `t` a
transformer layer, `L` head and loss, `|` between stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import yaml

from explorer.plan.export.target import CHECKPOINT_OPTIONS, Target, plan_in
from explorer.record.files import Export, PolicyFile
from explorer.record.run import PipelinePlan

NAMES = Target(
    name="names",
    written_for="programs that take names or numbers of blocks",
    options=CHECKPOINT_OPTIONS,
    checked="executed",
)


def to_names(file: PolicyFile) -> Export:
    """YAML: every block by name, and every numbered block by its index inside its list of the model."""
    names = NAMES.recomputed(file.policy)
    numbers: dict[str, list[int]] = {}
    for parent, _, index in (name.rpartition(".") for name in names):
        if index.isdecimal():
            numbers.setdefault(parent, []).append(int(index))
    document = {"names": list(names), "numbers": {parent: sorted(numbers[parent]) for parent in numbers}}
    return NAMES.exported(
        file.policy, yaml.safe_dump(document, default_flow_style=None, sort_keys=False, width=100), note=_NAMES_NOTE
    )


_NAMES_NOTE = "The file names blocks only: set the options of the policy in the program itself."


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The layers that a policy names, all of one list of the model."""

    parent: str
    chosen: tuple[int, ...]

    def name(self, number: int) -> str:
        return f"{self.parent}.{number}"

    def names(self, numbers: Iterable[int]) -> tuple[str, ...]:
        return tuple(map(self.name, numbers))

    def stages(self, plan: PipelinePlan) -> list[list[int]]:
        """Numbers of the layers in each stage."""
        return [[number for number in map(self._number, blocks) if number is not None] for blocks in plan.stages]

    def _number(self, fqn: str) -> int | None:
        parent, _, index = fqn.rpartition(".")
        return int(index) if parent == self.parent and index.isdecimal() else None


def layers_of(blocks: Iterable[str]) -> Layers | str:
    """The layers, or a sentence if `blocks` are not layers of one list."""
    split = {fqn: fqn.rpartition(".") for fqn in blocks}
    other = [fqn for fqn, (_, _, index) in split.items() if not index.isdecimal()]
    if other:
        return f"{other[0]} is no numbered layer, and only whole layers can be named there."
    parents = sorted({parent for parent, _, _ in split.values()})
    if len(parents) > 1:
        return f"Layers of {' and of '.join(parents)} are chosen, and only one list of layers is counted there."
    if not parents:
        return "The policy recomputes nothing."
    return Layers(parent=parents[0], chosen=tuple(sorted(int(index) for _, _, index in split.values())))


def fullest_list(plan: PipelinePlan) -> Layers | None:
    """The list with most numbered blocks in the stages: the transformer layers. None if no block is numbered."""
    numbered: dict[str, int] = {}
    for fqn in (fqn for blocks in plan.stages for fqn in blocks):
        parent, _, index = fqn.rpartition(".")
        if index.isdecimal():
            numbered[parent] = numbered.get(parent, 0) + 1
    return Layers(parent=max(numbered, key=lambda parent: numbered[parent]), chosen=()) if numbered else None


def prefix_of(stages: list[list[int]], chosen: Iterable[int]) -> int:
    """How many first layers of every stage differ least from `chosen`. Of two equally good numbers the larger."""
    layers = set(chosen)
    most = max(map(len, stages), default=0)
    return min(range(most, -1, -1), key=lambda n: len(layers ^ set(first_of(stages, n))))


def first_of(stages: list[list[int]], n: int) -> list[int]:
    return [number for stage in stages for number in stage[:n]]


_VERSION = "Megatron-LM of 2026-08-22 (d98e8a6)"
MEGATRON = Target(name="megatron", written_for=_VERSION, fixed=(("use_reentrant", True),), nested=False)
LAYOUT = Target(name="megatron-layout", written_for=_VERSION)


def to_megatron(file: PolicyFile) -> Export:
    """Recompute flags. Without a plan all layers are one stage."""
    blocks = MEGATRON.recomputed(file.policy)
    if not blocks:
        return MEGATRON.exported(file.policy, "# No recompute flags: every layer keeps what it saves.\n")
    layers = layers_of(blocks)
    if isinstance(layers, str):
        return MEGATRON.refused(layers, "Choose whole layers, or export for names or torchtitan.")
    stages = layers.stages(file.pipeline) if file.pipeline is not None else [list(range(max(layers.chosen) + 1))]
    n = prefix_of(stages, layers.chosen) if file.pipeline is not None else len(layers.chosen)
    text = f"--recompute-granularity full --recompute-method block --recompute-num-layers {n}\n"
    return MEGATRON.exported(
        file.policy, text if n else _NO_FLAGS, there=layers.names(first_of(stages, n)), note=_MEGATRON_NOTE
    )


_NO_FLAGS = "# No recompute flags: recomputing the first layers of every stage would be further from the policy.\n"
_MEGATRON_NOTE = (
    "The first layers of every stage are counted: with another pipeline size or layout other layers run again."
)


def to_layout(file: PolicyFile) -> Export:
    """The stages of the plan. Raises InvalidPlan where the file has none."""
    plan = plan_in(file)
    layers = fullest_list(plan)
    fault = "No stage holds a numbered layer." if layers is None else _fault(plan, layers)
    if layers is None or fault:
        return LAYOUT.refused(fault, "Cut between whole layers only.")
    counts = [len(numbers) for numbers in layers.stages(plan)]
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
    """A sentence if anything but a layer stands between layers or fills a stage; else empty."""
    order = [fqn for blocks in plan.stages for fqn in blocks]
    numbered = [index for index, fqn in enumerate(order) if fqn.rpartition(".")[0] == layers.parent]
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
