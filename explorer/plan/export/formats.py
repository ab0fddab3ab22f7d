"""The targets of `export`, one row each, and the targets that take names or numbers of blocks.

`decoder.layers.3` is layer 3 of `decoder.layers`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import yaml
from msgspec.structs import replace

from explorer import slices
from explorer.errors import InvalidPolicy, nearest
from explorer.plan.export.python_files import to_fsdp2, to_hugging_face
from explorer.plan.export.target import ExportFormat, Target
from explorer.plan.export.torch_file import to_torch
from explorer.plan.policy.block_names import is_pattern
from explorer.record.files import Export, PolicyFile

NAMES = Target("names", "programs that take names or numbers of blocks")


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


_ROWS = (
    ExportFormat(name="torch", title="plain PyTorch", write=to_torch),
    ExportFormat(name="fsdp2", title="torch with FSDP2", write=to_fsdp2),
    ExportFormat(name="names", title="any other program: block names", write=to_names, suffix=".yaml"),
    ExportFormat(name="huggingface", title="Hugging Face transformers", write=to_hugging_face),
)
_ROWS_OF_SLICES: list[ExportFormat] = [row for part in slices.parts("plan.export").values() for row in part.ROWS]
FORMATS: dict[str, ExportFormat] = {row.name: row for row in (*_ROWS, *_ROWS_OF_SLICES)}


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
