"""The targets of `export`, one row each, and the targets that take names or numbers of blocks.

`decoder.layers.3` is layer 3 of `decoder.layers`. Megatron's `--recompute-method block` recomputes the first N layers
of every (virtual) stage, and nothing chooses single layers. Its pipeline layout has a grammar: `E` embedding, `t` a
transformer layer, `L` head and loss, `|` between stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import yaml
from msgspec.structs import replace

from explorer.errors import InvalidPolicy, nearest
from explorer.plan.export.python_files import (
    to_diffusers,
    to_fsdp2,
    to_hugging_face,
    to_lightning,
    to_torch_remat,
    to_torchtitan,
)
from explorer.plan.export.target import CHECKPOINT_OPTIONS, Target, plan_in
from explorer.plan.export.torch_file import to_torch
from explorer.plan.export.torchrun import to_schedule_csv, to_stages
from explorer.plan.policy.block_names import is_pattern
from explorer.record.files import Export, PolicyFile
from explorer.record.run import PipelinePlan

_MEGATRON_VERSION = "Megatron-LM of 2026-08-22 (d98e8a6)"
NAMES = Target("names", "programs that take names or numbers of blocks", CHECKPOINT_OPTIONS, checked="executed")
MEGATRON = Target("megatron", _MEGATRON_VERSION, fixed=(("use_reentrant", True),), nested=False)
LAYOUT = Target("megatron-layout", _MEGATRON_VERSION)


def numbers_of(fqns: Iterable[str]) -> defaultdict[str, list[int]]:
    """Numbers of the numbered blocks by the list of the model that holds them."""
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    for parent, _, index in (fqn.rpartition(".") for fqn in fqns):
        if index.isdecimal():
            numbers[parent].append(int(index))
    return numbers


def to_names(file: PolicyFile) -> Export:
    """YAML: every block by name, and every numbered block by its index inside its list of the model."""
    names = NAMES.recomputed(file.policy)
    numbers = {parent: sorted(indices) for parent, indices in numbers_of(names).items()}
    document = {"names": list(names), "numbers": numbers}
    text = yaml.safe_dump(document, default_flow_style=None, sort_keys=False, width=100)
    note = "The file names blocks only: set the options of the policy in the program itself."
    return NAMES.exported(file.policy, text, note=note)


def to_megatron(file: PolicyFile) -> Export:
    """Recompute flags. Without a plan all layers are one stage."""
    blocks = MEGATRON.recomputed(file.policy)
    if not blocks:
        return MEGATRON.exported(file.policy, "# No recompute flags: every layer keeps what it saves.\n")
    numbers = numbers_of(blocks)
    fault = f"Layers of {' and of '.join(sorted(numbers))} are chosen, and only one list of layers is counted there."
    if other := next((fqn for fqn in blocks if not fqn.rpartition(".")[2].isdecimal()), None):
        fault = f"{other} is no numbered layer, and only whole layers can be named there."
    if other or len(numbers) > 1:
        return MEGATRON.refused(fault, "Choose whole layers, or export for names or torchtitan.")
    ((parent, chosen),) = numbers.items()
    stages, n = [[*range(max(chosen) + 1)]], len(chosen)
    if file.pipeline is not None:
        stages = _layers_of_stages(file.pipeline, parent)
        n = prefix_of(stages, chosen)
    there = tuple(f"{parent}.{number}" for number in first_of(stages, n))
    text = f"--recompute-granularity full --recompute-method block --recompute-num-layers {n}\n"
    return MEGATRON.exported(file.policy, text if n else _NO_FLAGS, there=there, note=_MEGATRON_NOTE)


_NO_FLAGS = "# No recompute flags: recomputing the first layers of every stage would be further from the policy.\n"
_MEGATRON_NOTE = (
    "The first layers of every stage are counted: with another pipeline size or layout other layers run again."
)


def _layers_of_stages(plan: PipelinePlan, parent: str) -> list[list[int]]:
    """By stage, the numbers of the layers of the list `parent`."""
    return [numbers_of(blocks)[parent] for blocks in plan.stages]


def prefix_of(stages: list[list[int]], chosen: Iterable[int]) -> int:
    """How many first layers of every stage differ least from `chosen`. Of two equally good numbers the larger."""
    layers = set(chosen)
    most = max(map(len, stages), default=0)
    return min(range(most, -1, -1), key=lambda n: len(layers ^ set(first_of(stages, n))))


def first_of(stages: list[list[int]], n: int) -> list[int]:
    return [number for stage in stages for number in stage[:n]]


def to_layout(file: PolicyFile) -> Export:
    """The stages of the plan: the transformer layers are the longest list. Raises InvalidPlan without a plan."""
    plan = plan_in(file)
    numbers = numbers_of(fqn for blocks in plan.stages for fqn in blocks)
    parent = max(numbers, key=lambda parent: len(numbers[parent]), default="")
    fault = _fault_of_layout(plan, parent) if numbers else "No stage holds a numbered layer."
    if fault:
        return LAYOUT.refused(fault, "Cut between whole layers only.")
    counts = [len(layers) for layers in _layers_of_stages(plan, parent)]
    stages = [f"t*{n}" if n > 1 else "t" * n for n in counts]
    stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}L"
    text = f'--pipeline-model-parallel-layout "{"|".join(stages)}"\n'
    note = _LAYOUT_NOTE.format(n=len(counts))
    return Export(target=LAYOUT.name, written_for=LAYOUT.written_for, text=text, notes=(note,))


_LAYOUT_NOTE = (
    "The {n} stages go round the ranks: their number has to be a multiple of --pipeline-model-parallel-size, and "
    "--num-layers the number of layers. It replaces --decoder-first-pipeline-num-layers and its kin."
)


def _fault_of_layout(plan: PipelinePlan, parent: str) -> str:
    """A sentence if anything but a layer stands between layers or fills a stage; else empty."""
    stage_of = {fqn: stage for stage, blocks in enumerate(plan.stages) for fqn in blocks}
    order = list(stage_of)
    layers = [index for index, fqn in enumerate(order) if fqn.rpartition(".")[0] == parent]
    first, end = layers[0], layers[-1] + 1
    if other := next((order[index] for index in range(first, end) if index not in layers), None):
        return f"{other} stands between layers, and a layout knows embedding, layers and head only."
    if any(stage_of[fqn] for fqn in order[:first]):
        return "What lies before the first layer is on several stages, and a layout has one embedding."
    if any(stage_of[fqn] < len(plan.stages) - 1 for fqn in order[end:]):
        return "What lies behind the last layer is on several stages, and a layout has one head."
    return ""


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """A target of `export --to NAME`."""

    name: str
    title: str
    write: Callable[[PolicyFile], Export]
    suffix: str = ".py"


_ROWS = (
    ExportFormat(name="torch", title="torch alone", write=to_torch),
    ExportFormat(name="fsdp2", title="torch with FSDP2", write=to_fsdp2),
    ExportFormat(name="torch-remat", title="torch_remat", write=to_torch_remat),
    ExportFormat(name="names", title="any program, as names and numbers", write=to_names, suffix=".yaml"),
    ExportFormat(name="stages", title="stages, as lists of blocks", write=to_stages, suffix=".json"),
    ExportFormat(name="schedule", title="schedule, for torch's pipelining", write=to_schedule_csv, suffix=".csv"),
    ExportFormat(name="huggingface", title="Hugging Face transformers", write=to_hugging_face),
    ExportFormat(name="diffusers", title="diffusers", write=to_diffusers),
    ExportFormat(name="lightning", title="Lightning", write=to_lightning),
    ExportFormat(name="torchtitan", title="torchtitan", write=to_torchtitan),
    ExportFormat(name="megatron", title="Megatron-LM", write=to_megatron, suffix=".txt"),
    ExportFormat(name="megatron-layout", title="Megatron-LM, pipeline layout", write=to_layout, suffix=".txt"),
)
FORMATS = {row.name: row for row in _ROWS}


def exported(file: PolicyFile, name: str) -> Export:
    """The policy in the form called `name`. Raises InvalidPolicy for an unknown name, for patterns, and what the form
    raises."""
    if patterns := [fqn for fqn in file.policy.blocks if is_pattern(fqn)]:
        raise InvalidPolicy(
            f"The policy names blocks by pattern ({patterns[0]}), and only a model says which those are.",
            hint="`python -m explorer check FILE MODEL --out policy.yaml` writes them out.",
        )
    if name not in FORMATS:
        raise InvalidPolicy(
            f"There is no exporter {name}.", hint=nearest(name, FORMATS) or f"There are {', '.join(FORMATS)}."
        )
    export = FORMATS[name].write(file)
    if file.ranks is None:
        return export
    reshard = f": reshard_after_forward={file.ranks.reshard}" if file.ranks.data == "fsdp" else ""
    return replace(export, notes=(*export.notes, f"The plan is for {file.ranks.in_words}{reshard}."))
