"""torch's `sac_milp`: estimators watch a step on fake tensors, an integer program says which modules give up how much.

Two things that torch leaves to its user are done here. On the CPU its cost model, which asks CUDA for the speed of the
card and else ends the process, is given figures of a processor: what counts is how operators stand to each other. And
the answer is applied: in each module that it names, what torch's own program for a module keeps is saved.
Source: torch/distributed/_tools/sac_ilp.py
"""

from __future__ import annotations

import functools
import importlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed._tools.sac_estimator import SACEstimator
from torch.utils._pytree import tree_leaves
from torch.utils._runtime_estimation import _IGNORE_OPS
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from explorer.engine.arena.contestant import Contestant
from explorer.engine.model.load import load_for
from explorer.engine.step import Trainee, autocast, build_optimizer, freeze, set_mode
from explorer.errors import BadInput, said_by
from explorer.record.arena import Bout, Ground

_COST_MODEL = "operator-level-cost-model"
_BYTES_PER_MS, _FLOPS_PER_MS = 1e7, 5e7
"""The order of magnitude of one processor core; measured on none."""


def contestant(trainee: Trainee, bout: Bout, ground: Ground) -> Contestant:
    """Raises BadInput where its packages are missing, its estimators fail, or it finds no solution."""
    ilp = _program()
    assert bout.budget_bytes is not None, "it takes a budget"
    try:
        info, stats = _estimated(trainee)
        graph = _ilp_utils().parse_module_info(info)
        decisions, _, peak_bytes = ilp.sac_milp(graph, memory_budget=bout.budget_bytes / 2**30)
    except Exception as error:  # torch's estimators know few kinds of models
        raise BadInput(f"Its estimators raised {said_by(error)}.") from error
    if peak_bytes < 0:
        raise BadInput("Its program found no solution within the budget.")
    modules = dict(trainee.model.named_modules())
    for name, given_up in decisions.items():
        kept = ilp.get_optimal_checkpointing_policy_per_module(stats[name], 1.0 - given_up)
        if not kept:
            asked = f"gives up {100 * given_up:.0f} %"
            raise BadInput(f"Its program for the operators of {name} found no solution that {asked}.")
        module: nn.Module = modules[name.partition(".")[2]]
        module.forward = functools.partial(_selective, module.forward, list(zip(stats[name].func_names, kept)))  # type: ignore[method-assign]
    return Contestant(trainee=trainee, predicted_peak_bytes=peak_bytes, note=_in_words(decisions))


def _program() -> Any:
    try:
        importlib.import_module("pwlf")
        return importlib.import_module("torch.distributed._tools.sac_ilp")
    except ImportError as error:
        raise BadInput("It needs the packages pulp and pwlf: pip install pulp pwlf.") from error


def _ilp_utils() -> Any:
    return importlib.import_module("torch.distributed._tools.ilp_utils")


def _estimated(trainee: Trainee) -> tuple[Any, dict[str, Any]]:
    """Memory, time and trade-offs of every module, from fake steps of a model built the same way."""
    if trainee.device.type == "cpu":
        setattr(RuntimeEstimator, "_roofline_estimate", classmethod(_on_a_processor))  # noqa: B010
    with FakeTensorMode(), trainee.device:
        fake = load_for(trainee.spec)  # not prepared: moving a model does not work on fake parameters
        model = fake.model
        set_mode(model, trainee.spec.mode)
        freeze(model, trainee.spec.frozen)
        optimizer = build_optimizer(model, trainee.spec)

        def forward_backward() -> None:
            model.zero_grad(set_to_none=True)
            with autocast(trainee):
                loss = fake.loss(fake.output())
            loss.backward()

        forward_backward()
        if optimizer is not None:
            optimizer.step()
        memory, runtime, sac = MemTracker(), RuntimeEstimator(), SACEstimator()
        memory.track_external(model, *([optimizer] if optimizer is not None else []))
        for watching in (memory, runtime(_COST_MODEL), sac(_COST_MODEL)):
            with watching:
                forward_backward()
        info = _ilp_utils().aggregate_stats(model, memory, runtime, sac, trainee.device)
    return info, sac.sac_mod_stats


def _on_a_processor(cls: type, function: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """Result and milliseconds of an operator: by what it moves or computes, whichever takes longer."""
    kwargs = kwargs or {}
    result = function(*args, **kwargs)
    packet = function._overloadpacket
    if packet in _IGNORE_OPS:
        return result, 0.0
    tensors = (leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor))
    n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    flops = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
    return result, max(n_bytes / _BYTES_PER_MS, flops / _FLOPS_PER_MS)


def _selective(forward: Callable[..., Any], kept: Sequence[tuple[str, int]], *args: Any, **kwargs: Any) -> Any:
    """Operators are saved where `kept` says so, in the order in which the estimator met them.

    A fake step leaves some out that a real one runs, such as the copy inside a reshape: those run again.
    """

    def contexts() -> Any:
        waiting = deque(kept)

        def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            known = bool(waiting) and waiting[0][0] == function._overloadpacket.__name__
            saved = waiting.popleft()[1] if known else 0
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _in_words(decisions: dict[str, float]) -> str:
    given = ", ".join(f"{name.partition('.')[2] or name} {100 * share:.0f} %" for name, share in decisions.items())
    return f"Activations given up: {given}." if given else "It recomputes nothing."
