"""A model and what its exports do in a process of their own, where nothing of the project is at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

LAYERS = (
    (Path(__file__).parent / "browser" / "tiny_model.py").read_text()
    + """

def loss_of(model):
    return model(torch.linspace(0, 1, 128).reshape(8, 16)).square().mean()
"""
)
TARGETS = ("torch", "fsdp2")
CHILD = """
import copy, importlib, json
import torch


def load(path):
    space = {}
    exec(compile(open(path).read(), path, "exec"), space)
    return space


APPLY = {
    "kept": lambda model: None,
    "torch": lambda model: load("for_torch.py")["apply_checkpointing"](model),
    "fsdp2": lambda model: load("for_fsdp2.py")["recompute"](model),
}
outcomes = {}
net = importlib.import_module("layers")
torch.manual_seed(0)
first = net.build()[0].train()
for target in APPLY:
    model = copy.deepcopy(first)
    names = {module: name for name, module in model.named_modules()}
    APPLY[target](model)
    calls = {}
    for module, name in names.items():
        module.register_forward_pre_hook(lambda _, given, name=name: calls.update({name: calls.get(name, 0) + 1}))
    torch.manual_seed(1)
    net.loss_of(model).backward()
    gradients = {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    if target == "kept":
        kept, once = gradients, calls
    outcomes[target] = {
        "same": gradients.keys() == kept.keys() and all(torch.equal(gradients[name], kept[name]) for name in kept),
        "again": [name for name in calls if calls[name] > once[name]],
    }
print(json.dumps(outcomes))
"""


def file_of(target: str) -> str:
    """The name under which the process looks for it."""
    return f"for_{target}.py"


def run_there(folder: Path) -> dict[str, dict[str, Any]]:
    """By export: whether every gradient is bit by bit that of the model without a policy, and which modules ran again.

    `folder` holds the model as layers.py, and a file an export.
    """
    child = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=folder, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""}
    )
    assert child.returncode == 0, child.stderr[-2000:]
    outcomes: dict[str, dict[str, Any]] = json.loads(child.stdout.splitlines()[-1])
    outcomes.pop("kept")
    return outcomes


def layers_again(outcome: dict[str, Any]) -> set[str]:
    """Layers of which something ran again."""
    return {".".join(name.split(".")[:2]) for name in outcome["again"]}
