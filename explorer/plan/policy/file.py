"""The policy file: what a person leaves with and a training script applies. YAML, strict, exact in both directions.

version: 1
model: {target: sample_models/gpt.py, size: small, fingerprint: 1f0c..., blocks: {blocks.*: 12, ...}}
policy:
  units:
  - blocks.0                          one block
  - blocks.*.mlp                      each block that matches; a block that is named elsewhere is left to that unit
  - [stem.1, stem.2]                  a segment: blocks that hand on to each other, recomputed together
  - {blocks: [blocks.3], action: save_ops, save_ops: [aten.mm.default]}
  use_reentrant: false                torch.utils.checkpoint's options under torch's names
pipeline: {...}                       optional
ranks: {...}                          the split over ranks that a plan was made for, resharding included
evidence: {...}                       what was measured, with units in the names
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from typing import Any, TypeVar

import yaml

from explorer.errors import BadInput, UnreadableFile
from explorer.plan.policy.block_names import shape_of
from explorer.plan.policy.strict_yaml import LARGEST_BYTES, Document
from explorer.plan.policy.strict_yaml import Path as Where
from explorer.record.base import Record, from_plain, to_plain
from explorer.record.bounded_file import read_text
from explorer.record.comparison import Comparison
from explorer.record.files import Evidence, PolicyFile
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.policy import Policy, Unit
from explorer.record.run import PipelinePlan, Ranks

T = TypeVar("T")
VERSION = 1
_HEADER = """\
# A policy of Checkpoint Explorer: what is recomputed in backward instead of being kept.
#   policy = explorer.load_policy("policy.yaml")
#   explorer.apply_policy(model, policy)
"""
_SECTIONS: dict[str, type[Record]] = {
    "policy": Policy,
    "model": ModelRef,
    "pipeline": PipelinePlan,
    "ranks": Ranks,
    "evidence": Evidence,
}
_FIELDS = ("version", *_SECTIONS)
_OF_GRAPH = ("fingerprint", "blocks")
"""Fields of the section `model` that say what the model was like, beside how it is loaded."""
_MOST_FAULTS = 20
"""Told at once; further ones are not looked for."""
_AT = re.compile(r" - at `(?:key in )?`?\$(.*)`$")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|\[\.\.\.\]")


def file_of(
    policy: Policy,
    graph: ModelGraph,
    *,
    plan: PipelinePlan | None = None,
    ranks: Ranks | None = None,
    evidence: Evidence | None = None,
) -> PolicyFile:
    """The file of a policy that was made for the model of `graph`."""
    return PolicyFile(
        policy=policy,
        model=graph.model,
        fingerprint=graph.fingerprint,
        blocks=shape_of(block.fqn for block in graph.blocks),
        pipeline=plan,
        ranks=ranks,
        evidence=evidence,
    )


def dumps(file: PolicyFile) -> str:
    """The file's text. `loads` gives back exactly what went in."""
    document: dict[str, object] = {"version": VERSION}
    of_graph = {"fingerprint": file.fingerprint, "blocks": file.blocks or None}
    about = {**(_stated(file.model) if file.model else {}), **of_graph}
    if any(value is not None for value in about.values()):
        document["model"] = {name: value for name, value in about.items() if value is not None}
    document["policy"] = {**to_plain(file.policy), "units": [_short(unit) for unit in file.policy.units]}
    for name in ("pipeline", "ranks", "evidence"):
        if (section := getattr(file, name)) is not None:
            document[name] = _stated(section)
    body = yaml.dump(document, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=100)
    return _HEADER + body


def loads(text: str) -> PolicyFile:
    """Strict: unknown fields, wrong types, doubled keys and unknown versions raise UnreadableFile, all that a section
    shows at once, each with its line."""
    return in_document(Document(text))


