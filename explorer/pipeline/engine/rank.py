"""One rank of a real pipelined run: torch.distributed.pipelining over gloo (CPU) or NCCL (one GPU a rank).

Started by torchrun on one or many machines (torchrun_rank.py). Every rank builds the same stages from the run spec and
keeps the stages that it runs. It leaves a RankReport and the gradients and buffers of its stages in the output folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from explorer.engine.bench.step import host_of
from explorer.engine.device.device import WallClock, device_of
from explorer.engine.device.memory_limit import failure_in_step
from explorer.engine.state.rng import seed_everything
from explorer.errors import NotOnThisDevice
from explorer.pipeline.engine.build import Pipeline, build
from explorer.pipeline.engine.microbatches import deferred_batch_norm
from explorer.pipeline.engine.pass_readings import MemoryWatch, PassReadings
from explorer.pipeline.engine.stages import StageModule, StagePart
from explorer.pipeline.engine.tape import Meta
from explorer.pipeline.engine.torch_adapter import cause_of, check_boundary, schedule_for, step_schedule
from explorer.pipeline.plan.actions import Action
from explorer.pipeline.plan.export import report_file, run_key, tensor_file
from explorer.pipeline.record.step import RankReport
from explorer.record.base import to_msgpack
from explorer.record.run import RunSpec

Announce = Callable[[str], None]
"""Called with the action that begins, and with the empty string when the rank waits again."""


@dataclass(frozen=True)
class _Driver:
    """What the stages of this rank share in one pass."""

    pipeline: Pipeline
    readings: PassReadings
    announce: Announce
    group: dist.ProcessGroup | None
    """Process group of the ranks that have a stage: torch takes no others. None: all."""


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

    driver: _Driver
    submod: TorchStage

    def forward_one_chunk(self, fwd_chunk_id: int, *args: object, **kwargs: object) -> object:
        with self.driver.pipeline.forward_of(fwd_chunk_id):
            return self._marked("F", fwd_chunk_id, super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: object, **kwargs: object) -> object:
        kind = "B" if kwargs.get("full_backward", True) else "I"
        return self._marked(kind, bwd_chunk_id, super().backward_one_chunk, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: object, **kwargs: object) -> object:
        return self._marked("W", bwd_chunk_id, super().backward_weight_one_chunk, *args, **kwargs)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Neighbours on other ranks. If a V puts two neighbours on one rank, torch 2.11 adds the rank itself, which
        gloo refuses."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    def _marked(self, kind: str, i: int, function: Callable[..., object], *args: object, **kwargs: object) -> object:
        action = Action(self.stage_index, kind, i)
        self.submod.stage.microbatch = i
        self.driver.announce(str(action))
        with self.driver.readings.action(action):
            result = function(i, *args, **kwargs)
        self.driver.announce("")
        return result


def run_rank(spec: RunSpec, out: Path, announce: Announce = lambda name: None) -> RankReport:
    """Runs this process's rank in the existing process group. Writes its report and tensors into `out`."""
    rank = dist.get_rank()
    pipeline = build(spec)
    device = device_of(pipeline.trainee.device)
    busy = [number for number, row in enumerate(pipeline.rows) if row]
    # A group is made by every rank, the idle ones too.
    group = dist.new_group(busy) if len(busy) < len(pipeline.rows) else None
    with device.memory_limit(spec.memory_limit_bytes, pipeline.static_bytes(rank)), host_of(spec.policy):
        clock = device.wall()

        def one_pass(readings: PassReadings) -> tuple[object, tuple[float, ...]]:
            return _one_pass(_Driver(pipeline, readings, announce, group), rank)

        one_pass(PassReadings(pipeline, clock))
        timed = PassReadings(pipeline, clock)
        zero, losses = one_pass(timed)
        stages = set(pipeline.stages_of(rank))
        buffers = {name: buffer.detach().cpu() for name, buffer in pipeline.buffers(stages).items()}
        torch.save({"gradients": pipeline.partial_gradients(stages), "buffers": buffers}, tensor_file(out, rank))
        watched = PassReadings(pipeline, WallClock(), MemoryWatch(device))
        one_pass(watched)
    times = timed.times(zero)
    report = RankReport(
        rank=rank,
        actions=times,
        memory=watched.memory([rank], times)[0],
        blocks=tuple(block for block in timed.calls.blocks(pipeline) if pipeline.rank_of[block.stage] == rank),
        losses=losses,
        device_name=device.environment(spec.n_threads).device_name,
        run_key=run_key(spec),
    )
    write_report(report, out)
    dist.barrier()  # a rank that left while a neighbour still reads from it would be taken for one that died
    return report


