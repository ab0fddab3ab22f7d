"""Models as people have them: classes, instances and names of a package, and whatever a factory returns."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from explorer.engine.compare.compare import compare
from explorer.engine.measure.measure import measure
from explorer.engine.model.load import load
from explorer.engine.model.loaded import default_loss, shapes
from explorer.errors import BadInput, ModelNotLoaded
from explorer.record import ModelRef, Policy, RunSpec

PACKAGE = '''
from collections import namedtuple
from dataclasses import dataclass
from typing import Any
import torch
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self, width: int = 8, depth: int = 2):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Strict(Net):
    def __init__(self, width: int, layers: list):
        super().__init__(width)


class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 111 * 111, 5)

    def forward(self, x):
        return self.head(self.norm(self.stem(x)).flatten(1))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(30, 8), nn.Linear(8, 30)

    def forward(self, ids):
        return self.head(self.table(ids))


@dataclass
class Output:
    sample: Tensor
    extras: Any


class Denoiser(nn.Module):
    """Configured as those of diffusers are."""

    def __init__(self, sample_size=16, in_channels=4, cross_attention_dim=6):
        super().__init__()
        self.config = type("Config", (), dict(
            sample_size=sample_size, in_channels=in_channels, cross_attention_dim=cross_attention_dim))()
        self.conv, self.time = nn.Conv2d(in_channels, in_channels, 1), nn.Embedding(1000, in_channels)
        self.words = nn.Linear(cross_attention_dim, in_channels)

    @classmethod
    def from_config(cls, config):
        return cls(**config)

    def forward(self, sample, timestep, encoder_hidden_states, mask=None):
        extra = self.time(timestep) + self.words(encoder_hidden_states).mean(1)
        return Output(self.conv(sample) + extra[:, :, None, None], [extra])


class Labelled(Denoiser):
    """Its defaults of None are none that it can do without."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.config.num_embeds_ada_norm, self.config.pooled_projection_dim = 5, 3
        self.label, self.pool = nn.Embedding(5, 4), nn.Linear(3, 4)

    def forward(self, sample, timestep=None, pooled_projections=None, class_labels=None):
        extra = self.time(timestep) + self.label(class_labels) + self.pool(pooled_projections)
        return self.conv(sample) + extra[:, :, None, None]


class Silent(nn.Module):
    def forward(self, x):
        return x


class Picky(Net):
    def forward(self, x, graph):
        return super().forward(x)


instance = Net(4)


def batch(width=8):
    return torch.randn(5, width)


def bare(): return Net()
def listed(): return [Net(), batch()]
def parts(): return {"model": Net(), "inputs": {"x": batch()}, "targets": batch(), "loss": nn.functional.mse_loss}
def wrong_parts(): return {"net": Net(), "inputs": batch()}
Parts = namedtuple("Parts", "model inputs")
def named(): return Parts(Net(), batch())
@dataclass
class Bundle:
    model: Any
    inputs: Any
    targets: Any = None
def bundle(): return Bundle(Net(), batch())
def step():
    x, y = batch(), batch()
    return Net(), lambda model: nn.functional.mse_loss(model(x), y)
