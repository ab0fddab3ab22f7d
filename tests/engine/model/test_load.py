"""Every reference is loaded with weights and a batch that fit, or one sentence says why not."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from explorer.engine.bench.measure import measure, measure_without_data
from explorer.engine.bench.step import prepare, run_step
from explorer.engine.compare.compare import compare
from explorer.engine.device.memory_limit import failure_in_step
from explorer.engine.model.describe import describe
from explorer.engine.model.load import load, load_for
from explorer.engine.model.loaded import shapes
from explorer.engine.state.global_state import preserve_global_state
from explorer.errors import BadInput, ModelFailed, ModelNotLoaded, OutOfMemory
from explorer.plan.catalogue import default_size, sizes_of
from explorer.record import ModelRef, Policy, RunSpec

GOOD = """
import torch
from torch import nn
SIZES = {"small": {"width": 4}, "big": {"width": 9}}

class Own(nn.Linear):
    pass

def build(width, depth=1):
    return nn.Sequential(*(Own(width, width) for _ in range(depth))), torch.randn(2, width)

def nothing(width):
    return 3

def half(width):
    return Own(width, width), torch.randn(2, width), lambda output, target: output.mean()

def raises(width):
    raise RuntimeError("no such table")

def leaves(width):
    raise SystemExit(2)
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.py"
    path.write_text(GOOD)
    return path


def test_a_file_with_its_default_factory_and_size(good: Path) -> None:
    loaded = load(ModelRef(target=str(good)))
    assert loaded.output().shape == (2, 4)
    assert loaded.loss(loaded.output()) == loaded.output().square().mean()
    assert load(ModelRef(target=str(good), size="big")).inputs.shape == (2, 9)
    assert load(ModelRef(target=str(good), size="big", arguments={"width": 5, "depth": 3})).inputs.shape == (2, 5)