def in_document(document: Document) -> PolicyFile:
    """The same of a text that has been parsed."""
    plain = document.plain
    if not isinstance(plain, dict) or "version" not in plain:
        raise UnreadableFile(
            "This is not a policy file: it has no field `version`.", hint="A policy file begins with `version: 1`."
        )
    if plain["version"] != VERSION or isinstance(plain["version"], bool):
        raise UnreadableFile(
            f"line {document.line(('version',))}: the policy file has version {plain['version']}; "
            f"this release reads version {VERSION}.",
            hint="Update Checkpoint Explorer, or export the policy again.",
        )
    reader = _Reader(document)
    file = reader.file(plain)
    if faults := reader.faults:
        sentences = "; ".join(faults[:_MOST_FAULTS]) + ("; and more" if len(faults) > _MOST_FAULTS else "")
        raise UnreadableFile(f"The policy file cannot be used: {sentences}.", hint="Mend these lines and try again.")
    return file


def load(path: str | os.PathLike[str]) -> PolicyFile:
    """The whole file at `path`. Raises UnreadableFile."""
    return read_from(path, loads)


def read_from(path: str | os.PathLike[str], read: Callable[[str], T]) -> T:
    """What `read` makes of the text at `path`, whose name every error begins with."""
    hint = "`python -m explorer compare MODEL --policy PRESET --out FILE` writes a policy file."
    text = read_text(path, LARGEST_BYTES, hint=hint)
    try:
        return read(text)
    except BadInput as error:
        raise type(error)(f"{path}: {error.sentence}", hint=error.hint) from error


def load_policy(path: str | os.PathLike[str]) -> Policy:
    """The policy in the file at `path`, for `explorer.apply_policy`, which warns where the model was another one then.

    Raises UnreadableFile.
    """
    file = load(path)
    return file.policy.with_model_blocks(file.blocks)


