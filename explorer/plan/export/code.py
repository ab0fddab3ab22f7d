"""What the exported Python files have in common: the decision as literals, and blocks looked up by name.

Names and numbers of a policy are written as Python literals, never as code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from explorer.record.policy import Policy

CHECKPOINT_OPTIONS = ("preserve_rng_state", "use_reentrant", "determinism_check", "early_stop")
"""Keyword arguments of torch.utils.checkpoint.checkpoint."""

WRAPPED = '''\
import functools

import torch.utils.checkpoint


def recompute(block):
    """Its forward, run again in backward. A second call changes nothing."""
    checkpoint = torch.utils.checkpoint.checkpoint
    if getattr(block.forward, "func", None) is not checkpoint:
        block.forward = functools.partial(checkpoint, block.forward, **OPTIONS)


'''
"""What a body begins with whose library does not recompute every block by itself."""


def python_file(about: str, body: str, blocks: Sequence[str], options: dict[str, Any] | None = None) -> str:
    """`about` becomes the docstring; `body` may use BLOCKS, OPTIONS and chosen(model)."""
    names = "".join(f"    {fqn!r},\n" for fqn in blocks)
    decision = f"BLOCKS = (\n{names})\n" + ("" if options is None else f"OPTIONS = {options!r}\n")
    fillings = {"@ABOUT@": about, "@DECISION@\n": decision, "@BODY@": body}
    # In one pass: a block may be called @BODY@.
    return re.sub("|".join(fillings), lambda mark: fillings[mark[0]], _FILE)


def options_of(policy: Policy, *, without: Sequence[str] = ()) -> dict[str, Any]:
    """The policy's options as torch.utils.checkpoint.checkpoint takes them."""
    reentrant = ("preserve_rng_state", "use_reentrant")
    names = reentrant if policy.use_reentrant else CHECKPOINT_OPTIONS
    return {name: getattr(policy, name) for name in names if name not in without}


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
