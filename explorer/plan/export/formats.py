"""The targets of `export`, one row each: what each is called and the function that writes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from explorer.errors import InvalidPolicy, nearest
from explorer.plan.export.layers import to_layout, to_megatron, to_names
from explorer.plan.export.python_files import (
    to_diffusers,
    to_fsdp2,
    to_hugging_face,
    to_lightning,
    to_torch_remat,
    to_torchtitan,
)
from explorer.plan.export.torch_file import to_torch
from explorer.plan.export.torchrun import to_schedule_csv, to_stages
from explorer.plan.policy.block_names import is_pattern
from explorer.record.files import Export, PolicyFile


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
