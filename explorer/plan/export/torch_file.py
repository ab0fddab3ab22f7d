"""A Python file that applies the policy with torch alone, for a training image without the explorer.

It says the same as explorer.apply_policy, with one thing less: there is no undo. How segments run where no Sequential
runs them it takes word for word from the engine's own file, which needs torch alone.
"""

from __future__ import annotations

import re
from pathlib import Path

from explorer.plan.export.target import Target
from explorer.plan.export.torch_text import ERROR, TEMPLATE
from explorer.record.policy import Policy
from explorer.record.policy_file import Evidence, Export, PolicyFile

TORCH = Target(
    name="torch",
    written_for="torch 2.11 to 2.13",
    options=Policy.__struct_fields__[1:],
    actions=("recompute", "save_ops", "offload"),
    segments=True,
    checked="executed",
)


def to_torch(file: PolicyFile) -> Export:
    return TORCH.exported(file.policy, _text(file))


def _text(file: PolicyFile) -> str:
    """Names and numbers from the policy are written as Python literals, never as code."""
    fillings = {"@ORIGIN@\n": _origin(file), "@DECISION@": _decision(file.policy), **_in_turn()}
    # In one pass: a block may be called @ORIGIN@.
    return re.sub("|".join(fillings), lambda mark: fillings[mark[0]], TEMPLATE)


def _decision(policy: Policy) -> str:
    units = [f"    ({unit.blocks!r}, {unit.action!r}, {unit.save_ops!r}),\n" for unit in policy.units]
    options = {
        "PRESERVE_RNG_STATE": policy.preserve_rng_state,
        "USE_REENTRANT": policy.use_reentrant,
        "DETERMINISM_CHECK": policy.determinism_check,
        "EARLY_STOP": policy.early_stop,
        "RUNNING_STATISTICS_ONCE": policy.running_stats == "once",
        "RESTORE_RNG": policy.restore_rng,
    }
    lines = [f"{name} = {value!r}" for name, value in options.items()]
    return f"UNITS = [\n{''.join(units)}]\n" + "\n".join(lines)


def _origin(file: PolicyFile) -> str:
    """Comment lines: what it was made for and what was measured. A name cannot end the comment."""
    lines = []
    if file.model is not None:
        size = f", size {file.model.size}" if file.model.size else ""
        lines.append(
            f"Made for {file.model.target}{size}" + (f", fingerprint {file.fingerprint}" if file.fingerprint else "")
        )
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


_IN_TURN = Path(__file__).parents[2] / "engine" / "policy" / "in_turn.py"


def _in_turn() -> dict[str, str]:
    """Imports and code of the engine's file; its docstring becomes a comment, its errors ValueErrors."""
    _, docstring, code = _IN_TURN.read_text().split('"""', maxsplit=2)
    lines = re.sub(r"  # type: ignore.*", "", code).splitlines()
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    there = "".join(line for line in TEMPLATE.splitlines(keepends=True) if line.startswith(("import ", "from ")))
    missing = [f"{line}\n" for line in imports if line not in there and "explorer" not in line]
    body = "\n".join(line for line in lines if line not in imports).strip("\n")
    comment = "\n".join(f"# {line}".rstrip() for line in docstring.splitlines())
    return {
        "@STANDARD@\n": "".join(line for line in missing if "torch" not in line),
        "@TORCH@\n": "".join(line for line in missing if "torch" in line),
        "@IN_TURN@\n": f"\n\n{comment}\n{ERROR}\n\n{body}\n",
    }