def test_one_seed_one_model(good: Path) -> None:
    def image(seed: int) -> list[torch.Tensor]:
        loaded = load(ModelRef(target=str(good)), seed=seed)
        return [*loaded.model.parameters(), loaded.inputs]

    assert all(torch.equal(a, b) for a, b in zip(image(1), image(1), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(image(1), image(2), strict=True))


def test_an_edited_file_is_the_file_that_runs(good: Path) -> None:
    load(ModelRef(target=str(good)))
    good.write_text(GOOD.replace("randn(2, width)", "randn(3, width)"))
    assert load(ModelRef(target=str(good))).inputs.shape == (3, 4)


def test_a_model_from_a_file_can_be_copied_and_pickled(good: Path) -> None:
    model = load(ModelRef(target=str(good))).model
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_file_may_import_its_neighbour(good: Path) -> None:
    user = good.parent / "user.py"
    user.write_text("import torch, good\ndef build():\n    return good.Own(3, 3), torch.ones(1, 3)\n")
    assert load(ModelRef(target=str(user))).output().shape == (1, 3)


def test_samples_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(ModelRef(target="sample_models/mlp.py", arguments={"batch": 2, "n_layers": 1})).inputs.shape[0] == 2


def test_an_installed_module() -> None:
    loaded = load(ModelRef(target="torch.nn:Linear", arguments={"in_features": 2, "out_features": 3}))
    assert isinstance(loaded.model, nn.Linear) and loaded.inputs.shape == (2, 2)


BAD = [
    ("{good}:nothing", {}, "returned int, not a model"),
    ("{good}:half", {}, "not a pair"),
    ("{good}:raises", {}, "RuntimeError: no such table"),
    ("{good}:leaves", {}, "SystemExit: 2"),
    ("{good}:biuld", {}, "no factory 'biuld'. Did you mean build"),
    ("{good}", {"size": "huge"}, "no size 'huge'. There are small, big"),
    ("{good}", {"arguments": {"widht": 3}}, "no argument 'widht'. Did you mean width"),
    ("{folder}/goood.py", {}, "no file .*goood.py. Did you mean good.py"),
    ("{folder}/broken.py", {}, "SyntaxError"),
    ("{folder}/stops.py", {}, "SystemExit"),
    ("nowhere.at.all:build", {}, "ModuleNotFoundError"),
    ("gpt", {}, "'gpt' names no model"),
    ("", {}, "names no model"),
    ("{package}:Strict", {}, "needs width, layers, which have no default.*--set width=... --set layers=..."),
    ("{package}:tiny_nit", {}, "no factory 'tiny_nit'. Did you mean tiny_net"),
    ("{package}:parts", {}, "returned dict, not a model"),
    ("{package}:several", {}, "returned 4 things, not a model"),
    ("{package}:Silent", {}, "without an example batch, and none was found to guess one from"),
    ("{package}:on_meta", {}, "built its model on the device meta"),
    ("{package}:Picky", {}, "without an example batch, and none was found"),
]


@pytest.mark.parametrize(("target", "more", "words"), BAD, ids=[target for target, _, _ in BAD])
def test_what_cannot_be_loaded_says_why(
    good: Path, package: str, target: str, more: dict[str, object], words: str
) -> None:
    (good.parent / "broken.py").write_text("def build(:\n")
    (good.parent / "stops.py").write_text("raise SystemExit('usage: train')\n")
    with pytest.raises(ModelNotLoaded, match=words):
        load(ModelRef(target=target.format(good=good, folder=good.parent, package=package), **more))  # type: ignore[arg-type]


def test_an_argument_can_be_a_list_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "widths.py"
    path.write_text(
        "import torch\ndef build(widths, weights='some'):\n    assert weights is None\n"
        "    return torch.nn.Linear(widths[0], widths[1]), torch.ones(1, widths[0])\n"
    )
    arguments = {"widths": "[2, 3]", "weights": "null"}
    linear = load(ModelRef(target=str(path), arguments=arguments)).model
    assert isinstance(linear, nn.Linear) and (linear.in_features, linear.out_features) == (2, 3)
    for wrong, error in (({"widths": "[2, 3"}, "TypeError"), ({"weights": "some"}, "AssertionError")):
        with pytest.raises(ModelNotLoaded, match=error):
            load(ModelRef(target=str(path), arguments=arguments | wrong))


def greedy() -> nn.Module:
    kept = [torch.empty(2**20) for _ in range(2**10)]  # more than earlier tests of the process have freed
    return nn.Linear(4, len(kept) // 256)


def ungraded() -> nn.Module:
    torch.set_grad_enabled(False)
    return nn.Linear(4, 4)


class Ungrading(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        return super().forward(x)


def garbled() -> nn.Module:
    model = nn.Linear(4, 4)
    model.add_module("half\udc80", nn.Linear(4, 4))
    return model


def test_a_factory_that_takes_too_much_is_out_of_memory() -> None:
    spec = RunSpec(model=ModelRef(target=f"{__file__}:greedy"), memory_limit_bytes=2**28)
    with pytest.raises(OutOfMemory, match=f"asked for {2**22:,} bytes and was refused") as caught:
        load_for(spec)
    assert failure_in_step(caught.value).kind == "out of memory"
    assert load_for(msgspec.structs.replace(spec, memory_limit_bytes=None)).inputs.shape == (2, 4)


def test_gradients_that_stay_off_are_said() -> None:
    with pytest.raises(ModelNotLoaded, match="switched gradients off"):
        load(ModelRef(target=f"{__file__}:ungraded"))
    assert torch.is_grad_enabled()
    ungrading = ModelRef(target=f"{__file__}:Ungrading", arguments={"in_features": 4, "out_features": 4})
    with preserve_global_state():
        trainee = prepare(RunSpec(model=ungrading))
        with pytest.raises(ModelFailed, match="switched gradients off"):
            run_step(trainee)
    assert torch.is_grad_enabled()


def test_a_name_that_is_no_text_is_refused_before_anything_is_written() -> None:
    with pytest.raises(ModelNotLoaded, match=r"half\\udc80") as caught:
        load(ModelRef(target=f"{__file__}:garbled"))
    assert caught.value.sentence.encode()


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


@pytest.mark.parametrize(("name", "arguments", "inputs"), [
    ("Net", {}, "float32[2, 8]"),
    ("Net", {"width": 3, "batch": 7}, "float32[7, 3]"),
    ("instance", {}, "float32[2, 4]"),
    ("wide_net", {"depth": 1}, "float32[2, 16]"),
    ("Image", {}, "float32[2, 3, 224, 224]"),
    ("Words", {"length": 9}, "int64[2, 9]"),
    ("Denoiser", {}, "float32[2, 4, 16, 16], int64[2], float32[2, 77, 6]"),
    ("Labelled", {}, "float32[2, 4, 16, 16], int64[2], float32[2, 3], int64[2]"),
    ("Beside", {}, "float32[2, 4, 16, 16], int64[2]"),
    ("bare", {}, "float32[2, 8]"),
    ("listed", {}, "float32[5, 8]"),
    ("judged", {}, "float32[5, 8]"),
])  # fmt: skip
def test_what_people_have_is_loaded_with_a_batch(
    package: str, name: str, arguments: dict[str, int | float | str | bool], inputs: str
) -> None:
    loaded = load(ModelRef(target=f"{package}:{name}", arguments=arguments))
    assert shapes(loaded.inputs) == inputs
    assert loaded.loss(loaded.output()).requires_grad


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


@pytest.mark.parametrize("name", ["listed", "judged", "step"])
def test_a_batch_of_the_factorys_own_is_no_size_to_ask_for(package: str, name: str) -> None:
    with pytest.raises(ModelNotLoaded, match="makes its own batch, and its factory takes no argument batch"):
        load(ModelRef(target=f"{package}:{name}", arguments={"batch": 4}))


def test_a_configuration_file_builds_a_configured_class(package: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"sample_size": 8, "in_channels": 2}))
    ref = ModelRef(target=f"{package}:Denoiser", arguments={"config": str(path)})
    assert shapes(load(ref).inputs).startswith("float32[2, 2, 8, 8]")
    with pytest.raises(ModelNotLoaded, match="cannot be read as a configuration"):
        load(ModelRef(target=f"{package}:Denoiser", arguments={"config": "nowhere.json"}))


def test_they_are_compared_like_any_other(package: str) -> None:
    spec = RunSpec(model=ModelRef(target=f"{package}:step"), n_repeats=0)
    pair = compare(spec, RunSpec(model=spec.model, n_repeats=0, policy=Policy.recompute(["blocks.0"])))
    assert pair.verdict == "bitwise equal" and pair.baseline.step_peak_bytes


def test_a_step_of_ones_own_returns_its_loss(package: str) -> None:
    loaded = load(ModelRef(target=f"{package}:step"))
    loss = loaded.loss(loaded.output())
    loss.backward()
    assert loss.dim() == 0 and all(parameter.grad is not None for parameter in loaded.model.parameters())


def test_transformers_that_is_missing_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ModelNotLoaded, match="pip install transformers"):
        load(ModelRef(target="hf:GPT2Config"))


