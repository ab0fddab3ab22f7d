"""Runs the judging half of `compare` on a tiny model, without the measuring half."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from explorer.engine.compare.compare import with_causes
from explorer.engine.compare.judgement import judge_programs
from explorer.engine.compare.spec_program import SpecProgram
from explorer.engine.model.load import load_for
from explorer.engine.state.global_state import deterministic_kernels, preserve_global_state
from explorer.record.comparison import Comparison
from explorer.record.measurement import Environment, Measurement
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from tests.engine import rerun_nets, trap_nets

WHERE = Environment(device="cpu", device_name="cpu", torch_version="", python_version="", platform="", n_threads=1)


def pair(net: str, blocks: Sequence[Any] = ("1", "2"), *, run: dict[str, Any] | None = None, **options: Any) -> Any:
    """(baseline, candidate) of one of trap_nets or rerun_nets; `net` may carry arguments: `planted wrong=nan`."""
    name, *words = net.split()
    arguments = dict(word.split("=") for word in words)
    plain: dict[str, Any] = {key: {"True": True, "False": False}.get(value, value) for key, value in arguments.items()}
    nets = rerun_nets if hasattr(rerun_nets, name) else trap_nets
    baseline = RunSpec(model=nets.ref(name, **plain), **{"n_repeats": 1, **(run or {})})
    policy = options.pop("policy", None) or Policy.recompute(blocks, **options)
    return baseline, msgspec.structs.replace(baseline, policy=policy)


_judged: dict[str, Comparison] = {}


def judged(net: str, blocks: Sequence[Any] = ("1", "2"), *, full: bool = True, **options: Any) -> Comparison:
    """The comparison of `pair(...)`, with empty measurements. Equal pairs are judged once a process."""
    key = repr((net, blocks, full, options))
    if key not in _judged:
        _judged[key] = judged_pair(*pair(net, blocks, **options), full=full)
    return _judged[key]


def judged_pair(baseline: RunSpec, candidate: RunSpec, *, full: bool = True) -> Comparison:
    """The judging half on any two specs."""
    empty = [Measurement(spec=spec, environment=WHERE) for spec in (baseline, candidate)]
    with preserve_global_state(), deterministic_kernels():
        program = SpecProgram(baseline, load_for(baseline))
        comparison = Comparison(baseline=empty[0], candidate=empty[1])
        return with_causes(judge_programs(comparison, program, program.under(candidate), full=full))
