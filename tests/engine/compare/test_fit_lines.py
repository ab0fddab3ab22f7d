"""The printed line of each lever, pasted into a plain script, takes the step that was played and judged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import explorer
from explorer.engine.bench.step import prepare, run_step
from explorer.engine.compare.fit_judge import outline_of
from explorer.engine.model.load import load
from explorer.plan import lever_text, levers
from explorer.record.fit import LeverRow, PlayedStep
from explorer.record.graph import ModelRef
from explorer.record.run import RunSpec

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
"""
IN_THE_LOOP = ("for part", "with torch.autocast", "loss = ")
NOT_HERE = (*levers.ALLOCATOR, levers.OFFLOAD, "adamw8bit", "qlora", "attention")
"""Lines for a GPU, or for packages that the tests do not need; the attention takes an argument of a factory."""


class Batch(list[torch.Tensor]):
    def chunk(self, n: int) -> list[Batch]:
        return [Batch(parts) for parts in zip(*(tensor.chunk(n) for tensor in self))]


class Script:
    """A plain training script with the lines of a lever in it."""

    def __init__(self, spec: RunSpec, lines: tuple[str, ...]) -> None:
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
            names |= {"hidden": model[:-1](batch[0]), "targets": batch[1]}  # type: ignore[index]
        for line in self.in_loop or ["loss = loss_of(model, batch)"]:
            exec(line, names)
        if "loss" in names:
            names.pop("loss").backward()  # type: ignore[attr-defined]
        names.pop("hidden", None)
        names["optimizer"].step()  # type: ignore[attr-defined]

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
        script, trainee = Script(spec, lever_text.script_lines(row)), prepare(changed)
        for _ in range(2):
            script.step()
            run_step(trainee)
        if key != "lora":  # peft gives the parameters other names
            torch.testing.assert_close(script.model.state_dict(), trainee.model.state_dict())
