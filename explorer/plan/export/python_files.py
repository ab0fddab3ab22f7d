"""Exports that are Python files: torch with FSDP2, torch_remat, transformers, diffusers, Lightning, torchtitan.

Each file holds the policy as literals, a function that looks blocks up by name, and the lines of one library. Names and
numbers of a policy are written as Python literals, never as code. `torch_file` writes the file for torch alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from explorer.plan.export.target import CHECKPOINT_OPTIONS, Target
from explorer.plan.names import above
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
    target = Target("fsdp2", "torch 2.13", CHECKPOINT_OPTIONS, checked="executed")
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


TORCH_REMAT = Target(
    "torch-remat",
    "torch_remat 0.2.2",
    ("preserve_rng_state", "determinism_check"),
    fixed=(("early_stop", False),),
    nested=False,
    checked="executed",
)


def to_torch_remat(file: PolicyFile) -> Export:
    """Whole blocks, each a region of its name. A block inside another one is left to the outer block."""
    named = set(file.policy.blocks)
    blocks = [fqn for fqn in TORCH_REMAT.recomputed(file.policy) if named.isdisjoint(above(fqn))]
    options = {name: getattr(file.policy, name) for name in TORCH_REMAT.options}
    note = "A block returns tensors, or one tuple or list of them: torch_remat takes nothing else."
    return TORCH_REMAT.exported(file.policy, _python_file(_ABOUT, _BODY, blocks, options), note=note)


_ABOUT = """\
Activation checkpointing by torch_remat.

    replay_blocks(model)      # once, after the model is built and before it is compiled or wrapped

remat.region(..., recompute=False) inside a block keeps what the model's own code marks.
"""
_BODY = """\
import torch
import torch_remat as remat


class Generators:
    \"\"\"Sets the generators of torch to those of forward for a replay. torch_remat sets them back behind it.\"\"\"

    def snapshot(self):
        return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self, state):
        torch.set_rng_state(state[0])
        if state[1]:
            torch.cuda.set_rng_state_all(state[1])


HOOKS = (Generators(),) if OPTIONS.pop("preserve_rng_state") else ()


def replay(name, block):
    \"\"\"Its forward, run again in backward. A second call changes nothing.\"\"\"
    if getattr(block.forward, "replayed", False):
        return
    region = remat.checkpoint(region_name=name, recompute_state_hooks=HOOKS, **OPTIONS)
    block.forward = region(block.forward)
    block.forward.replayed = True


def replay_blocks(model):
    for name, block in chosen(model).items():
        replay(name, block)
"""


def to_hugging_face(file: PolicyFile) -> Export:
    """A callback of transformers' Trainer that sets the flag of the chosen layers.

    TrainingArguments choose layers 0, n, 2n, .. at most, counted through vision tower, encoder and decoder together.
    Each layer reads its flag at every forward, and the Trainer calls its callbacks after it has set all flags. A block
    that is no such layer, an `mlp` for example, reads no flag: its forward is wrapped.
    """
    target = Target("huggingface", "transformers 5.23", CHECKPOINT_OPTIONS, checked="executed")
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


def to_diffusers(file: PolicyFile) -> Export:
    """A function that wraps the forward of the chosen blocks.

    The library's own switch recomputes all blocks that a model's code hands to a checkpointing function, and no others.
    """
    target = Target("diffusers", "diffusers 0.42", CHECKPOINT_OPTIONS, checked="executed")
    return _with_options(target, file, _DIFFUSERS_ABOUT, _WRAPPED + _DIFFUSERS_BODY)


_DIFFUSERS_ABOUT = """\
Activation checkpointing of single blocks of a diffusers model.

    recompute_blocks(unet)      # once, before training; without enable_gradient_checkpointing()
"""
_DIFFUSERS_BODY = """\
def recompute_blocks(model):
    for block in chosen(model).values():
        recompute(block)
"""


def to_lightning(file: PolicyFile) -> Export:
    """A policy for FSDPStrategy, which calls torch's apply_activation_checkpointing without reentrant autograd."""
    target = Target("lightning", "Lightning 2.6", checked="executed")
    text = _python_file(_LIGHTNING_ABOUT, _LIGHTNING_BODY, target.recomputed(file.policy))
    return target.exported(file.policy, text)


_LIGHTNING_ABOUT = """\
Activation checkpointing of single modules under Lightning's FSDPStrategy.

    model = MyLightningModule()
    strategy = FSDPStrategy(activation_checkpointing_policy=activation_checkpointing_policy(model))

Names are those inside the LightningModule. It is ignored where the model holds checkpoint wrappers already, and names
of parameters gain `_checkpoint_wrapped_module.` in a state_dict that FSDP does not write.
"""
_LIGHTNING_BODY = """\
from torch.distributed.fsdp.wrap import CustomPolicy


def activation_checkpointing_policy(model):
    wanted = set(map(id, chosen(model).values()))
    return CustomPolicy(lambda module: id(module) in wanted)
"""


def to_torchtitan(file: PolicyFile) -> Export:
    """A class at torchtitan's override point; its own policies treat all blocks of `layers` alike."""
    plan, body = file.pipeline, _TORCHTITAN_BODY
    if plan is not None:
        stages = "".join(f"    {list(stage)!r},\n" for stage in plan.stages)
        body += f"\n\nMODULE_FQNS_PER_MODEL_PART = [\n{stages}]\n"
        body += _TORCHTITAN_OWN if plan.actions else f"PIPELINE_PARALLEL_SCHEDULE = {plan.schedule!r}\n"
    options = ("preserve_rng_state", "determinism_check", "early_stop")
    target = Target("torchtitan", "torchtitan 0.3.0", options, checked="executed")
    return _with_options(target, file, _TORCHTITAN_ABOUT, body, without=("use_reentrant",))


_TORCHTITAN_ABOUT = """\
Activation checkpointing of single blocks in torchtitan. Save it as recompute_blocks.py where Python finds it:

    --override.imports recompute_blocks.recompute_blocks activation_checkpoint:selective

Of a pipeline plan, MODULE_FQNS_PER_MODEL_PART goes to parallelism.module_fqns_per_model_part.
"""
_TORCHTITAN_OWN = """\
# An own schedule: `export --to schedule` writes it, for parallelism.pipeline_parallel_schedule_csv.
PIPELINE_PARALLEL_SCHEDULE = "PipelineScheduleMulti"
"""
_TORCHTITAN_BODY = '''\
from dataclasses import dataclass

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchtitan.config import derive, override
from torchtitan.distributed import activation_checkpoint
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, SelectiveAC


class RecomputeBlocks(ActivationCheckpointing):
    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        pass

    def apply(self, model):
        """The blocks that a model part holds: under a pipeline each rank has some of them."""
        held = dict(model.named_modules())
        names = [name for name in BLOCKS if name in held]
        if not names and BLOCKS and not any(name.partition(".")[0] in held for name in BLOCKS):
            raise ValueError(f"{type(model).__name__} has none of the chosen blocks: export the policy for it again.")
        getattr(activation_checkpoint, "_disable_dynamo_lru_cache", lambda: None)()  # as torchtitan's own classes do
        for name in sorted(names, key=len, reverse=True):  # inner blocks before those around them
            parent, _, own = name.rpartition(".")
            model.get_submodule(parent).register_module(own, checkpoint_wrapper(held[name], **OPTIONS))


@override(target=SelectiveAC.Config, description="Recomputes the chosen blocks")
def recompute_blocks(config):
    return derive(config, RecomputeBlocks.Config)
'''
