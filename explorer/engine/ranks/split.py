"""Splits a model over the ranks of a mesh by torch's own functions.

    policy  ▶  tensor parallelism  ▶  fully_shard of each repeated block and of the whole, or DistributedDataParallel
               parallelize_module, or the user's function(model, mesh)

A policy stands first, below the hooks of FSDP2: a unit's parameters are gathered before its recompute begins.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from explorer.engine.device.without_data import WHOLE_MODEL
from explorer.engine.model.load import function_of
from explorer.errors import BadInput, ExplorerError, ModelFailed, said_by
from explorer.record.run import Ranks

STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
}
"""The words of a model's own plan (transformers) that torch has a style for."""


def check_ranks(ranks: Ranks) -> None:
    """Raises BadInput for a mesh that cannot be."""
    if ranks.n_ranks % ranks.n_tensor:
        raise BadInput(
            f"{ranks.n_ranks} ranks cannot be divided into groups of {ranks.n_tensor} for tensor parallelism.",
            hint="Choose a number of ranks that --tp divides.",
        )
    if ranks.data == "ddp" and ranks.n_tensor > 1:
        raise BadInput("DDP takes no tensor-parallel model in torch.", hint="Use --fsdp beside --tp.")
    if ranks.data == "none" and ranks.n_data > 1 and not ranks.parallelize:
        raise BadInput(
            f"{ranks.n_ranks} ranks share nothing: neither --fsdp, --ddp nor --tp says how.", hint="Add --fsdp."
        )


def mesh_of(ranks: Ranks, device: str) -> DeviceMesh:
    """The mesh (data, tensor) on the present process group."""
    return init_device_mesh(device, (ranks.n_data, ranks.n_tensor), mesh_dim_names=("data", "tensor"))


def split_model(model: nn.Module, ranks: Ranks, mesh: DeviceMesh) -> nn.Module:
    """Splits `model` in place and returns the module to call: the model itself, or DDP around it.

    Raises BadInput, also for a model that is split already, and ModelFailed.
    """
    if any(isinstance(module, (FSDPModule, DistributedDataParallel)) for module in model.modules()) or any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    ):
        raise BadInput(
            "The model is split by its own code already: its factory returns shards or DDP.", hint=WHOLE_MODEL
        )
    if ranks.n_tensor > 1 or ranks.parallelize:
        _split_products(model, ranks, _mesh_of_function(ranks, mesh))
    if ranks.data == "fsdp":
        for unit in (*units_of(model), model):
            fully_shard(unit, mesh=mesh["data"], reshard_after_forward=ranks.reshard)
    if ranks.data == "ddp":
        return DistributedDataParallel(model, process_group=mesh["data"].get_group())
    return model


def _mesh_of_function(ranks: Ranks, mesh: DeviceMesh) -> DeviceMesh:
    """The ranks among which the plan or function splits: all of them, unless FSDP2 or DDP takes the others."""
    if ranks.data != "none" or ranks.n_data == 1:
        return mesh["tensor"]
    return mesh["data"] if ranks.n_tensor == 1 else mesh


def units_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: outermost modules with parameters whose class a container holds several times."""
    return list(_repeated(model))


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    is_container = isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
    kinds = Counter(type(child) for child in module.children() if _is_unit(child))
    for child in module.children():
        if is_container and kinds[type(child)] > 1 and _is_unit(child):
            yield child
        else:
            yield from _repeated(child)


def _is_unit(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _split_products(model: nn.Module, ranks: Ranks, mesh: DeviceMesh) -> None:
    if ranks.parallelize:
        function = function_of(ranks.parallelize)
        try:
            function(model, mesh)
        except ExplorerError:
            raise
        except Exception as error:
            raise ModelFailed(
                f"{ranks.parallelize} was called with the model and a mesh of {mesh.size()} ranks and raised "
                f"{said_by(error)}.",
                hint="It takes (model, mesh), splits the model in place, and every rank calls it alike.",
            ) from error
        return
    plan = _plan_of(model)
    unknown = sorted(set(plan.values()) - STYLES.keys())
    if not plan or unknown:
        raise BadInput(
            "The model brings no plan for tensor parallelism."
            if not plan
            else f"The model's own plan for tensor parallelism has {', '.join(unknown)}, which torch has no style for.",
            hint="Write one: --parallelize file.py:function, a function(model, mesh) that calls parallelize_module.",
        )
    styles: dict[str, ParallelStyle] = {name: STYLES[style]() for name, style in plan.items()}
    parallelize_module(model, mesh, styles)


def _plan_of(model: nn.Module) -> dict[str, str]:
    """The plan that a model of transformers brings, by names of modules; names are patterns with `*`."""
    plan: object = inspect.getattr_static(model, "_tp_plan", None) or getattr(model, "tp_plan", None)
    return {str(name): str(style) for name, style in plan.items()} if isinstance(plan, dict) else {}
