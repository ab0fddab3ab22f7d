"""The one place that touches private names of torch.distributed.pipelining, looked up when they are needed.

The package is alpha: it grew by half from torch 2.11 to 2.15, and names come and go. A missing name raises
NotOnThisDevice here, in a sentence, and nowhere else an AttributeError.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from explorer.errors import NotOnThisDevice
from explorer.pipeline.plan.actions import Rows

SCHEDULES = "torch.distributed.pipelining.schedules"
BACKWARD = "torch.distributed.pipelining._backward"


def backward_input(
    roots: list[Tensor], gradients: list[Tensor | None] | None, inputs: list[Tensor], module: nn.Module
) -> tuple[tuple[Tensor | None, ...], list[dict[str, object]]]:
    """torch's I action: gradients of `inputs`, and one entry per parameter group for a later W."""
    return private(BACKWARD, "stage_backward_input")(roots, gradients, inputs, module.parameters())  # type: ignore[no-any-return]


def backward_weight(module: nn.Module, groups: list[dict[str, object]]) -> None:
    """torch's W action: adds to the parameters' gradients."""
    private(BACKWARD, "stage_backward_weight")(module.parameters(), groups)


def schedule_for(
    name: str, rows: Rows | None, stages: list[Any], n_microbatches: int, loss_function: Callable[[object, Any], Tensor]
) -> object:
    """A schedule object that is ready to step. `rows` asks for torch's runtime on an action list of our own."""
    settings: dict[str, object] = {"n_microbatches": n_microbatches, "loss_fn": loss_function, "scale_grads": False}
    if rows is not None:
        runtime = private(SCHEDULES, "_PipelineScheduleRuntime")(stages, **settings)
        action = private(SCHEDULES, "_Action").from_str
        order = {rank: list(map(action, map(str, row))) for rank, row in enumerate(rows)}
        private(SCHEDULES, "_PipelineScheduleRuntime._prepare_schedule_with_comms")(runtime, order)
        return runtime
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    kind = get_schedule_class(name)
    return kind(stages[0] if issubclass(kind, PipelineScheduleSingle) else stages, **settings)


def check_boundary(without_gradient: Sequence[str]) -> None:
    """Raises NotOnThisDevice where this torch sends a gradient for every boundary tensor, and some have none.

    The check looks for a method that came with boundary tensors without gradients (torch 2.13, not older torch).
    """
    from torch.distributed.pipelining import PipelineStage

    if without_gradient and not hasattr(PipelineStage, "_get_grad_send_meta"):
        raise NotOnThisDevice(
            f"torch {torch.__version__} cannot send {', '.join(without_gradient)} to another rank: it has no gradient.",
            hint="Cut elsewhere, use the engine inproc, or use torch 2.13.",
        )


def step_schedule(schedule: Any, args: tuple[object, ...], target: object, losses: list[Tensor]) -> None:
    """Runs one step, without gathering outputs if this version of torch has the option."""
    step = schedule.step
    options = {"return_outputs": False} if "return_outputs" in inspect.signature(step).parameters else {}
    step(*args, target=target, losses=losses, **options)


def cause_of(error: BaseException) -> BaseException:
    """The model's error, from inside the RuntimeErrors that torch's pipelining wraps around the error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def private(module: str, name: str) -> Any:
    """A private name of torch, such as `_Action` or `Runtime.prepare`. Raises NotOnThisDevice where torch has none."""
    try:
        return attrgetter(name)(import_module(module))
    except AttributeError as error:
        raise NotOnThisDevice(
            f"torch {torch.__version__} has no {module}.{name}.",
            hint="Use GPipe or 1F1B, which torch runs by public names, or torch 2.11 to 2.13.",
        ) from error
