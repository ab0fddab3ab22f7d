"""Parameters that are gathered twice.

FSDP2 leaves each rank a share of every parameter. Before a unit runs, all ranks gather its whole parameters; after it
has run, they are freed. Backward multiplies by the same parameters, so it needs them a second time.

Checkpointing runs a layer again in backward. That rerun needs whole parameters too, and so does the backward of the
layer right after it. Whether one gather serves both depends on where the checkpoint stands: inside a unit, or around
several small ones. FSDP2's `reshard_after_forward=False` keeps what forward gathered, for its price in memory.

Two real processes train the same net here and exchange tensors by gloo. Every collective of a step is counted by phase.
"""

from __future__ import annotations

from typing import Literal

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from explorer.engine.ranks.real import measure_ranks
from explorer.errors import NotOnThisDevice
from explorer.lab.engine.kit.bench import Answer, LabBench, Setting
from explorer.lab.engine.kit.rows import chart, counted, line, measured
from explorer.lab.record import LabRow
from explorer.plan.memory.ledger import ledger
from explorer.plan.sizes import mib
from explorer.plan.why.collectives import sent_bytes
from explorer.record.allocations import Phase
from explorer.record.graph import ModelRef
from explorer.record.measurement import Measurement
from explorer.record.policy import KEEP_ALL, Policy, Unit
from explorer.record.run import Ranks, RunSpec

THEME = "Wrapped blocks"
QUESTION = "How often does FSDP2 gather a parameter in one step?"
SWITCHES = {
    "rerun": (
        "What does backward run again?",
        {"layers": "Every layer", "pairs": "Two layers as one segment", "nothing": "Nothing"},
    ),
    "units": ("What is a unit of FSDP2?", {"layers": "A layer", "parts": "Each half of a layer, inside a checkpoint"}),
}
WORDS = ("recompute", "segment", "saved activations")

N_LAYERS, N_RANKS, WIDTH, BATCH = 4, 2, 128, 16
POLICIES = {
    "layers": Policy.recompute([str(i) for i in range(N_LAYERS)]),
    "pairs": Policy(units=(Unit(blocks=("0", "1")), Unit(blocks=("2", "3")))),
    "nothing": KEEP_ALL,
}
FREED, HELD = "freed after forward", "held until backward"
PHASES: tuple[Literal["forward", "recompute", "backward"], ...] = ("forward", "recompute", "backward")


def build() -> tuple[nn.Module, Tensor]:
    """Layers of two halves, and a batch that is small beside them."""
    return nn.Sequential(*(nn.Sequential(_half(), _half()) for _ in range(N_LAYERS))), torch.randn(BATCH, WIDTH)


def _half() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())


def shard_halves(model: nn.Module, mesh: DeviceMesh) -> None:
    """Each half of a layer is a unit."""
    _shard(model, mesh, reshard=True)


def shard_halves_held(model: nn.Module, mesh: DeviceMesh) -> None:
    """The same; what forward gathered stays."""
    _shard(model, mesh, reshard=False)


def _shard(model: nn.Module, mesh: DeviceMesh, *, reshard: bool) -> None:
    for unit in (*(half for layer in model.children() for half in layer.children()), model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)


def run(setting: Setting, bench: LabBench) -> Answer:
    """One step on two ranks, with gathered parameters freed and with them held."""
    if bench.device.type != "cpu":
        raise NotOnThisDevice("The ranks of this lesson exchange tensors by gloo, on the CPU.", hint="Take the CPU.")
    policy = POLICIES[setting["rerun"]]
    rows: list[LabRow] = []
    steps: dict[str, Measurement] = {}
    for label, reshard in ((FREED, True), (HELD, False)):
        bench.tell(f"two ranks, {label}", len(rows), 2)
        steps[label] = measure_ranks(_spec(policy, setting["units"], reshard=reshard), bench.report).fullest
        rows.append(_row(label, steps[label]))
    gathered = [line(phase, [_gathered(step, phase) for step in steps.values()], phase) for phase in PHASES]
    titles = ("When are whole parameters gathered?", "gathered parameters are", "gathered in one step")
    return Answer(tuple(rows), chart("stacked bars", titles, list(steps), gathered, "bytes"), _findings(steps))


def _spec(policy: Policy, units: str, *, reshard: bool) -> RunSpec:
    spec = RunSpec(
        model=ModelRef(target=f"{__file__}:build"), policy=policy, ranks=Ranks(n_ranks=N_RANKS, reshard=reshard)
    )
    if units == "layers":
        return spec
    function = (shard_halves if reshard else shard_halves_held).__name__
    return replace(spec, ranks=Ranks(n_ranks=N_RANKS, data="none", parallelize=f"{__file__}:{function}"))


def _gathered(step: Measurement, phase: Phase) -> int:
    return sum(call.n_bytes for call in step.collectives if call.kind == "all-gather" and call.phase == phase)


def _row(label: str, step: Measurement) -> LabRow:
    calls = [call for call in step.collectives if call.kind == "all-gather"]
    counts = (counted(f"gathers in {phase}", sum(call.phase == phase for call in calls)) for phase in PHASES)
    figures = (
        *counts,
        counted("sent by a rank", sent_bytes(step), "bytes"),
        measured("peak", step.step_peak_bytes, "bytes"),
        measured("gathered parameters at the peak", ledger(step).by_role["gathered parameter"], "bytes"),
    )
    return LabRow(label=label, outcome="baseline" if label == FREED else "shown", figures=figures)


def _findings(steps: dict[str, Measurement]) -> tuple[str, ...]:
    """How often a parameter is gathered, what part of it the rerun asks for, and the price of holding it."""
    by_phase = {label: [_gathered(step, phase) for phase in PHASES] for label, step in steps.items()}
    times = {label: sum(sizes) / by_phase[HELD][0] for label, sizes in by_phase.items()}
    rerun_bytes = by_phase[FREED][PHASES.index("recompute")]
    saved = sent_bytes(steps[FREED]) - sent_bytes(steps[HELD])
    more = (steps[HELD].step_peak_bytes or 0) - (steps[FREED].step_peak_bytes or 0)
    findings = [f"Gathers of each parameter in a step: {times[FREED]:.3g} {FREED}, {times[HELD]:.3g} {HELD}."]
    if steps[FREED].recompute_flops:
        of_rerun = f"Reruns gather {mib(rerun_bytes)}" if rerun_bytes else "Reruns gather nothing"
        findings.append(
            f"{of_rerun} by themselves: one gather serves the rerun of a unit and its backward."
            if times[FREED] <= 2
            else f"{of_rerun}, and backward gathers that again."
        )
    peak = "raises" if more > 0 else "lowers"
    findings.append(f"Holding them sends {mib(saved)} less a rank and {peak} the peak by {mib(abs(more))}.")
    return tuple(findings)
