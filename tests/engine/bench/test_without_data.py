"""What a step without data refuses, and models that leave the world without data while they are built."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from explorer.engine.bench.measure import measure, measure_without_data
from explorer.engine.device.without_data import without_data
from explorer.engine.model.describe import describe
from explorer.engine.watch import real_bytes
from explorer.errors import BadInput, ModelFailed
from explorer.plan.predict.not_predicted import not_covered
from explorer.record import ModelRef, Policy, RunSpec

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(512, 256), nn.Linear(256, 1024), nn.Linear(1024, 256)
        self.head = nn.Linear(256, 512, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(256))

    def forward(self, ids):
        return self.head(self.embed(ids) + self.down(torch.relu(self.up(self.embed(ids) * self.scale))))

def _step(model):
    ids = torch.randint(0, 512, (2, 16))
    return model, lambda m: m(ids).square().mean()

def plain():
    return _step(Net())

def to_empty():
    with torch.device("meta"):
        model = Net()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.1, 0.1)
        model.scale.fill_(1.0)
    return _step(model)

def to_empty_in_parts():
    with torch.device("meta"):
        model = Net()
    for part in model.children():
        part.to_empty(device="cpu")
    model.head.weight = model.embed.weight
    model.scale = torch.ones(256)
    return _step(model)

def assigned():
    with torch.device("meta"):
        model = Net()
    model.load_state_dict(Net().state_dict(), assign=True)
    model.head.weight = model.embed.weight
    return _step(model)
"""


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    path = tmp_path / "nets.py"
    path.write_text(NETS)
    return path


@pytest.mark.parametrize("factory", ["to_empty", "to_empty_in_parts", "assigned"])
def test_a_model_built_on_meta_is_played_as_one_built_plainly(nets: Path, factory: str) -> None:
    runs = [
        measure_without_data(RunSpec(model=ModelRef(target=f"{nets}:{name}"), optimizer="adamw"))
        for name in ("plain", factory)
    ]
    assert runs[0].held_peak_bytes == runs[1].held_peak_bytes
    assert runs[0].step_peak_bytes == runs[1].step_peak_bytes


REENTRANT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, frozen):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.embed.requires_grad_(not frozen)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))
        self.still = nn.Sequential(nn.Linear(32, 32)).requires_grad_(False)

    def forward(self, ids):
        x = self.still(self.embed(ids))
        for block in self.blocks:
            x = x + block(x)
        return x

def _step(model):
    ids = torch.randint(0, 64, (8, 16))
    return model, lambda m: m(ids).square().mean()

def trained(): return _step(Net(False))
def frozen(): return _step(Net(True))
def no_embedding():
    model, x = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), torch.randn(8, 32)
    return model, lambda m: m(x).square().mean()
"""


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("factory", "blocks", "lost"), [
    ("trained", ("embed",), "embed"),
    ("frozen", ("blocks.0", "blocks.2"), "blocks.0"),
    ("frozen", ("still", "blocks.1"), ""),  # nothing in `still` trains
    ("trained", ("blocks.0", "blocks.1", "blocks.2", "blocks.3"), ""),
    ("trained", ("still", "blocks.3"), ""),
    ("no_embedding", ("0", "2"), "0"),
    ("no_embedding", ("1", "3"), ""),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:None of the inputs")  # of a block in which nothing trains
def test_a_policy_is_played_as_it_is_measured_unless_it_loses_gradients(
    factory: str, blocks: tuple[str, ...], lost: str, reentrant: bool, tmp_path: Path
) -> None:
    """The forecast does not cover its backward, a play does."""
    (path := tmp_path / "nets.py").write_text(REENTRANT)
    policy = Policy.recompute(blocks, use_reentrant=reentrant)
    spec = RunSpec(model=ModelRef(target=f"{path}:{factory}"), policy=policy, optimizer="sgd", n_repeats=0)
    assert ("reentrant" in not_covered(policy)) is reentrant
    if lost and reentrant:
        with pytest.raises(BadInput, match=f"reentrant checkpoint of {lost} gets no input"):
            measure_without_data(spec)
        return
    measured, played = measure(spec), measure_without_data(spec)
    off = (measured.step_peak_bytes or 0) - (played.step_peak_bytes or 0)
    assert 0 <= off < 256, "each live checkpoint keeps the generator's state"
    assert measured.saved_after_forward_bytes == played.saved_after_forward_bytes
    assert played.total_flops == measured.total_flops


REAL = """
import numpy, torch
from torch import nn

SIDE = 1500  # 9 MB each

class Net(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.fc = nn.Linear(SIDE, 8)
        self.make, self.kept = make, []

    def forward(self, x):
        for i in range(8):
            weight = self.make(i)
            self.kept.append(weight)
            x = x + 0.0 * weight[0]
        return self.fc(x)

def _step(make):
    model, x = Net(make), torch.randn(2, SIDE)
    return model, lambda m: m(x).square().mean()

def ones(): return _step(lambda i: torch.ones(SIDE, SIDE))  # here: ones
def drawn(): return _step(lambda i: torch.rand(SIDE, SIDE))  # here: drawn
def like_meta():
    meta = torch.empty(SIDE, SIDE, device="meta")
    return _step(lambda i: torch.zeros_like(meta, device="cpu"))  # here: like_meta
def from_numpy():
    return _step(lambda i: torch.from_numpy(numpy.ones((SIDE, SIDE), numpy.float32)).mul(1.0))  # here: from_numpy
def loaded(): return _step(lambda i: torch.load(FILE))  # here: loaded
def in_factory():
    tensors = [torch.ones(SIDE, SIDE) * i for i in range(8)]  # here: in_factory
    return _step(lambda i: tensors[i])
def one_huge(): return _step(lambda i: torch.ones(400_000, 1_000_000).sum() * torch.ones(SIDE, SIDE))  # here: one_huge
def freed():
    step = _step(lambda i: torch.ones(SIDE, SIDE))
    step[0].kept = type("Nothing", (), {"append": lambda self, x: None})()
    return step
"""


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    torch.save(torch.ones(1500, 1500), tmp_path / "w.pt")
    (path := tmp_path / "real.py").write_text(REAL.replace("FILE", repr(str(tmp_path / "w.pt"))))
    monkeypatch.setattr(real_bytes, "available_bytes", lambda: 80 * 2**20)
    return path


@pytest.mark.parametrize("how", ["play", "describe"])
@pytest.mark.parametrize("factory", ["ones", "drawn", "like_meta", "from_numpy", "loaded", "in_factory", "one_huge"])
def test_real_tensors_are_refused_with_their_place_before_memory_is_full(factory: str, how: str, real: Path) -> None:
    ref = ModelRef(target=f"{real}:{factory}")
    line = next(i for i, text in enumerate(real.read_text().splitlines(), 1) if text.endswith(f"# here: {factory}"))
    with pytest.raises(ModelFailed, match=f"of real tensors at real.py:{line}, though it is played without data"):
        if how == "play":
            measure_without_data(RunSpec(model=ref, optimizer="sgd"))
        else:
            with without_data():
                describe(ref)


def test_real_tensors_that_come_and_go_are_played(real: Path) -> None:
    assert measure_without_data(RunSpec(model=ModelRef(target=f"{real}:freed"), optimizer="sgd")).step_peak_bytes
