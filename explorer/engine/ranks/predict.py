"""Predicts the step of every rank in one process, without data: torch's fake process group takes the place of others.

A fake group answers each collective at once and moves nothing. Hooks, buffers and shards are those of a real rank, so
their memory is too. Two things keep the buffers of torch.distributed without data:
1. what FSDP2 and DDP allocate (watch/collectives.py finds it by the frame) is allocated without data;
2. DDP's first check of the shapes on other ranks, and its default reduction, want values: both are passed over.

Ranks whose shards have equal shapes are equal; one rank of each kind is played.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from msgspec.structs import replace
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_collectives import all_gather_copy_in_cuda
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp

from explorer.engine.bench.measure import Meter
from explorer.engine.bench.recording import recording_of
from explorer.engine.bench.step import ignore, step_without_loss, trainee_of
from explorer.engine.device.cuda_rules import cuda_rules
from explorer.engine.device.device import device_of
from explorer.engine.device.without_data import LEFT_OUT, ON_THE_CPU, cast_buffers, fake_group, without_data
from explorer.engine.model.conditions import torch_dtype
from explorer.engine.model.load import load_for
from explorer.engine.model.loaded import blaming, cast_type
from explorer.engine.ranks.split import check_ranks, mesh_of, split_model
from explorer.engine.state.global_state import preserve_global_state
from explorer.engine.watch.checkpoint_calls import lost_gradients_refused
from explorer.engine.watch.collectives import Buckets, buffer_role, group_size
from explorer.engine.watch.real_bytes import RealBytes
from explorer.errors import BadInput
from explorer.plan.card.step_on_card import memory_on
from explorer.plan.card.torch_rules import torch_of
from explorer.plan.predict.not_predicted import refuse_not_played
from explorer.plan.sizes import mib
from explorer.record.measurement import Measurement, RecordedRanks
from explorer.record.plan import Report, silent
from explorer.record.run import Ranks, RunSpec

MOST_PLAYED = 4
"""Kinds of ranks that are played: the first, the last, the heaviest, and the most frequent of the others."""
Shards = tuple[tuple[int, ...], ...]
"""Shapes of all parameters on one rank."""


def predict_ranks(spec: RunSpec, report: Report = silent) -> RecordedRanks:
    """The predicted step of every rank of `spec.ranks`; equal ranks are played once.

    Raises BadInput for a mesh that cannot be, ModelNotLoaded and ModelFailed.
    """
    ranks = spec.ranks
    if ranks is None or spec.device != "cpu":
        raise BadInput("Ranks are predicted on the CPU, from a number of ranks.", hint="Add --ranks 8 --fsdp.")
    if distributed.is_initialized():
        raise BadInput("This process belongs to a process group already.", hint="Predict ranks outside of torchrun.")
    check_ranks(ranks)
    kinds: dict[Shards, list[int]] = {}
    runs = {0: play_rank(spec, 0, report, lambda model, mesh: kinds.update(ranks_by_shards(model, mesh)))}
    for number in ranks_to_play(kinds):
        if number not in runs:
            runs[number] = play_rank(spec, number, report)
    equal = {rank: members[0] for members in kinds.values() if members[0] in runs for rank in members[1:]}
    return RecordedRanks(ranks=tuple(runs[n] for n in sorted(runs)), n_ranks=ranks.n_ranks, recorded_in="", equal=equal)


def ranks_to_play(kinds: Mapping[Shards, Sequence[int]]) -> list[int]:
    """The first rank of each kind that is played. Ranks are equal if their shards are."""

    def weight(shards: Shards) -> int:
        return sum(map(math.prod, shards))

    by_rank = sorted(kinds, key=lambda shards: kinds[shards][0])
    first, last = by_rank[0], max(kinds, key=lambda shards: kinds[shards][-1])
    often = sorted(by_rank, key=lambda shards: -len(kinds[shards]))
    order = dict.fromkeys((first, max(by_rank, key=weight), last, *often))
    return sorted(kinds[shards][0] for shards in list(order)[:MOST_PLAYED])


def play_rank(
    spec: RunSpec,
    rank: int,
    report: Report = silent,
    look: Callable[[nn.Module, DeviceMesh], None] = lambda model, mesh: None,
) -> Measurement:
    """The predicted step of one rank. `look` gets the split model and its mesh after the step."""
    ranks, meter = spec.ranks, Meter(report, 3)
    assert ranks is not None
    refuse_not_played(spec.policy)
    device = device_of(torch.device("cpu"))

    def cast(dtype: torch.dtype) -> torch.dtype:
        return cast_type(dtype, torch_dtype(spec))

    rules = cuda_rules(spec.card.capability, torch_of(spec.card)) if spec.card is not None else nullcontext()
    with preserve_global_state(), fake_group(rank, ranks.n_ranks), without_data(cast), rules, _WithoutData() as buckets:
        meter(f"rank {rank}: building the model without data")
        with RealBytes(spec.model.target):
            loaded = load_for(spec)
        cast_buffers(loaded.model, cast)
        with blaming(spec.model, loaded.inputs, "step without data"), _wrapped_without_data(), lost_gradients_refused():
            mesh = mesh_of(ranks, "cpu")
            trainee = trainee_of(spec, loaded, lambda model: split_model(model, ranks, mesh))
            meter(f"rank {rank}: playing a step")
            for _ in range(2 if ranks.data == "ddp" else 1):  # DDP rebuilds its buckets in the second forward
                step_without_loss(trainee, ignore)
            meter(f"rank {rank}: playing the step under the tracker")
            with recording_of(trainee, device, data=False, older=buckets.alive()) as recording:
                step_without_loss(trainee, recording.tracker.on_phase)
        run = recording.measurement(spec)
        look(loaded.model, mesh)
    run = replace(run, origin="predicted", rank=rank, n_ranks=ranks.n_ranks)
    run = replace(run, warnings=(*ON_THE_CPU, *_known_deviations(run, ranks)))
    if spec.card is not None:
        run = replace(run, card=memory_on(spec.card, run), warnings=(LEFT_OUT,))
    return run


def _known_deviations(run: Measurement, ranks: Ranks) -> Iterator[str]:
    """By how much real ranks on the CPU were measured to hold more than their tensors, and why."""
    copies = "real ranks of gloo held up to {} more than predicted, in copies of their collectives."
    if ranks.data == "fsdp" and ranks.n_tensor > 1:
        yield f"Under FSDP2 with tensor parallelism {copies.format('5 %')}"
    elif ranks.data == "fsdp":
        yield f"Under FSDP2 {copies.format('1.2 %')}"
    peak, log = run.step_peak_bytes or 0, run.allocations
    if log is not None and any("convolution" in op for op in log.ops):
        yield (
            "Real ranks held 12 to 21 % more where the model convolves, in work memory of oneDNN: "
            f"{mib(round(1.12 * peak))} to {mib(round(1.21 * peak))} on the CPU."
        )


def ranks_by_shards(model: nn.Module, mesh: DeviceMesh) -> dict[Shards, list[int]]:
    """Every rank by the shapes of its shards, computed by torch's rule from the shards of this rank."""
    names = mesh.mesh_dim_names or ()

    @cache  # a model has few shapes
    def local(place: tuple[int, ...], shape: torch.Size, spec: DTensorSpec | None) -> tuple[int, ...]:
        if spec is None:
            return tuple(shape)
        over = [place[names.index(name)] for name in spec.mesh.mesh_dim_names or ()]
        of_rank, _ = _compute_local_shape_and_global_offset(
            shape, spec.mesh.shape, over, spec.placements, skip_offset=True
        )
        return tuple(of_rank)

    kinds: dict[Shards, list[int]] = defaultdict(list)
    shards = [(p.shape, p._spec if isinstance(p, DTensor) else None) for p in model.parameters()]
    for rank, place in enumerate(itertools.product(*(range(size) for size in mesh.shape))):
        kinds[tuple(local(place, *shard) for shard in shards)].append(rank)
    return dict(kinds)


