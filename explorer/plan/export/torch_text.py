"""The file that `torch_file` writes, with marks where the policy goes in: torch's own checkpoint with what
explorer.apply_policy adds to it.
"""

ERROR = """

class InvalidPolicy(ValueError):
    def __init__(self, sentence: str, *, hint: str, neighbours: tuple[str, ...]) -> None:
        super().__init__(f"{sentence} {hint}")
        self.neighbours = neighbours
"""
TEMPLATE = '''\
"""Activation checkpointing of one model, as decided with Checkpoint Explorer. Needs torch alone.

    from this_file import apply_checkpointing
    apply_checkpointing(model)      # once, after the model is built and before it is compiled or wrapped
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
@STANDARD@

import torch
@TORCH@
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

@ORIGIN@
# One entry a unit: its blocks (several: siblings that follow each other), its action, the operators it saves.
@DECISION@


def apply_checkpointing(model):
    """Recomputes the units in backward, in place. Names, state_dict, isinstance, deepcopy and pickle stay the same."""
    modules = dict(model.named_modules(remove_duplicate=False))
    missing = [fqn for blocks, _, _ in UNITS for fqn in blocks if fqn not in modules]
    if missing:
        raise ValueError(f"the model has no block {', '.join(missing)}: this file was made for another model")
    generators = tuple(_generator(modules, path) for path in RESTORE_RNG if path not in ("python", "numpy"))
    segments = {}
    for blocks, action, save_ops in UNITS:
        if len(blocks) > 1:
            parent = blocks[0].rpartition(".")[0]
            segments.setdefault(parent, []).append((blocks, (action, save_ops, generators)))
    for parent, in_parent in segments.items():
        if type(modules[parent]).forward is nn.Sequential.forward:
            starts = {blocks[0].rpartition(".")[2]: (len(blocks), how) for blocks, how in in_parent}
            modules[parent].forward = functools.partial(_in_segments, modules[parent].forward, starts)
        else:
            for blocks, how in in_parent:
                segment = InTurn(blocks, tuple(modules[fqn] for fqn in blocks), _run, how)
                for place, block in enumerate(segment.members):
                    block._call_impl = functools.partial(called_in_turn, segment, place)
    for blocks, action, save_ops in UNITS:
        if len(blocks) == 1:
            block = modules[blocks[0]]
            block.forward = functools.partial(_as_unit, block.forward, (action, save_ops, generators))
    return model


def _as_unit(forward, how, *args, **kwargs):
    return _run(how, forward, (_owner(forward),), args, kwargs)


def _in_segments(forward, starts, value):
    children = list(_owner(forward).named_children())
    i = 0
    while i < len(children):
        name, child = children[i]
        n_blocks, how = starts.get(name, (1, None))
        members = [module for _, module in children[i : i + n_blocks]]
        if how is None:
            value = child(value)
        else:
            value = _run(how, functools.partial(_chain, members), members, (value,), {})
        i += n_blocks
    return value


def _chain(members, value):
    for member in members:
        value = member(value)
    return value


def _owner(forward):
    while isinstance(forward, functools.partial):
        forward = forward.args[0]
    return forward.__self__


def _run(how, function, modules, args, kwargs):
    action, save_ops, generators = how
    if action == "offload":
        with _offloaded(modules):
            return function(*args, **kwargs)
    if kwargs:
        function, args = functools.partial(_with_keywords, function, tuple(kwargs)), (*args, *kwargs.values())
    if USE_REENTRANT:
        twice = _FirstThenAgain(function, _Again(modules, generators))
        return checkpoint(twice, *args, use_reentrant=True, preserve_rng_state=PRESERVE_RNG_STATE)
    if unseen := _witnesses(args, modules):
        function, args = functools.partial(_without_witnesses, function), (unseen, *args)
    return checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=PRESERVE_RNG_STATE,
        determinism_check=DETERMINISM_CHECK,
        early_stop=EARLY_STOP,
        context_fn=functools.partial(_contexts, modules, save_ops, generators),
    )


def _with_keywords(function, names, *args):
    """The values of keyword arguments come last by position: reentrant checkpointing refuses them, the other one would
    hold their tensors where a unit around it cannot free them."""
    first = len(args) - len(names)
    return function(*args[:first], **dict(zip(names, args[first:])))


def _without_witnesses(function, _, *args):
    return function(*args)


def _witnesses(args, modules):
    """A tensor of each GPU that torch cannot see in `args`, so that it stashes that GPU's generator too."""
    tensors = [tensor for module in modules if (tensor := next(module.parameters(), None)) is not None]
    known = {leaf.device for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
    unseen = {tensor.device: tensor for tensor in tensors if tensor.device not in known}
    return tuple(tensor for device, tensor in unseen.items() if device.type not in ("cpu", "meta"))


def _contexts(modules, save_ops, generators):
    again = _Again(modules, generators)
    if not save_ops:
        return contextlib.nullcontext(), again
    operators = [functools.reduce(getattr, name.split("."), torch.ops) for name in save_ops]
    forward, recompute = create_selective_checkpoint_contexts(operators)
    again.inner = recompute
    return forward, again


class _Again:
    """Around each recompute: running statistics move once a step, and generators torch does not stash are set back."""

    def __init__(self, modules, generators):
        self.modules, self.generators, self.inner = modules, generators, None
        self.at_forward = self.positions()
        self.open = []

    def __enter__(self):
        hidden = []
        norms = {m: None for module in self.modules for m in module.modules() if isinstance(m, _NormBase)}
        for norm in norms if RUNNING_STATISTICS_ONCE else ():
            for name in ("running_mean", "running_var", "num_batches_tracked") if norm.track_running_stats else ():
                real = norm._buffers.get(name)
                if real is not None:
                    hidden.append((norm, name, real))
                    norm._buffers[name] = real.clone()
        self.open.append((hidden, self.positions()))
        self.go_to(self.at_forward)
        if self.inner is not None:
            self.inner.__enter__()

    def __exit__(self, *exc):
        if self.inner is not None:
            self.inner.__exit__(*exc)
        hidden, positions = self.open.pop()
        self.go_to(positions)
        for norm, name, real in hidden:
            norm._buffers[name] = real

    def positions(self):
        numpy = sys.modules.get("numpy")
        return (
            random.getstate() if "python" in RESTORE_RNG else None,
            numpy.random.get_state() if numpy and "numpy" in RESTORE_RNG else None,
            [generator.get_state() for generator in self.generators],
        )

    def go_to(self, positions):
        python, numpy, own = positions
        if python is not None:
            random.setstate(python)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)
        for generator, state in zip(self.generators, own):
            generator.set_state(state)


class _FirstThenAgain:
    """Reentrant checkpointing calls one function for forward and then again, and takes no context."""

    def __init__(self, function, again):
        self.function, self.again, self.first = function, again, True

    def __call__(self, *args, **kwargs):
        if self.first:
            self.first = False
            return self.function(*args, **kwargs)
        with self.again:
            return self.function(*args, **kwargs)


def _offloaded(modules):
    """Saved activations wait in pinned CPU memory until backward; parameters stay."""
    own = {parameter.untyped_storage()._cdata for module in modules for parameter in module.parameters()}

    def pack(tensor):
        if tensor.device.type == "cpu" or tensor.untyped_storage()._cdata in own:
            return tensor
        kept = torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=True)
        kept.copy_(tensor)
        return tensor.device, kept

    def unpack(packed):
        return packed if isinstance(packed, torch.Tensor) else packed[1].to(packed[0], non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _generator(modules, path):
    fqn, _, name = path.rpartition(".")
    return getattr(modules[fqn], name)
@IN_TURN@
'''