class _Reader:
    """Makes records of the parsed values of a document, and collects its faults, each with its line."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self.faults: list[str] = []

    def file(self, plain: dict[str, object]) -> PolicyFile:
        self._known(plain, _FIELDS, ())
        if "policy" not in plain:
            self.faults.append("the field policy is missing")
        elif plain["policy"] is None:
            self._fault(("policy",), "policy is empty; to recompute nothing, write policy: {}")
        sections = {name: plain[name] for name in _SECTIONS if plain.get(name) is not None}
        fields: dict[str, Any] = {}
        if isinstance(model := sections.get("model"), dict):
            fields = {name: model[name] for name in _OF_GRAPH if model.get(name) is not None}
            sections["model"] = {key: value for key, value in model.items() if key not in _OF_GRAPH}
            if not isinstance(fields.get("fingerprint", ""), str):
                self._fault(("model", "fingerprint"), "fingerprint must be text; put it in quotes")
            counts = fields.get("blocks", {})
            if not isinstance(counts, dict) or any(type(n) is not int for n in counts.values()):
                self._fault(("model", "blocks"), "blocks must be names, each with a number")
            if not sections["model"]:
                del sections["model"]
        fields |= {name: self._section(name, section) for name, section in sections.items()}
        return PolicyFile(policy=Policy()) if self.faults else PolicyFile(**fields)

    def _fault(self, where: Where, sentence: str) -> None:
        self.faults.append(f"line {self._document.line(where)}: {sentence}")

    def _known(self, plain: dict[str, object], names: tuple[str, ...], where: Where) -> dict[str, object]:
        """The fields of `plain` that have one of `names`; every other field is a fault."""
        for key in [key for key in plain if key not in names][: _MOST_FAULTS + 1]:
            close = get_close_matches(key[:100], names, n=1)
            meant = f" (did you mean {close[0]}?)" if close else f" (there are {', '.join(names)})"
            self._fault((*where, key), f"unknown field {_dotted((*where, key))}{meant}")
        return {key: value for key, value in plain.items() if key in names}

    def _section(self, name: str, section: object) -> Record | None:
        kind = _SECTIONS[name]
        if not isinstance(section, dict):
            line = self._document.line((name,))
            self.faults.append(f"line {line}: {name} must have fields, and is {section!r}"[:200])
            return None
        fields = self._known(section, kind.__struct_fields__, (name,))
        if kind is Policy and isinstance(units := fields.get("units"), list):
            read = [self._unit(i, unit) for i, unit in enumerate(units)]
            fields["units"] = [to_plain(unit) for unit in read if unit is not None]
        return self._record(fields, kind, (name,))

    def _unit(self, index: int, plain: object) -> Record | None:
        where: Where = ("policy", "units", index)
        if len(self.faults) > _MOST_FAULTS:
            return None
        if isinstance(plain, str):
            return Unit(blocks=(plain,))
        if isinstance(plain, dict):
            return self._record(self._known(plain, Unit.__struct_fields__, where), Unit, where)
        return self._record({"blocks": plain}, Unit, where, left_out=("blocks",))

    def _record(self, plain: object, kind: type[Record], where: Where, left_out: Where = ()) -> Record | None:
        """The record that stands `where`; None, and a fault, if it is none. `left_out`: steps that the file lacks."""
        try:
            return from_plain(plain, kind)
        except UnreadableFile as error:
            complaint = str(error.__cause__)
            steps, what = tuple[str | int, ...](), complaint
            if at := _AT.search(complaint):
                steps, what = tuple(_steps(at[1])), complaint[: at.start()]
            if steps[: len(left_out)] == left_out:
                steps = steps[len(left_out) :]
            path = (*where, *steps)
            self._fault(path, f"{_dotted(path)}: {what.replace('`', '')}")
            return None


def _steps(path: str) -> Iterator[str | int]:
    for step in _STEP.finditer(path):
        if step[1] is not None:
            yield step[1]
        elif step[2] is not None:
            yield int(step[2])


def _dotted(path: Where) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")


def _stated(record: Record) -> dict[str, object]:
    """Without the fields that are None, which is what a reader takes for a field that is not there."""
    return {name: value for name, value in to_plain(record).items() if value is not None and value != {}}


def _short(unit: Unit) -> object:
    if unit != Unit(blocks=unit.blocks):
        return to_plain(unit)
    return unit.blocks[0] if len(unit.blocks) == 1 else list(unit.blocks)


class _Plain(yaml.SafeDumper):
    """No anchors: the same list written twice is written out twice. Short lists of scalars stand on one line."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_sequence(
        self, tag: str, sequence: Iterable[object], flow_style: bool | None = None
    ) -> yaml.SequenceNode:
        items = list(sequence)
        flow = all(isinstance(item, bool | int | float | str) for item in items) and len(items) <= 8
        return super().represent_sequence(tag, items, flow_style=flow)

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # Between single quotes PyYAML folds U+0085 like a line break, and reads back a space.
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if data.isprintable() else '"')


_Plain.add_representer(str, _Plain.represent_str)


def evidence_of(comparison: Comparison, graph: ModelGraph | None = None) -> Evidence | None:
    """The evidence from the figures that the page and `--json` show. `graph` gives the shapes of the batch.

    None if a run was cut short or only predicted, because such a run proves nothing.
    """
    if not comparison.comparable or comparison.is_predicted:
        return None
    figures = comparison.headlines()
    baseline, candidate = figures["baseline"], figures["candidate"]
    return Evidence(
        device=comparison.candidate.environment.device_name,
        torch_version=comparison.candidate.environment.torch_version,
        input_shapes=graph.input_shapes if graph else (),
        step_peak_bytes=candidate["step_peak_bytes"],
        baseline_step_peak_bytes=baseline["step_peak_bytes"],
        saved_after_forward_bytes=candidate["saved_after_forward_bytes"],
        baseline_saved_after_forward_bytes=baseline["saved_after_forward_bytes"],
        time_ratio=figures["time_ratio"],
        time_ratio_spread=figures["time_ratio_spread"],
        flop_ratio=figures["flop_ratio"],
        baseline_policy=comparison.baseline.spec.policy if comparison.baseline.spec.policy.units else None,
        verdict=comparison.verdict,
    )
