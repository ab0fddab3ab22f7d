"""One rank of a real pipelined run: torch.distributed.pipelining over gloo (CPU) or NCCL (one GPU a rank).

Started by the worker's fork server, or by torchrun on one or many machines:

    torchrun --nproc-per-node 4 -m explorer.engine.pipeline.play.torchrun_rank run_spec.json --out results/

Every rank builds the same stages from the run spec and keeps the stages that it runs. It leaves two files in the output
folder: `rank-<r>.msgpack` (a RankReport) and `rank-<r>.pt` (gradients and buffers of its stages).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from explorer.engine.device.device import Ticks, device_of
from explorer.engine.device.memory_limit import failure_in_step
from explorer.engine.pipeline.cut.build import Pipeline, build, static_bytes
from explorer.engine.pipeline.cut.split import StageModule, StagePart
from explorer.engine.pipeline.play.batch_norm import deferred_batch_norm
from explorer.engine.pipeline.play.block_calls import CallCount, counting_calls
from explorer.engine.pipeline.play.inproc import receive_bytes
from explorer.engine.pipeline.play.rank_files import report_file, tensor_file
from explorer.engine.pipeline.play.rank_memory import MemoryWatch
from explorer.engine.pipeline.play.torch_adapter import cause_of, check_boundary, schedule_for, step_schedule
from explorer.engine.state.rng import seed_everything
from explorer.errors import NotOnThisDevice
from explorer.plan.export.torchrun import run_key
from explorer.record.base import to_msgpack
from explorer.record.pipeline_run import ActionTime, RankMemory, RankReport
from explorer.record.run import RunSpec

OUTSIDE = "outside actions"

Announce = Callable[[str], None]
"""Called with the action that begins, and with the empty string when the rank waits again."""


@dataclass
class Marks:
    """Begin and end of each action on the rank's clock, whose zero is the barrier of all ranks.

    Marks of a GPU are in its stream and no call waits, so a rank computes while NCCL brings the next tensors. The
    GPU's wait for NCCL lies before the first mark of an action and is not part of the action.
    """

    rank: int
    clock: Ticks
    announce: Announce
    watch: MemoryWatch | None
    group: dist.ProcessGroup | None = None
    """Process group of the ranks that have a stage: torch takes no others. None: all."""
    spans: list[tuple[int, str, int, Any, Any, tuple[int, int]]] = field(default_factory=list)
    """(stage, kind, microbatch, first mark, last mark, numbers of the runs for backward inside)"""
    calls: CallCount = field(default_factory=CallCount)

    def times(self, zero: Any) -> tuple[ActionTime, ...]:
        """Once the device has settled."""
        return tuple(
            ActionTime(
                rank=self.rank,
                stage=stage,
                kind=kind,  # type: ignore[arg-type]
                microbatch=i,
                start_ms=self.clock.between_ms(zero, start),
                end_ms=self.clock.between_ms(zero, end),
                recompute_ms=self.calls.recompute_ms(self.clock, *again),
            )
            for stage, kind, i, start, end, again in self.spans
        )


class TorchStage(nn.Module):
    """A stage in the form for torch. The first stage gets a microbatch's number and fetches the batch."""

    def __init__(self, pipeline: Pipeline, module: StageModule) -> None:
        super().__init__()
        self.stage = module
        self._batches = pipeline.batches

    def forward(self, *received: Tensor) -> tuple[Tensor, ...]:
        first = self.stage.part.stage == 0
        return self.stage(*(self._batches[self.stage.microbatch][0] if first else received))  # type: ignore[no-any-return]