def failed_report(spec: RunSpec, rank: int, error: BaseException, action: str = "") -> RankReport:
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
    """Writes the report in one step: a rank that is killed leaves no half of it."""
    path = report_file(out, report.rank)
    path.with_suffix(".part").write_bytes(to_msgpack(report))
    path.with_suffix(".part").rename(path)


def _one_pass(driver: _Driver, rank: int) -> tuple[object, tuple[float, ...]]:
    """Runs a step of torch's schedule; returns its zero on the clock and the losses (on the last stage's rank)."""
    pipeline, readings = driver.pipeline, driver.readings
    stage_numbers = pipeline.stages_of(rank)
    pipeline.reset(set(stage_numbers))
    if not pipeline.plan.keyed_rng:
        seed_everything(pipeline.spec.seed + rank)
    losses: list[Tensor] = []
    numbers = torch.arange(pipeline.n_microbatches, device=pipeline.trainee.device)
    statistics = deferred_batch_norm(pipeline.trainee.model, enabled=pipeline.plan.deferred_batch_norm)
    with readings.recording(), readings.outside(rank, "outside actions"), statistics:
        stages = [_torch_stage(driver, pipeline.parts[stage]) for stage in stage_numbers]
        own_rows = tuple(row for row in pipeline.rows if row) if pipeline.plan.actions else None
        # A rank without a stage has nothing to drive, and waits where all wait.
        name = pipeline.plan.schedule
        schedule = schedule_for(name, own_rows, stages, pipeline.n_microbatches, _loss(driver)) if stages else None
        dist.barrier()
        readings.clock.settle()
        zero = readings.clock.mark()
        if schedule is not None:
            step_schedule(schedule, (numbers,) if 0 in stage_numbers else (), numbers, losses)
        readings.clock.settle()
    return zero, tuple(float(loss.detach()) for loss in losses)


def _torch_stage(driver: _Driver, part: StagePart) -> MarkedStage:
    """A stage with static metadata both ways: torch's inference would run the model again, on uninitialised memory.

    The example tensors have no bytes, because torch 2.11 keeps them.
    """
    pipeline = driver.pipeline
    check_boundary([str(meta) for meta in part.metas_in if part.stage and not meta.requires_grad])

    def examples(metas: tuple[Meta, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.empty(m.shape, dtype=m.dtype, device="meta").requires_grad_(m.requires_grad) for m in metas)

    number = (torch.empty(1, dtype=torch.int64, device="meta"),)
    stage = MarkedStage(
        TorchStage(pipeline, pipeline.modules[part.stage]),
        part.stage,
        len(pipeline.parts),
        pipeline.trainee.device,
        input_args=examples(part.metas_in) if part.stage else number,
        output_args=examples(part.metas_out),
        group=driver.group,
    )
    stage.driver = driver
    return stage


def _loss(driver: _Driver) -> Callable[[object, Tensor], Tensor]:
    """torch computes the loss after the last stage's forward; its time is counted with that forward."""
    pipeline = driver.pipeline

    def loss(output: object, number: Tensor) -> Tensor:
        i = int(number)
        with pipeline.forward_of(i):
            value = pipeline.loss(output if isinstance(output, tuple) else (output,), pipeline.batches[i][1])
        driver.readings.prolong()
        return value

    return loss
