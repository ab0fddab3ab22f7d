"""Hugging Face transformers: a callback of its Trainer that sets the flag of the chosen layers.

TrainingArguments choose layers 0, n, 2n, .. at most, counted through vision tower, encoder and decoder together; the
flag on each layer is read at every forward, and the Trainer asks its callbacks after it has set all flags itself.
Blocks that are no such layer, an `mlp` say, have no flag that is read: their forward is wrapped instead.
"""

from __future__ import annotations

from explorer.plan.export.code import CHECKPOINT_OPTIONS, WRAPPED, options_of, python_file
from explorer.plan.export.outcome import Target
from explorer.record.policy_file import Export, PolicyFile

HUGGING_FACE = Target(
    name="huggingface",
    written_for="transformers 5.23",
    options=CHECKPOINT_OPTIONS,
    checked="executed",
)


def to_hugging_face(file: PolicyFile) -> Export:
    """The callback; `recompute_layers(model)` does the same without a Trainer."""
    blocks = HUGGING_FACE.recomputed(file.policy)
    return HUGGING_FACE.exported(file.policy, python_file(_ABOUT, WRAPPED + _BODY, blocks, options_of(file.policy)))


_ABOUT = """\
Activation checkpointing of single layers under transformers' Trainer.

    Trainer(..., callbacks=[RecomputeLayers()])     # without activation_checkpointing in the TrainingArguments
    recompute_layers(model)                         # the same in a loop of your own
"""
_BODY = """\
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
