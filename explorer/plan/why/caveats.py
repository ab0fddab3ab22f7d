"""Caveats beside a figure: bytes that a peak leaves out, reasons against a forecast, and reruns by the model itself.

A model runs forwards again by itself when it checkpoints its own blocks inside backward, without a policy.
"""

from __future__ import annotations

import re
from collections import defaultdict

from msgspec.structs import replace

from explorer.plan.card.torch_rules import CUBLAS_SETTING, changed_workspace
from explorer.plan.memory.ledger import ledger
from explorer.plan.names import listed, outermost, some
from explorer.plan.predict.calls import results_of_views
from explorer.plan.predict.not_predicted import approximate, no_baseline, not_predicted
from explorer.plan.sizes import mib
from explorer.record.allocations import ROLES
from explorer.record.base import column
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.plan import Forecast
from explorer.record.policy import Policy

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""The number of a layer in a list: `layers.*.mlp` is the place of `layers.3.mlp`."""
LARGE_SHARE = 0.05
"""Share of a peak above which the unattributed bytes are mentioned."""

LEFT_SHARE = 0.25
"""Share of a peak above which the results of an earlier step are mentioned."""


def peak_caveats(run: Measurement) -> tuple[str, ...]:
    """Sentences on the limits of the peak of a run."""
    log = run.allocations
    if log is None or not run.complete:
        return tuple(filter(None, [_left(run)]))
    as_written = (
        "torch.compile was off in this step, so that its blocks could be seen: compiled code ran as it is "
        "written, and a compiled step has another peak."
    )
    sentences = [as_written] if run.ran_as_written else []
    sentences.append(stayed_on_cpu(run))
    sentences += [_workspaces(run), _unwatched(run), _left(run), bytes_outside(run)]
    if run.ran_compiled:
        sentences.insert(0, COMPILED)
    else:
        sentences += [_unattributed(run), _of_the_library(run, log.ops), _one_draw(run)]
    return tuple(filter(None, sentences))


def stayed_on_cpu(run: Measurement) -> str:
    """A sentence on offloaded blocks of a script's own step on a CPU, where nothing moves; empty if there are none."""
    blocks = tuple(fqn for unit in run.spec.policy.units if unit.action == "offload" for fqn in unit.blocks)
    if not blocks or run.origin != "recorded" or run.spec.device != "cpu" or run.peaks.offloaded_peak_bytes:
        return ""
    return (
        f"The policy offloads {some(blocks)}, and on a CPU nothing moves: the step held what it holds with them kept. "
        "Record it on a GPU, or by `run --card h100` on the imaginary card."
    )


COMPILED = (
    "The step ran compiled, as without the recorder: the bytes are the allocator's, and compiled code has no blocks. "
    "Record a step with TORCH_COMPILE_DISABLE=1 to see blocks and to plan."
)
DDP_BUCKETS = (
    "The peak is at least this figure: DistributedDataParallel holds its buckets in C++, up to one more copy of the "
    "gradients."
)
"""Also a warning of a recorded step whose model lies inside of a wrapper that the recording was not given."""


WORK_OF_CONVOLUTIONS = (
    "The peak is at least this figure: oneDNN's work memory for convolutions is not in it. Nets that were measured "
    "held 0 to 1 % more in float32, and 6 to 67 % more in bfloat16."
)


def bytes_outside(run: Measurement) -> str:
    """A sentence on memory that a peak does not include, so that the figure is a lower bound; empty: none."""
    log = run.allocations
    if run.origin == "measured" or run.card is not None or log is None:
        return ""
    convolves = run.spec.device == "cpu" and any("convolution" in op for op in log.ops)
    if run.origin == "predicted":  # a forecast has the work memory of the measured run
        return WORK_OF_CONVOLUTIONS if convolves and ROLES.index("unattributed") not in log.role else ""
    inside = run.graph is not None and any(block.kind == "DistributedDataParallel" for block in run.graph.blocks)
    if inside or DDP_BUCKETS in run.warnings:
        return DDP_BUCKETS
    if convolves:
        return "The peak is at least this figure: oneDNN holds memory for convolutions that no instrument here sees."
    return ""


