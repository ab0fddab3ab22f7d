"""The terms that lessons use, in words for a student."""

from __future__ import annotations

GLOSSARY: dict[str, str] = {
    "gradient": "How the loss would change if a parameter changed a little. Training moves parameters against it.",
    "bitwise equal": "Every bit of every number agrees. The strictest test there is; nothing is rounded away.",
    "rounding": "Not every bit agrees, but the result is as near to an exact (float64) calculation as the baseline is.",
    "relative distance": "Length of the difference divided by the length of the baseline's gradient: 0 means the same, "
    "1 means as wrong as having no gradient.",
    "cosine": "1 when two gradients point the same way, 0 when they have nothing to do with each other.",
    "recompute": "Run a block's forward again during backward, instead of keeping what the first forward made.",
    "saved activations": "Tensors that forward keeps because backward will need them.",
    "mask": "The zeros and ones with which dropout decides what to drop.",
    "snapshot": "A copy of a random generator's state: put it back, and the same numbers are drawn again.",
    "RNG": "Random number generator. Its state decides every number it will draw.",
    "FLOPs": "Floating-point operations, counted from tensor shapes: exact, and the same on every machine.",
    "running statistics": "BatchNorm's moving mean and variance, updated by every training forward, used in eval mode.",
    "non-reentrant": "torch's newer checkpointing: autograd hooks notice when a dropped tensor is needed and rerun the "
    "block.",
    "reentrant": "torch's older checkpointing: the block is one big operation whose backward runs a second, inner "
    "backward.",
    "pullback": "The function that turns a gradient at the output into gradients at inputs and parameters: what "
    "backward calls.",
    "store": "A table from parameter names to gradients.",
    "segment": "Consecutive steps of a net that are recomputed together.",
    "microbatch": "A slice of the batch that passes through the net on its own.",
    "Hessian-vector product": "The derivative of the gradient in one direction: second order, so backward itself must "
    "be differentiable.",
    "gradient penalty": "A loss that contains a gradient, so training differentiates through backward.",
    "always / except_last / never": "Which microbatches are checkpointed: all, all but the last, none.",
    "early stop": "Ending a recompute as soon as backward has every tensor it needs.",
    "expert": "One of several alternative layers; a router sends each token to one of them.",
}
