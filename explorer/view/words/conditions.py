"""Under which conditions a run ran, in a few words: only runs under the same ones can be held against each other."""

from __future__ import annotations

from pathlib import Path

from explorer.record.run import RunSpec
from explorer.view.drawing.units import count


def conditions(spec: RunSpec) -> str:
    """`small, batch=4, cpu, bfloat16 autocast`: size, arguments, device, and what is not as it usually is."""
    model, usual = spec.model, RunSpec(model=spec.model)
    named = [model.size or "", *(f"{name}={value}" for name, value in sorted(model.arguments.items()))]
    named += [f"weights {Path(model.weights).name}" if model.weights else "", spec.device]
    named += ["" if spec.dtype == usual.dtype else spec.dtype]
    named += ["" if spec.autocast == usual.autocast else f"{spec.autocast} autocast"]
    named += ["" if spec.mode == usual.mode else f"{spec.mode} mode", "forward alone" if spec.forward_only else ""]
    named += ["" if spec.optimizer == usual.optimizer else f"optimizer {spec.optimizer}"]
    named += [f"momentum {spec.momentum:g}" if spec.optimizer == "sgd" and spec.momentum else ""]
    named += ["" if spec.n_accumulation == 1 else f"{spec.n_accumulation} microbatches"]
    named += [f"frozen {', '.join(spec.frozen)}" if spec.frozen else ""]
    named += ["" if spec.n_threads == usual.n_threads else count(spec.n_threads, "thread")]
    return ", ".join(filter(None, named))