PACKAGE_MODEL = """
import torch
from torch import nn
from .parts import width
from ..common import Base

class Net(Base):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        return self.fc(x)
"""


def test_a_file_inside_a_package_may_import_its_relatives(tmp_path: Path) -> None:
    folder = tmp_path / "attack_pkg" / "models"
    folder.mkdir(parents=True)
    for place in (folder, folder.parent):
        (place / "__init__.py").touch()
    (folder.parent / "common.py").write_text("from torch import nn\nclass Base(nn.Module):\n    pass\n")
    (folder / "parts.py").write_text("width = 5\n")
    (folder / "net.py").write_text(PACKAGE_MODEL)
    loaded = load(ModelRef(target=f"{folder / 'net.py'}:Net"))
    assert loaded.inputs.shape == (2, 5)
    assert pickle.loads(pickle.dumps(loaded.model)).fc.weight.shape == (5, 5)


@pytest.mark.parametrize("sizes", ["(1, 2)", "[64, 128]", "{'small': 3}", "{1: {'width': 2}}", "'big'", "None", "8"])
def test_a_name_of_ours_in_a_strangers_file_is_theirs(sizes: str, tmp_path: Path) -> None:
    path = tmp_path / "theirs.py"
    path.write_text(f"from torch import nn\nSIZES = {sizes}\nclass Net(nn.Linear):\n    def __init__(self):\n"
                    "        super().__init__(3, 3)\n")  # fmt: skip
    assert not sizes_of(str(path))
    assert load(ModelRef(target=f"{path}:Net", size=default_size(sizes_of(str(path))))).inputs.shape == (2, 3)
    with pytest.raises(ModelNotLoaded, match="no SIZES"):
        load(ModelRef(target=f"{path}:Net", size="small"))


