"""A policy file in the form that somebody else needs. A new form is a function and its row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from explorer.errors import InvalidPolicy, nearest
from explorer.plan.export.composer import to_composer
from explorer.plan.export.deepspeed import to_deepspeed
from explorer.plan.export.diffusers import to_diffusers
from explorer.plan.export.flagscale import to_flagscale
from explorer.plan.export.fsdp2 import to_fsdp2
from explorer.plan.export.hugging_face import to_hugging_face
from explorer.plan.export.lightning import to_lightning
from explorer.plan.export.llm_foundry import to_llm_foundry
from explorer.plan.export.megatron import to_layout, to_megatron
from explorer.plan.export.memory_budget import to_memory_budget
from explorer.plan.export.mmengine import to_mmengine
from explorer.plan.export.olmo_core import to_olmo_core
from explorer.plan.export.primus import to_primus
from explorer.plan.export.torch_file import to_torch
from explorer.plan.export.torchrun import to_schedule_csv, to_stages
from explorer.plan.export.torchtitan import to_torchtitan
from explorer.plan.policy.pattern import is_pattern
from explorer.record.policy_file import Export, PolicyFile


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """One form: what `export --to NAME` writes."""

    name: str
    title: str
    write: Callable[[PolicyFile], Export]
    suffix: str = ".py"


_ROWS = (
    ExportFormat(name="torch", title="torch alone", write=to_torch),
    ExportFormat(name="fsdp2", title="torch with FSDP2", write=to_fsdp2),
    ExportFormat(name="memory-budget", title="torch.compile's memory budget", write=to_memory_budget),
    ExportFormat(name="stages", title="stages, as lists of blocks", write=to_stages, suffix=".json"),
    ExportFormat(name="schedule", title="schedule, for torch's pipelining", write=to_schedule_csv, suffix=".csv"),
    ExportFormat(name="huggingface", title="Hugging Face transformers", write=to_hugging_face),
    ExportFormat(name="diffusers", title="diffusers", write=to_diffusers),
    ExportFormat(name="lightning", title="Lightning", write=to_lightning),
    ExportFormat(name="torchtitan", title="torchtitan", write=to_torchtitan),
    ExportFormat(name="megatron", title="Megatron-LM", write=to_megatron, suffix=".txt"),
    ExportFormat(name="megatron-layout", title="Megatron-LM, pipeline layout", write=to_layout, suffix=".txt"),
    ExportFormat(name="primus", title="AMD Primus", write=to_primus, suffix=".yaml"),
    ExportFormat(name="flagscale", title="FlagScale", write=to_flagscale, suffix=".yaml"),
    ExportFormat(name="olmo-core", title="OLMo-core", write=to_olmo_core),
    ExportFormat(name="mmengine", title="MMEngine", write=to_mmengine),
    ExportFormat(name="llm-foundry", title="llm-foundry", write=to_llm_foundry, suffix=".yaml"),
    ExportFormat(name="composer", title="composer", write=to_composer),
    ExportFormat(name="deepspeed", title="DeepSpeed", write=to_deepspeed, suffix=".txt"),
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
    return FORMATS[name].write(file)