class _WithoutData(Buckets):
    """Rule 1: buffers of torch.distributed have no data. DDP's tables of numbers are read, and stay."""

    FACTORIES = (
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.zeros.default,
        torch.ops.aten.ones.default,
        torch.ops.aten.full.default,
    )

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.fsdp.all_gather_copy_in.default:  # its form without data returns copies instead of views
            return all_gather_copy_in_cuda(*args, **kwargs)
        if func is torch.ops.c10d.allgather_.default and any(len(row) != group_size(args) for row in args[0]):
            raise RuntimeError(
                f"all_gather has {len(args[0][0])} tensors to fill, one for each of {group_size(args)} ranks"
            )
        if func in self.FACTORIES and buffer_role(kwargs.get("dtype") or torch.get_default_dtype()) is not None:
            with self._fake:
                return self.noticed(func, func(*args, **kwargs))
        return func(*args, **kwargs)


class _Chunks:
    """The list that FSDP2 makes of a parameter to take its own shard, without a view for each of 512 ranks."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim, self._rows = tensor, dim, tensor.shape[dim]
        self._most = -(-self._rows // num_chunks)

    def __getitem__(self, rank: int) -> torch.Tensor:
        first = rank * self._most
        if rank and first >= self._rows:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, first, min(self._most, self._rows - first))


@contextmanager
def _wrapped_without_data() -> Iterator[None]:
    """Rule 2: every DistributedDataParallel made inside checks no other rank and reduces by a hook.

    Every fully_shard inside makes the views of its own shards alone.
    """
    check: Callable[..., Any] = vars(ddp)["_verify_param_shape_across_processes"]
    chunks: Callable[..., Any] = vars(_fsdp_param)["_chunk_with_empty"]
    made: Any = DistributedDataParallel.__init__

    def reduced(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        distributed.all_reduce(bucket.buffer())
        future.set_result(bucket.buffer())
        return future

    reduced.__annotations__.clear()  # DDP reads them, and knows no annotation in quotes

    def make(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        made(self, *args, init_sync=False, **kwargs)
        self.register_comm_hook(None, reduced)  # type: ignore[no-untyped-call]

    with ExitStack() as undone:
        undone.callback(setattr, ddp, "_verify_param_shape_across_processes", check)
        undone.callback(setattr, _fsdp_param, "_chunk_with_empty", chunks)
        undone.callback(setattr, DistributedDataParallel, "__init__", made)
        setattr(ddp, "_verify_param_shape_across_processes", lambda *_, **__: None)  # noqa: B010 (not exported)
        setattr(_fsdp_param, "_chunk_with_empty", _Chunks)  # noqa: B010 (not exported)
        DistributedDataParallel.__init__ = make  # type: ignore[method-assign]
        yield
