"""The whole path on two models: a trainer's settings, compare, policy file, check, export for three programs, and those
run in a process of their own: the chosen layers run again, and every gradient is bit by bit that of the model without
a policy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from explorer.cli.main import app

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared")]

LAYERS = (
    (Path(__file__).parents[1] / "browser" / "tiny_model.py").read_text()
    + """

def loss_of(model):
    return model(torch.linspace(0, 1, 128).reshape(8, 16)).square().mean()
"""
)
LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def build():
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, attention_dropout=0.1, use_cache=False))
    ids = torch.arange(16).reshape(2, 8)
    return model, {"input_ids": ids, "labels": ids}


def loss_of(model):
    ids = torch.arange(16).reshape(2, 8)
    return model(input_ids=ids, labels=ids).loss
"""
CHILD = """
import copy, json, sys
import torch
import net
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing


def load(path):
    space = {}
    exec(compile(open(path).read(), path, "exec"), space)
    return space


def lightning(model):
    policy = load("for_lightning.py")["activation_checkpointing_policy"](model)
    apply_activation_checkpointing(model, auto_wrap_policy=policy)


APPLY = {
    "kept": lambda model: None,
    "torch": lambda model: load("for_torch.py")["apply_checkpointing"](model),
    "fsdp2": lambda model: load("for_fsdp2.py")["recompute"](model),
    "huggingface": lambda model: load("for_huggingface.py")["recompute_layers"](model),
    "lightning": lightning,
}
torch.manual_seed(0)
first = net.build()[0].train()
kept, outcomes = {}, {}
for target in ["kept", *sys.argv[1:]]:
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


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments), terminal_width=120)
    assert result.exit_code == 0, (result.stdout, result.stderr, result.exception)
    return result


@pytest.mark.parametrize(
    ("net", "holder", "targets"),
    [
        (LAYERS, "layers", ("torch", "fsdp2", "lightning")),
        (LLAMA, "model.layers", ("torch", "huggingface", "lightning")),
    ],
    ids=["layers", "llama"],
)
def test_what_was_chosen_here_runs_there(net: str, holder: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    if "transformers" in net:
        pytest.importorskip("transformers")
    (tmp_path / "net.py").write_text(net)
    model, policy = f"{tmp_path / 'net.py'}:build", str(tmp_path / "policy.yaml")
    settings = tmp_path / "trainer.yaml"
    settings.write_text("activation_checkpointing: true\nactivation_checkpointing_kwargs: {every_n_layers: 2}\n")
    quick = ("--repeats", "0", "--no-store", "--json")
    compared = run("compare", model, "--policy", str(settings), "--out", policy, *quick)
    assert json.loads(compared.stdout)["verdict"] == "bitwise equal"
    assert json.loads(run("check", policy, model, "--json").stdout)["fresh"]
    for target in targets:
        fit = json.loads(run("export", policy, "--to", target, "--json").stdout)
        assert fit["fit"] == "exact" and fit["recomputed"] == [f"{holder}.0", f"{holder}.2"]
        run("export", policy, "--to", target, "--out", str(tmp_path / f"for_{target}.py"))
    child = subprocess.run(
        [sys.executable, "-c", CHILD, *targets],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert child.returncode == 0, child.stderr[-2000:]
    outcomes = json.loads(child.stdout.splitlines()[-1])
    for target in targets:
        layers = {".".join(name.split(".")[: holder.count(".") + 2]) for name in outcomes[target]["again"]}
        assert outcomes[target]["same"], target
        assert layers == {f"{holder}.0", f"{holder}.2"}, (target, outcomes[target])
