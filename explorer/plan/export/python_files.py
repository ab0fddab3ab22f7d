"""Exports that are Python files: torch with FSDP2, and transformers.

Each file holds the policy as literals, a function that looks blocks up by name, and the lines of one library. Names and
numbers of a policy are written as Python literals, never as code. `torch_file` writes the file for torch alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from explorer.plan.export.target import CHECKPOINT_OPTIONS, Target
from explorer.record.files import Export, PolicyFile

_WRAPPED = '''\
import functools

import torch.utils.checkpoint


def recompute(block):
    """Its forward, run again in backward. A second call changes nothing."""
    checkpoint = torch.utils.checkpoint.checkpoint
    if getattr(block.forward, "func", None) is not checkpoint:
        block.forward = functools.partial(checkpoint, block.forward, **OPTIONS)


'''
"""The first lines of a body whose library does not recompute every block itself."""


def _python_file(about: str, body: str, blocks: Sequence[str], options: dict[str, object] | None = None) -> str:
    """`about` becomes the docstring; `body` may use BLOCKS, OPTIONS and chosen(model)."""
    names = "".join(f"    {fqn!r},\n" for fqn in blocks)
    decision = f"BLOCKS = (\n{names})\n" + ("" if options is None else f"OPTIONS = {options!r}\n")
    fillings = {"@ABOUT@": about, "@DECISION@\n": decision, "@BODY@": body}
    # In one pass: a block may be called @BODY@.
    return re.sub("|".join(fillings), lambda mark: fillings[mark[0]], _FILE)


def _with_options(target: Target, file: PolicyFile, about: str, body: str, without: Sequence[str] = ()) -> Export:
    """The file of a target with the policy's options as torch.utils.checkpoint.checkpoint takes them."""
    reentrant = ("preserve_rng_state", "use_reentrant")
    names = reentrant if file.policy.use_reentrant else CHECKPOINT_OPTIONS
    options = {name: getattr(file.policy, name) for name in names if name not in without}
    return target.exported(file.policy, _python_file(about, body, target.recomputed(file.policy), options))


_FILE = '''\
"""@ABOUT@"""

@DECISION@


def chosen(model):
    """The modules to recompute, by name; wrappers of other libraries leave the names as they are."""
    wrappers = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
    modules = {}
    for name, module in model.named_modules():
        for wrapper in wrappers:
            name = name.replace(wrapper, "")
        modules.setdefault(name, module)
    missing = [name for name in BLOCKS if name not in modules]
    if missing:
        raise ValueError(
            f"{type(model).__name__} has no block {', '.join(missing)}: export the policy for this very model again."
        )
    return {name: modules[name] for name in BLOCKS}


@BODY@'''


def to_fsdp2(file: PolicyFile) -> Export:
    body = _FSDP2_BODY.replace("@IMPL@", "REENTRANT" if file.policy.use_reentrant else "NO_REENTRANT")
    body = body.replace("@RESHARD@", str(file.ranks is None or file.ranks.reshard))
    target = Target("fsdp2", "torch 2.13")
    return _with_options(target, file, _FSDP2_ABOUT, body, without=("use_reentrant",))


_FSDP2_ABOUT = """\
Activation checkpointing before FSDP2.

    recompute_then_shard(model, mesh=mesh)      # 1. recompute, 2. shard each repeated block, 3. shard the rest

These are the units of `explorer measure --fsdp`. The wrapper lies inside the sharded block, so parameters are gathered
again before a block runs again. Compile blocks, if at all, between 1 and 2. Names of parameters gain
`_checkpoint_wrapped_module.`, in a state_dict they do not.
"""
_FSDP2_BODY = """\
from collections import Counter
from functools import partial

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy


def recompute(model):
    wanted = set(map(id, chosen(model).values()))
    wrap = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.@IMPL@, **OPTIONS)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrap, auto_wrap_policy=CustomPolicy(lambda module: id(module) in wanted)
    )


def repeated(module, prefix=""):
    # The outermost blocks of which a container holds several of one class.
    children = dict(module.named_children())
    blocks = {name for name, child in children.items() if [*child.children()] and [*child.parameters()]}
    kinds = Counter(type(children[name]) for name in blocks)
    for name, child in children.items():
        is_container = isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
        if is_container and name in blocks and kinds[type(child)] > 1:
            yield prefix + name
        else:
            yield from repeated(child, prefix + name + ".")


def recompute_then_shard(model, reshard_after_forward=@RESHARD@, **sharding):
    # True frees gathered parameters after forward, False keeps them until backward.
    sharding["reshard_after_forward"] = reshard_after_forward
    units = list(repeated(model))
    recompute(model)
    for name in units:
        fully_shard(model.get_submodule(name), **sharding)
    return fully_shard(model, **sharding)
"""


def to_hugging_face(file: PolicyFile) -> Export:
    """A callback of transformers' Trainer that sets the flag of the chosen layers.

    TrainingArguments choose layers 0, n, 2n, .. at most, counted through vision tower, encoder and decoder together.
    Each layer reads its flag at every forward, and the Trainer calls its callbacks after it has set all flags. A block
    that is no such layer, an `mlp` for example, reads no flag: its forward is wrapped.
    """
    target = Target("huggingface", "transformers 5.23")
    return _with_options(target, file, _HUGGING_FACE_ABOUT, _WRAPPED + _HUGGING_FACE_BODY)


_HUGGING_FACE_ABOUT = """\
Activation checkpointing of single layers under transformers' Trainer.

    Trainer(..., callbacks=[RecomputeLayers()])     # without activation_checkpointing in the TrainingArguments
    recompute_layers(model)                         # the same in a loop of your own
"""
_HUGGING_FACE_BODY = """\
def recompute_layers(model):
    layers = chosen(model)
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None:
        enable(activation_checkpointing_kwargs=dict(OPTIONS))
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(OPTIONS))
    wanted = set(map(id, layers.values()))
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = id(module) in wanted
    for layer in layers.values():
        if not isinstance(layer, GradientCheckpointingLayer):
            recompute(layer)


try:
    from transformers import TrainerCallback
    from transformers.modeling_layers import GradientCheckpointingLayer
except ImportError:
    TrainerCallback, GradientCheckpointingLayer = object, ()


class RecomputeLayers(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **others):
        recompute_layers(model)
"""