def _workspaces(run: Measurement) -> str:
    """A sentence on the step under torch's own workspaces of cuBLAS, where a setting changes them."""
    log, changed = run.allocations, changed_workspace(run.environment)
    held_bytes = ledger(run).by_role["cuBLAS workspace"]
    if log is None or changed is None or not held_bytes:
        return ""
    setting, n_bytes, default_bytes = changed
    role = ROLES.index("cuBLAS workspace")
    sizes = [default_bytes if pair == (role, n_bytes) else pair[1] for pair in zip(log.role, log.n_bytes)]
    default = replace(run, allocations=replace(log, n_bytes=column(sizes)))
    return (
        f"cuBLAS holds {mib(held_bytes)} of the peak, because {CUBLAS_SETTING} is {setting} here. With torch's default "
        f"the step peaks at {mib(default.step_peak_bytes)}, and cuBLAS holds "
        f"{mib(ledger(default).by_role['cuBLAS workspace'])} of it."
    )


def _unwatched(run: Measurement) -> str:
    """A sentence on models of the step that the record does not know."""
    if not run.unwatched_parameter_bytes:
        return ""
    return (
        f"{mib(run.unwatched_parameter_bytes)} of parameters that this step trains are in no module of the record. "
        "What their modules save is in the total, and in no block's share. Give all models by name: "
        "record_step({'encoder': encoder, 'decoder': decoder})."
    )


def _left(run: Measurement) -> str:
    """A sentence where an earlier step made much of the peak. PyTorch's FAQ, "My out of memory exception handler can't
    allocate memory": a traceback refers to every variable of its frames."""
    if run.left_bytes <= LEFT_SHARE * (run.held_peak_bytes or 0):
        return ""
    return (
        f"{mib(run.left_bytes)} of the peak are results of an earlier forward, held by a variable or by the traceback "
        "of a caught error: `del` them, and try again outside of `except`."
    )


def _unattributed(run: Measurement) -> str:
    at = ledger(run)
    share = at.by_role["unattributed"] / max(at.total_bytes, 1)
    if share <= LARGE_SHARE:
        return ""
    cells = [cell for cell in at.cells if cell.role == "unattributed" and cell.largest_op]
    largest = max(cells, key=lambda cell: cell.n_bytes, default=None)
    most = f", most of it in {largest.largest_op}" if largest is not None else ""
    return (
        f"{100 * share:.0f} % of the peak is unattributed: no operator returned it, as work memory of a kernel{most}. "
        "It is in the total, and in no block's share."
    )


def _of_the_library(run: Measurement, ops: tuple[str, ...]) -> str:
    if not any("mkldnn_rnn" in op for op in ops):
        return ""
    begin = "oneDNN's recurrent layers keep memory for their backward inside the library"
    if any("without data" in warning for warning in run.warnings):
        return f"{begin}, which no play without data sees: a tagger with two LSTM layers held 2.4 times as much."
    return (
        f"{begin}: forecasts of such models came out up to 7 % off, and what the library takes past torch's allocator "
        "is in no figure."
    )


def _one_draw(run: Measurement) -> str:
    """A sentence on layers that did not run where layers of the same place did: LayerDrop, stochastic depth."""
    idle_in, ran = defaultdict[str, list[str]](list), set[str]()
    for block in run.blocks:
        place = _NUMBER.sub("*", block.fqn)
        if block.n_forward:
            ran.add(place)
        else:
            idle_in[place].append(block.fqn)
    idle = [fqn for place, fqns in idle_in.items() if place in ran for fqn in fqns]
    if not idle:
        return ""
    skipped = some(outermost(idle))
    return f"One draw: {skipped} did not run in this step. A step that runs other layers has another peak."


def why_not_predicted(
    policy: Policy, graph: ModelGraph | None, expected: Forecast, run: Measurement | None = None
) -> str:
    """Why the peak of a policy is not predicted from `run`, or is approximate; empty if no reason is known."""
    if expected.step_peak_bytes is not None:
        return approximate(policy, graph, run)
    if run is not None and (because := no_baseline(run)):
        return because
    keeping = tuple(unit for unit in policy.units if unit.save_ops and results_of_views(unit.save_ops))
    if keeping:
        views = dict.fromkeys(op for unit in keeping for op in results_of_views(unit.save_ops))
        return (
            f"No peak is predicted: {listed(tuple(views))} returns memory that another operator made, and a timeline "
            "does not show who keeps it. Press Run."
        )
    because = not_predicted(policy, graph, run)
    if because or run is None or not run.spec.policy.units:
        return because
    return (
        "Nothing is predicted from this run: its recomputes made other tensors than its forward, in more than a "
        "hundredth of the peak. Measure the step with everything kept, or with other blocks recomputed."
    )