SINGLE = """
import argparse
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class Config:
    width: int = 3

class Only(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(Config().width, 3)

    def forward(self, x):
        return self.fc(x)

def main():
    argparse.ArgumentParser().parse_args()
"""


def test_a_file_with_one_model_needs_no_name(tmp_path: Path) -> None:
    """`main`, dataclasses and imported names are no models."""
    path = tmp_path / "only.py"
    path.write_text(SINGLE)
    assert type(load(ModelRef(target=str(path))).model).__name__ == "Only"
    path.write_text(SINGLE + "class Second(Only):\n    pass\n")
    with pytest.raises(ModelNotLoaded) as caught:
        load(ModelRef(target=str(path)))
    assert caught.value.hint.count(".py:") == 2 and ":main" not in caught.value.hint, caught.value.hint


MNIST = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4 * (SIDE - 2) ** 2, 10)
    def forward(self, x):
        return self.fc(self.conv(x).flatten(1))
"""


@pytest.mark.parametrize("side", [28, 32, 64, 96])
def test_a_net_for_pictures_of_one_size_finds_its_side(side: int, tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(MNIST.replace("SIDE", str(side)))
    assert load(ModelRef(target=str(path))).inputs.shape == (2, 1, side, side)


TRAINED = """
import torch
from torch import nn
from torch.nn import functional as F
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
    def forward(self, idx, NAME=None):
        x = self.table(idx)
        if NAME is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), NAME.flatten())
class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 4)
    def forward(self, x, *, NAME=None):
        out = self.fc(x)
        return {"out": out} if NAME is None else {"out": out, "loss": F.cross_entropy(out, NAME)}
class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 4)
    def forward(self, x, NAME=None):
        return self.fc(x) if NAME is None else self.fc(x) * 2
"""


@pytest.mark.parametrize("name", ["targets", "target", "labels", "label", "y"])
def test_targets_are_made_where_the_model_then_returns_its_loss(name: str, tmp_path: Path) -> None:
    """Without them it takes its inference path, which trains on one position."""
    path = tmp_path / "net.py"
    path.write_text(TRAINED.replace("NAME", name))
    for kind, numbers in (("Words", 2 * 64 * 16), ("Pictures", 2 * 4)):
        loaded = load(ModelRef(target=f"{path}:{kind}"))
        output = loaded.output()
        assert name in loaded.inputs and next(iter(tree_leaves(output))).numel() == numbers
        assert torch.equal(loaded.loss(output), tree_leaves(output)[1])
    assert load(ModelRef(target=f"{path}:Plain")).inputs.shape == (2, 6), "no loss comes of it"


MASKED = """
import torch
from torch import nn
from torch.nn import functional as F
class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
    def scored(self, idx, targets, mask):
        loss = F.cross_entropy(self.head(self.table(idx)).flatten(0, 1), targets.flatten(), reduction="none")
        return (loss * mask.flatten()).sum() / mask.sum()
class Restored(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)
    def forward(self, x, mask=None):
        return self.fc(x) if mask is None else (self.fc(x * ~mask), ((self.fc(x) - x)[mask] ** 2).mean())
class Both(Base):
    def forward(self, idx, targets=None, mask=None):
        return self.head(self.table(idx)) if targets is None or mask is None else self.scored(idx, targets, mask)
class Kept(Base):
    def forward(self, idx, labels=None, attention_mask=None, loss_mask=None):
        return None if labels is None else self.scored(idx, labels, 1.0 - idx * 0 if loss_mask is None else loss_mask)
class Named(Base):
    def forward(self, idx, next_words=None):
        return self.head(self.table(idx)) if next_words is None else self.scored(idx, next_words, idx * 0 + 1.0)
