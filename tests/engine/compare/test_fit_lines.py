"""The printed line of each lever, pasted into a plain script, takes the step that was played and judged."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import explorer
from explorer.engine.bench.step import prepare, run_step
from explorer.engine.compare.fit import Player
from explorer.engine.compare.fit_judge import outline_of
from explorer.engine.model.load import load
from explorer.plan import lever_text, levers
from explorer.record.fit import LeverRow, PlayedStep
from explorer.record.graph import ModelRef
from explorer.record.plan import silent
from explorer.record.run import RunSpec
from tests.engine.compare.test_fit import tensors_peak

NETS = """
import torch
from torch import nn
from torch.nn import functional as F


def numbers():
    hidden = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(64, 8)), (torch.randn(16, 32), torch.randn(16, 8)), F.mse_loss


def words():
    hidden = nn.Embedding(30, 8), nn.Flatten(1), nn.Linear(128, 64), nn.ReLU()
    batch = torch.randint(30, (16, 16)), torch.randint(30, (16,))
    return nn.Sequential(*hidden, nn.Linear(64, 30)), batch, F.cross_entropy


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(500, 64), nn.Linear(64, 5)
        layers = (nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(2))
        self.layers = nn.ModuleList(layers)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def classifier():
    return Classifier(), (torch.randint(500, (16, 64)), torch.randint(5, (16,))), F.cross_entropy
"""
IN_THE_LOOP = ("for part", "with torch.autocast", "loss = ", "del hidden")
NOT_HERE = (*levers.ALLOCATOR, levers.OFFLOAD, "adamw8bit", "qlora", "attention")
"""Lines for a GPU, or for packages that the tests do not need; the attention takes an argument of a factory."""


class Batch(list[torch.Tensor]):
    def chunk(self, n: int) -> list[Batch]:
        return [Batch(parts) for parts in zip(*(tensor.chunk(n) for tensor in self))]


class Script:
    """A plain training script with the lines of a lever in it."""

    def __init__(self, spec: RunSpec, lines: tuple[str, ...], last: str) -> None:
        self.last = last
        torch.set_num_threads(spec.n_threads)
        loaded = load(spec.model, seed=spec.seed)
        assert loaded.loss_function is not None
        self.loss_function = loaded.loss_function
        self.in_loop = [line for line in lines if line.startswith(IN_THE_LOOP)]
        self.names: dict[str, object] = {
            "torch": torch, "explorer": explorer, "checkpoint": checkpoint, "lr": spec.learning_rate,
            "model": loaded.model, "loss_of": self.loss_of, "loss_function": loaded.loss_function,
            "batch": Batch([loaded.inputs, loaded.targets]),  # type: ignore[list-item]
        }  # fmt: skip
        if any("peft" in line for line in lines):
            self.names["peft"] = pytest.importorskip("peft")
        exec("\n".join(line for line in lines if line not in self.in_loop), self.names)
        if "optimizer" not in self.names:
            exec("optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=True)", self.names)

    def loss_of(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.loss_function(model(batch[0]), batch[1])

    def step(self) -> None:
        names, model = self.names, self.model
        names["optimizer"].zero_grad()  # type: ignore[attr-defined]
        batch: Batch = names["batch"]  # type: ignore[assignment]
        if any("hidden" in line for line in self.in_loop):
            names |= {"hidden": self.hidden(model, batch[0]), "targets": batch[1]}
        for line in self.in_loop or ["loss = loss_of(model, batch)"]:
            exec(line, names)
        if "loss" in names:
            names.pop("loss").backward()  # type: ignore[attr-defined]
        names["optimizer"].step()  # type: ignore[attr-defined]

    def hidden(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """The input of the last layer."""
        layer = model.get_submodule(self.last)
        model.set_submodule(self.last, nn.Identity())
        hidden: torch.Tensor = model(inputs)
        model.set_submodule(self.last, layer)
        return hidden

    @property
    def model(self) -> nn.Module:
        model: nn.Module = self.names["model"]  # type: ignore[assignment]
        return model


@pytest.mark.slow
@pytest.mark.parametrize("name", ["numbers", "words"])
def test_a_script_with_the_line_takes_the_step_that_was_played(name: str, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    spec = RunSpec(model=ModelRef(target=f"{tmp_path}/nets.py:{name}"), optimizer_form="foreach", n_repeats=0)
    parts, _ = outline_of(spec)
    tried = [(lever.key, each) for lever, each in levers.levers_for(spec, parts) if lever.key not in NOT_HERE]
    assert len(tried) >= 8
    for key, changed in tried:
        row = LeverRow(levers=(key,), step=PlayedStep(spec=changed, step_peak_bytes=1))
        script, trainee = Script(spec, lever_text.script_lines(row), parts.last), prepare(changed)
        for _ in range(2):
            script.step()
            run_step(trainee)
        if key != "lora":  # peft gives the parameters other names
            torch.testing.assert_close(script.model.state_dict(), trainee.model.state_dict())


KINDS = {
    "gpt": {"n_layers": 2, "width": 96, "n_heads": 2, "length": 32, "batch": 8, "vocabulary": 256},
    "tied_lm": {"n_layers": 2, "width": 96, "length": 32, "batch": 8, "vocabulary": 512},
    "vit": {"n_layers": 2, "width": 96, "n_heads": 2, "side": 32, "batch": 8},
    "resnet": {"width": 8, "blocks_per_stage": 2, "n_stages": 2, "side": 32, "batch": 16},
    "recurrent": {"length": 12, "width": 128, "expansion": 4, "batch": 32, "vocabulary": 64},
    "classifier": {},
}
BY_TENSORS = ("autocast", "dtype")
"""Levers whose kernels take memory of their own on a CPU: only their tensors are compared."""


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_script_with_the_line_has_the_peak_that_was_played(name: str, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    model = ModelRef(target=f"sample_models/{name}.py", size="small", arguments=KINDS[name])
    if not KINDS[name]:
        model = ModelRef(target=f"{tmp_path}/nets.py:{name}")
    spec = RunSpec(model=model, optimizer_form="foreach", n_repeats=0)
    player = Player(spec, None, silent)
    changed = [(lever.key, each) for lever, each in levers.levers_for(spec, player.parts) if lever.key not in NOT_HERE]
    plays = [(key, player._played(each)) for key, each in changed]
    plays.append((levers.RECOMPUTE, player._recomputed(player.run)))
    assert len(plays) >= 8
    for key, play in plays:
        gc.collect()  # models of levers before it
        row = LeverRow(levers=(key,), step=player._step(play))
        script = Script(spec, lever_text.script_lines(row), player.parts.last)
        script.step()
        with explorer.record_step(script.model, script.names["optimizer"]) as recorded:  # type: ignore[arg-type]
            script.step()
        run = recorded.measurement
        peak_bytes = run.peaks.tracker_peak_bytes if key in BY_TENSORS else tensors_peak(run)
        assert row.step.step_peak_bytes == pytest.approx(peak_bytes, rel=1e-3), key
        del script, recorded, run
