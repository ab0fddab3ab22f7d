"""A Python file that applies the policy with torch alone, for a training image without the explorer.

The file is made of the engine's own source, which needs torch alone: units, segments, offloading, generators. Only the
records of a policy and `apply_checkpointing` are written here. The file has no undo.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from explorer.plan.export.target import Target
from explorer.record.files import Evidence, Export, PolicyFile
from explorer.record.policy import Policy

_OPTIONS = (
    "preserve_rng_state", "use_reentrant", "determinism_check", "early_stop", "running_stats", "restore_rng"
)  # fmt: skip
_ENGINE = Path(__file__).parents[2] / "engine"
_SOURCES = {
    "policy/units.py": (),
    "policy/segments.py": (),
    "policy/offload.py": (),
    "state/rng.py": ("TORCH_CPU", "PYTHON", "NUMPY", "OutsideRng", "get_state", "set_state", "of_process"),
}
"""Files of the engine, and the definitions to take; all of them if none is named."""
_TEMPLATE = '''\
"""Activation checkpointing of one model, as decided with Checkpoint Explorer. Needs torch alone.

    from this_file import apply_checkpointing
    apply_checkpointing(model)      # once, after the model is built and before it is compiled or wrapped
"""

from __future__ import annotations

@IMPORTS@

@ORIGIN@

class Unit(NamedTuple):
    blocks: tuple[str, ...]  # several: siblings that follow each other
    action: str
    save_ops: tuple[str, ...]


class Policy(NamedTuple):
    preserve_rng_state: bool
    use_reentrant: bool
    determinism_check: str
    early_stop: bool
    running_stats: str
    restore_rng: tuple[str, ...]


class InvalidPolicy(ValueError):
    def __init__(self, sentence: str, *, hint: str, neighbours: tuple[str, ...]) -> None:
        super().__init__(f"{sentence} {hint}")
        self.neighbours = neighbours


@DECISION@


def apply_checkpointing(model: nn.Module) -> nn.Module:
    """Recomputes the units in backward, in place. Names, state_dict, isinstance, deepcopy and pickle stay the same."""
    modules = dict(model.named_modules(remove_duplicate=False))
    missing = [fqn for unit in UNITS for fqn in unit.blocks if fqn not in modules]
    if missing:
        raise ValueError(f"the model has no block {', '.join(missing)}: this file was made for another model")
    names = tuple(name for name in POLICY.restore_rng if name in ("python", "numpy"))
    paths = [path.rpartition(".") for path in POLICY.restore_rng if path not in names]
    outside = OutsideRng(names, tuple(getattr(modules[fqn], name) for fqn, _, name in paths))
    for module, name, function in replacements(modules, [Wrap(unit, POLICY, outside) for unit in UNITS]):
        module.__dict__[name] = function
    return model
@ENGINE@'''


def to_torch(file: PolicyFile) -> Export:
    """Names and numbers from the policy are written as Python literals, never as code."""
    imports, engine = _engine_source()
    fillings = {
        "@ORIGIN@\n": _origin(file),
        "@DECISION@": _decision(file.policy),
        "@IMPORTS@": imports,
        "@ENGINE@": engine,
    }
    # In one pass: a block may be called @ORIGIN@.
    text = re.sub("|".join(fillings), lambda mark: fillings[mark[0]], _TEMPLATE)
    target = Target("torch", "torch 2.11 to 2.13", whole=True)
    return target.exported(file.policy, text)


@cache
def _engine_source() -> tuple[str, str]:
    """Imports and code of the engine, the same in every file."""
    sources = {path: re.sub(r"  # type: ignore.*", "", (_ENGINE / path).read_text()) for path in _SOURCES}
    engine = "".join(f"\n\n{_code(text, _SOURCES[path])}\n" for path, text in sources.items())
    return _imports("".join(sources.values()), set(re.findall(r"\w+", _TEMPLATE + engine))), engine


def _code(text: str, names: tuple[str, ...]) -> str:
    """The definitions of a source file by name, or all that follows its imports, with its docstring as a comment."""
    tree, lines = ast.parse(text), text.splitlines()
    if not names:
        last = max(node.end_lineno or 0 for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))
        comment = [f"# {line}".rstrip() for line in (ast.get_docstring(tree) or "").splitlines()]
        return "\n".join([*comment, "", *lines[last:]]).replace("\n\n\n\n", "\n\n\n")
    definitions = []
    for node in tree.body:
        name = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else getattr(node, "name", "")
        if name in names:
            first = min([node.lineno, *(line.lineno for line in getattr(node, "decorator_list", ()))])
            definitions.append("\n".join(lines[first - 1 : node.end_lineno]))
    return "\n\n\n".join(definitions)


def _imports(text: str, words: set[str]) -> str:
    """The imports of source files that bind one of `words`, without those of this package."""
    modules: dict[str, set[str]] = defaultdict(set, {"typing": {"NamedTuple"}})
    plain = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            plain |= {f"import {alias.name}" for alias in node.names if alias.name.partition(".")[0] in words}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("explorer", "__future__")):
            modules[node.module or ""] |= {alias.name for alias in node.names if alias.name in words}
    named = [f"from {module} import {', '.join(sorted(names))}" for module, names in modules.items() if names]
    lines = sorted((*plain, *named), key=lambda line: (" torch" in line, line.startswith("from"), line))
    return "\n".join(lines)


def _decision(policy: Policy) -> str:
    units = [f"    Unit({unit.blocks!r}, {unit.action!r}, {unit.save_ops!r}),\n" for unit in policy.units]
    options = [f"    {name}={getattr(policy, name)!r},\n" for name in _OPTIONS]
    return f"UNITS = [\n{''.join(units)}]\nPOLICY = Policy(\n{''.join(options)})"


def _origin(file: PolicyFile) -> str:
    """Comment lines: what it was made for and what was measured. A name cannot end the comment."""
    lines = []
    if file.model is not None:
        size = f", size {file.model.size}" if file.model.size else ""
        fingerprint = f", fingerprint {file.fingerprint}" if file.fingerprint else ""
        lines.append(f"Made for {file.model.target}{size}{fingerprint}")
    if file.evidence is not None:
        lines += _measured(file.evidence)
    return "".join(f"# {' '.join(line.split())}.\n" for line in lines)


def _measured(evidence: Evidence) -> list[str]:
    lines = [f"Measured on {evidence.device} with torch {evidence.torch_version}"]
    if evidence.step_peak_bytes is not None:
        base = f" instead of {evidence.baseline_step_peak_bytes:,}" if evidence.baseline_step_peak_bytes else ""
        base += f" with {len(evidence.baseline_policy.blocks)} blocks recomputed" if evidence.baseline_policy else ""
        lines.append(f"Step peak {evidence.step_peak_bytes:,} bytes{base}")
    if evidence.time_ratio is not None:
        spread = f" +- {evidence.time_ratio_spread:.2f}" if evidence.time_ratio_spread is not None else ""
        lines.append(f"Step time x{evidence.time_ratio:.2f}{spread}")
    if evidence.verdict is not None:
        lines.append(f"Gradients and buffers: {evidence.verdict}")
    return lines