def several(): return [1, 2, 3, 4]
def list_models(): return ["tiny_net", "wide_net"]
def create_model(name, **arguments): return Net({"tiny_net": 4, "wide_net": 16}[name], **arguments)
'''


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("site")
    (folder / "pkg_of_models.py").write_text(PACKAGE)
    sys.path.insert(0, str(folder))
    yield "pkg_of_models"
    sys.path.remove(str(folder))


@pytest.mark.parametrize(
    ("name", "arguments", "inputs"),
    [
        ("Net", {}, "float32[2, 8]"),
        ("Net", {"width": 3, "batch": 7}, "float32[7, 3]"),
        ("instance", {}, "float32[2, 4]"),
        ("wide_net", {"depth": 1}, "float32[2, 16]"),
        ("Image", {}, "float32[2, 3, 224, 224]"),
        ("Words", {"length": 9}, "int64[2, 9]"),
        ("Denoiser", {}, "float32[2, 4, 16, 16], int64[2], float32[2, 77, 6]"),
        ("Labelled", {}, "float32[2, 4, 16, 16], int64[2], float32[2, 3], int64[2]"),
        ("bare", {}, "float32[2, 8]"),
        ("listed", {}, "float32[5, 8]"),
        ("parts", {}, "float32[5, 8]"),
        ("named", {}, "float32[5, 8]"),
        ("bundle", {}, "float32[5, 8]"),
    ],
)
def test_what_people_have_is_loaded_with_a_batch(
    package: str, name: str, arguments: dict[str, int | float | str | bool], inputs: str
) -> None:
    loaded = load(ModelRef(target=f"{package}:{name}", arguments=arguments))
    assert shapes(loaded.inputs) == inputs
    assert loaded.loss(loaded.output()).requires_grad


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Strict", "needs width, layers, which have no default.*--set width=... --set layers=..."),
        ("tiny_nit", "no factory 'tiny_nit'. Did you mean tiny_net"),
        ("wrong_parts", "has net, inputs; its parts are model, inputs, targets, loss"),
        ("several", "returned 4 things, not a model"),
        ("Silent", "without an example batch, and none was found to guess one from"),
        ("Picky", "without an example batch, and none was found"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(package: str, name: str, said: str) -> None:
    with pytest.raises(ModelNotLoaded) as error:
        load(ModelRef(target=f"{package}:{name}"))
    error.match(said)


def test_a_batch_that_the_model_refuses_is_shown(package: str) -> None:
    with pytest.raises(ModelNotLoaded, match=r"with float32\[2, 3, 48, 48\] it raised RuntimeError"):
        load(ModelRef(target=f"{package}:Image", arguments={"side": 48}))


def test_the_guess_leaves_model_and_generators_as_they_were(package: str) -> None:
    loaded = load(ModelRef(target=f"{package}:Image"))
    after = torch.rand(1)
    again = load(ModelRef(target=f"{package}:Image"))
    assert torch.equal(after, torch.rand(1)) and torch.equal(loaded.inputs, again.inputs)
    norm = loaded.model.get_submodule("norm")
    assert isinstance(norm, nn.BatchNorm2d) and norm.training and int(norm.num_batches_tracked or 0) == 0


def test_a_configuration_file_builds_a_configured_class(package: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"sample_size": 8, "in_channels": 2}))
    ref = ModelRef(target=f"{package}:Denoiser", arguments={"config": str(path)})
    assert shapes(load(ref).inputs).startswith("float32[2, 2, 8, 8]")
    with pytest.raises(ModelNotLoaded, match="cannot be read as a configuration"):
        load(ModelRef(target=f"{package}:Denoiser", arguments={"config": "nowhere.json"}))


@pytest.mark.parametrize("name", ["step", "Denoiser", "instance"])
def test_they_are_measured_and_compared_like_any_other(package: str, name: str) -> None:
    spec = RunSpec(model=ModelRef(target=f"{package}:{name}"), n_repeats=0)
    run = measure(spec)
    assert run.failure is None and run.step_peak_bytes
    block = "conv" if name == "Denoiser" else "blocks.0"
    pair = compare(spec, RunSpec(model=spec.model, n_repeats=0, policy=Policy.recompute([block])))
    assert pair.verdict == "bitwise equal"


def test_a_step_of_ones_own_returns_its_loss(package: str) -> None:
    loaded = load(ModelRef(target=f"{package}:step"))
    loss = loaded.loss(loaded.output())
    loss.backward()
    assert loss.dim() == 0 and all(parameter.grad is not None for parameter in loaded.model.parameters())


def test_a_dict_of_losses_is_their_sum() -> None:
    losses = {"loss_box": torch.tensor(2.0), "loss_class": torch.tensor([3.0])}
    assert default_loss(losses) == 5
    assert default_loss({**losses, "scores": torch.tensor([3.0])}) != 5


def test_weights_come_from_files_that_cannot_run_code(package: str, tmp_path: Path) -> None:
    target = f"{package}:Net"
    donor = load(ModelRef(target=target), seed=1).model.state_dict()
    torch.save({"state_dict": donor}, tmp_path / "w.pt")
    loaded = load(ModelRef(target=target, weights=str(tmp_path / "w.pt")))
    assert all(torch.equal(value, donor[name]) for name, value in loaded.model.state_dict().items())
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(BadInput, match="cannot be read as weights"):
        load(ModelRef(target=target, weights=str(tmp_path / "module.pt")))
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(BadInput, match="holds no state_dict"):
        load(ModelRef(target=target, weights=str(tmp_path / "list.pt")))
    with pytest.raises(ModelNotLoaded, match="of another shape are"):
        load(ModelRef(target=target, arguments={"width": 4}, weights=str(tmp_path / "w.pt")))
    with pytest.raises(ModelNotLoaded, match=r"the model has no .*blocks\.1"):
        load(ModelRef(target=target, arguments={"depth": 1}, weights=str(tmp_path / "w.pt")))
    with pytest.raises(BadInput, match="no file"):
        load(ModelRef(target=target, weights="nowhere.pt"))


def test_safetensors_are_read_where_the_library_is(package: str, tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    target = f"{package}:Net"
    donor = load(ModelRef(target=target), seed=1).model.state_dict()
    save_file(donor, tmp_path / "w.safetensors")
    loaded = load(ModelRef(target=target, weights=str(tmp_path / "w.safetensors")))
    assert all(torch.equal(value, donor[name]) for name, value in loaded.model.state_dict().items())