class Switched(Base):
    def forward(self, idx, return_loss=False):
        return self.scored(idx[:, :-1], idx[:, 1:], idx[:, 1:] * 0 + 1.0) if return_loss else self.head(self.table(idx))
class OnlyInTraining(Base):
    def forward(self, idx, targets=None):
        out = self.head(self.table(idx))
        return {"loss": self.scored(idx, targets, idx * 0 + 1.0)} if self.training and targets is not None else out
class Attending(Base):
    def forward(self, idx, mask=None):
        return self.head(self.table(idx) if mask is None else self.table(idx) * mask[..., None])
class Routed(Base):
    def forward(self, idx, context=None):
        out = self.head(self.table(idx))
        return out, out.square().mean()
"""


@pytest.mark.parametrize(("kind", "filled", "text"), [
    ("Restored", {"mask"}, "float32[2, 6], bool[2, 6], made to fit with mask"),
    ("Both", {"targets", "mask"}, "int64[2, 64], int64[2, 64], bool[2, 64], made to fit with targets, mask"),
    ("Kept", {"labels"}, "int64[2, 64], int64[2, 64], made to fit with labels without loss_mask"),
    ("Named", {"next_words"}, "int64[2, 64], int64[2, 64], made to fit with next_words"),
    ("Switched", {"return_loss"}, "int64[2, 64], made to fit with return_loss"),
    ("OnlyInTraining", {"targets"}, "int64[2, 64], int64[2, 64], made to fit with targets"),
    ("Attending", set(), "int64[2, 64], made to fit without mask"),
    ("Routed", set(), "int64[2, 64], made to fit"),
])  # fmt: skip
def test_optional_arguments_are_filled_where_a_loss_comes_of_it(
    kind: str, filled: set[str], text: str, tmp_path: Path
) -> None:
    """A mask alone, or beside targets; a name of any kind; a switch. What is filled or left out is said."""
    (path := tmp_path / "net.py").write_text(MASKED)
    loaded = load(ModelRef(target=f"{path}:{kind}"))
    names = set(loaded.inputs) - {"*"} if isinstance(loaded.inputs, dict) else set()
    assert (names, loaded.batch_text) == (filled, text)
    loaded.model.eval()
    assert loaded.loss(loaded.output()).requires_grad, "eval mode may give no loss of its own"


def test_a_choice_that_the_loader_made_is_named(tmp_path: Path) -> None:
    (path := tmp_path / "net.py").write_text(MNIST.replace("SIDE", "28"))
    assert load(ModelRef(target=str(path))).batch_text.endswith("made to fit, by its only factory Net")
    loaded = load(ModelRef(target="hf:GPT2Config", arguments={"n_layer": 1, "n_embd": 8, "n_head": 1}))
    assert loaded.batch_text.endswith("made to fit with input_ids, labels")


def test_every_run_says_which_batch_it_took(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(TRAINED.replace("NAME", "targets"))
    spec = RunSpec(model=ModelRef(target=f"{path}:Words"), n_repeats=1, optimizer="sgd")
    texts = {measure_without_data(spec).batch, measure(spec).batch, describe(spec.model).batch}
    assert texts == {"int64[2, 64], int64[2, 64], made to fit with targets"}
    path.write_text(GOOD)
    assert measure_without_data(RunSpec(model=ModelRef(target=str(path)))).batch == "float32[2, 4]"


def test_a_training_script_offers_its_model_alone(tmp_path: Path) -> None:
    """A dataclass, imported names, functions that parse arguments or train make no model."""
    (path := tmp_path / "train.py").write_text(
        "import argparse\nfrom dataclasses import dataclass\nfrom torch.nn import Linear, Module\n"
        "from torch.optim import AdamW\n"
        "@dataclass\nclass Config:\n    width: int = 4\n"
        "class Net(Module):\n    def __init__(self):\n        super().__init__()\n        self.fc = Linear(4, 4)\n"
        "    def forward(self, x):\n        return self.fc(x)\n"
        "def arguments():\n    return argparse.ArgumentParser().parse_args()\n"
        "def train(args):\n    Net()(args).sum().backward()\n"
        "def main():\n    train(arguments())\n"
    )
    assert type(load(ModelRef(target=str(path))).model).__name__ == "Net"