class MarkedStage(PipelineStage):
    """torch's stage with marks of its actions. The stage also sets the microbatch of its module."""

    marks: Marks
    pipeline: Pipeline
    submod: TorchStage

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.pipeline.forward_of(fwd_chunk_id):
            return self._marked("F", fwd_chunk_id, super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        kind = "B" if kwargs.get("full_backward", True) else "I"
        return self._marked(kind, bwd_chunk_id, super().backward_one_chunk, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        return self._marked("W", bwd_chunk_id, super().backward_weight_one_chunk, *args, **kwargs)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Neighbours on other ranks. If a V puts two neighbours on one rank, torch 2.11 adds the rank itself, which
        gloo refuses."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    def _marked(self, kind: str, i: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        marks, name = self.marks, f"{self.stage_index}{kind}{i}"
        self.submod.stage.microbatch = i
        marks.announce(name)
        before, start = len(marks.calls.reruns), marks.clock.mark()
        with marks.watch.doing(marks.rank, name) if marks.watch else nullcontext():
            result = function(i, *args, **kwargs)
        again = before, len(marks.calls.reruns)
        marks.spans.append((self.stage_index, kind, i, start, marks.clock.mark(), again))
        marks.announce("")
        return result


def run_rank(spec: RunSpec, out: Path, announce: Announce = lambda name: None) -> RankReport:
    """Runs this process's rank in the existing process group. Writes its report and tensors into `out`."""
    rank = dist.get_rank()
    pipeline = build(spec)
    device = device_of(pipeline.trainee.device)
    group = _busy_ranks(pipeline)
    with device.memory_limit(spec.memory_limit_bytes, _static_bytes(pipeline, rank)):
        clock = device.wall()
        _one_pass(pipeline, rank, Marks(rank, clock, announce, None, group))
        timed = Marks(rank, clock, announce, None, group)
        zero, losses = _one_pass(pipeline, rank, timed)
        _save_tensors(pipeline, rank, out)
        watched = Marks(rank, clock, announce, MemoryWatch(device), group)
        _one_pass(pipeline, rank, watched)
    times = timed.times(zero)
    report = RankReport(
        rank=rank,
        actions=times,
        memory=_memory(pipeline, rank, watched, times),
        blocks=tuple(block for block in timed.calls.blocks(pipeline) if pipeline.rank_of[block.stage] == rank),
        losses=losses,
        device_name=device.environment(spec.n_threads).device_name,
        run_key=run_key(spec),
    )
    write_report(report, out)
    dist.barrier()  # a rank that left while a neighbour still reads from it would be taken for one that died
    return report


def failed(spec: RunSpec, rank: int, error: BaseException, action: str = "") -> RankReport:
    """The report of a rank that ends early, inside `action`."""
    return RankReport(rank=rank, failure=failure_in_step(cause_of(error)), failed_action=action, run_key=run_key(spec))


def join(spec: RunSpec, local_rank: int, **rendezvous: Any) -> None:
    """Takes this process's device and its place in the process group; returns when all ranks are there."""
    torch.set_num_threads(spec.n_threads)
    if spec.device == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise NotOnThisDevice(
                f"Rank {local_rank} of this machine needs a GPU of its own; it has {torch.cuda.device_count()}.",
                hint="Start as many ranks a machine as it has GPUs.",
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **rendezvous)
    else:
        dist.init_process_group("gloo", **rendezvous)
    dist.barrier()


def write_report(report: RankReport, out: Path) -> None:
    report_file(out, report.rank).write_bytes(to_msgpack(report))


def _one_pass(pipeline: Pipeline, rank: int, marks: Marks) -> tuple[Any, tuple[float, ...]]:
    """Runs a step of torch's schedule; returns its zero on the clock and the losses (on the last stage's rank)."""
    own = _own(pipeline, rank)
    pipeline.reset(set(own))
    if not pipeline.plan.keyed_rng:
        seed_everything(pipeline.spec.seed + rank)
    losses: list[Tensor] = []
    numbers = torch.arange(pipeline.n_microbatches, device=pipeline.trainee.device)
    with ExitStack() as stack:
        stack.enter_context(marks.watch or nullcontext())
        if marks.watch:
            stack.enter_context(marks.watch.doing(rank, OUTSIDE))
        stack.enter_context(deferred_batch_norm(pipeline.trainee.model, enabled=pipeline.plan.deferred_batch_norm))
        stack.enter_context(counting_calls(pipeline, marks.calls, marks.clock))
        stages = [_torch_stage(pipeline, pipeline.parts[stage], marks) for stage in own]
        own_rows = tuple(row for row in pipeline.rows if row) if pipeline.plan.actions else None
        name, loss = pipeline.plan.schedule, _loss(pipeline, marks)
        # A rank without a stage has nothing to drive, and waits where all wait.
        schedule = schedule_for(name, own_rows, stages, pipeline.n_microbatches, loss) if stages else None
        dist.barrier()
        marks.clock.settle()
        zero = marks.clock.mark()
        if schedule is not None:
            step_schedule(schedule, (numbers,) if 0 in own else (), numbers, losses)
        marks.clock.settle()
    return zero, tuple(float(loss.detach()) for loss in losses)


def _torch_stage(pipeline: Pipeline, part: StagePart, marks: Marks) -> MarkedStage:
    """A stage with static metadata both ways: torch's inference would run the model again, on uninitialised memory.

    The example tensors have no bytes, because torch 2.11 keeps them.
    """
    device = pipeline.trainee.device
    check_boundary([str(meta) for meta in part.metas_in if part.stage and not meta.requires_grad])

    def examples(metas: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.empty(m.shape, dtype=m.dtype, device="meta").requires_grad_(m.requires_grad) for m in metas)

    number = (torch.empty(1, dtype=torch.int64, device="meta"),)
    stage = MarkedStage(
        TorchStage(pipeline, pipeline.modules[part.stage]),
        part.stage,
        len(pipeline.parts),
        device,
        input_args=examples(part.metas_in) if part.stage else number,
        output_args=examples(part.metas_out),
        group=marks.group,
    )
    stage.marks, stage.pipeline = marks, pipeline
    return stage


def _loss(pipeline: Pipeline, marks: Marks) -> Callable[[Any, Tensor], Tensor]:
    """torch computes the loss after the last stage's forward; its time is counted with that forward."""

    def loss(output: Any, number: Tensor) -> Tensor:
        i = int(number)
        with pipeline.forward_of(i):
            value = pipeline.loss(output if isinstance(output, tuple) else (output,), pipeline.batches[i][1])
        stage, kind, at, start, _, again = marks.spans[-1]
        marks.spans[-1] = (stage, kind, at, start, marks.clock.mark(), again)
        return value

    return loss


def _busy_ranks(pipeline: Pipeline) -> dist.ProcessGroup | None:
    """Called by every rank, the idle ones too: a group is made by all."""
    busy = [rank for rank, row in enumerate(pipeline.rows) if row]
    return dist.new_group(busy) if len(busy) < len(pipeline.rows) else None


def _own(pipeline: Pipeline, rank: int) -> list[int]:
    """Stages of this rank, first one first."""
    return [stage for stage, home in pipeline.rank_of.items() if home == rank]


def _save_tensors(pipeline: Pipeline, rank: int, out: Path) -> None:
    own = _own(pipeline, rank)
    gradients = {
        (name, stage): None if parameter.grad is None else parameter.grad.detach().cpu()
        for name, held in pipeline.owners.items()
        for stage, parameter in held
        if stage in own
    }
    buffers = {name: buffer.detach().cpu() for name, buffer in pipeline.buffers(set(own)).items()}
    torch.save({"gradients": gradients, "buffers": buffers}, tensor_file(out, rank))


def _memory(pipeline: Pipeline, rank: int, marks: Marks, clock: tuple[ActionTime, ...]) -> RankMemory | None:
    if marks.watch is None:
        return None
    static = {rank: _static_bytes(pipeline, rank)}
    return marks.watch.ranks(static, {rank: receive_bytes(pipeline, rank)}, clock)[0]


def _static_bytes(pipeline: Pipeline, rank: int) -> int:
    return sum(static_bytes(pipeline.modules[stage]) for stage in _own(pipeline, rank))
