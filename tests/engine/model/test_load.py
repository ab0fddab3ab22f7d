"""Whatever somebody points at is loaded, or one sentence says why not."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from explorer.engine.device.limits import failure_in_step
from explorer.engine.model.describe import describe
from explorer.engine.model.load import load, load_for
from explorer.engine.model.loaded import blaming, call, default_loss, place
from explorer.engine.step import prepare, run_step
from explorer.engine.world.as_found import left_as_found
from explorer.errors import BadInput, ModelFailed, ModelNotLoaded, OutOfMemory
from explorer.plan.policy.presets import preset
from explorer.record.graph import ModelRef
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from tests.engine.graphs import graph_of

GOOD = """
import torch
from torch import nn
SIZES = {"small": {"width": 4}, "big": {"width": 9}}

class Own(nn.Linear):
    pass

def build(width, depth=1):
    return nn.Sequential(*(Own(width, width) for _ in range(depth))), torch.randn(2, width)

def with_loss(width):
    batch = torch.randn(2, width), torch.randn(2, width)
    return Own(width, width), batch, lambda output, target: (output - target).abs().mean()

def bare(width):
    return Own(width, width)

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


def test_the_loss_function_gets_the_targets(good: Path) -> None:
    loaded = load(ModelRef(target=f"{good}:with_loss"))
    output = loaded.output()
    assert loaded.loss(output) == (output - loaded.targets).abs().mean()
    assert loaded.loss(output, targets=output) == 0


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
    ("hf:GTP2Config", {}, "no configuration 'GTP2Config'. Did you mean"),
    ("hf:nowhere/config.json", {}, "no configuration nowhere"),
]


@pytest.mark.parametrize(("target", "more", "said"), BAD, ids=[target for target, _, _ in BAD])
def test_what_cannot_be_loaded_says_why(good: Path, target: str, more: dict[str, object], said: str) -> None:
    (good.parent / "broken.py").write_text("def build(:\n")
    (good.parent / "stops.py").write_text("raise SystemExit('usage: train')\n")
    if target.startswith("hf:"):
        pytest.importorskip("transformers")
    with pytest.raises(ModelNotLoaded, match=said):
        load(ModelRef(target=target.format(good=good, folder=good.parent), **more))  # type: ignore[arg-type]


def test_transformers_that_is_missing_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ModelNotLoaded, match="pip install transformers"):
        load(ModelRef(target="hf:GPT2Config"))


def test_a_model_larger_than_memory_is_refused_before_it_is_built() -> None:
    pytest.importorskip("transformers")
    arguments = {"num_hidden_layers": 4, "hidden_size": 65536, "intermediate_size": 262144}
    with pytest.raises(ModelNotLoaded, match="GiB of parameters"):
        load(ModelRef(target="hf:LlamaConfig", arguments=arguments))


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
FED = [
    ("Wav2Vec2Config", {**SMALL, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}, "input_values"),
    ("ASTConfig", {**SMALL, "num_mel_bins": 32, "max_length": 32}, "input_values"),
    ("XLNetConfig", {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16, "vocab_size": 32}, "input_ids"),
    ("PatchTSTConfig", {"d_model": 16, "num_attention_heads": 2, "context_length": 32, "ffn_dim": 16}, "past_values"),
]


@pytest.mark.parametrize(("config", "arguments", "fed"), FED, ids=[config for config, *_ in FED])
def test_a_transformers_model_is_fed_what_it_takes(config: str, arguments: dict[str, int], fed: str) -> None:
    pytest.importorskip("transformers")
    loaded = load(ModelRef(target=f"hf:{config}", arguments=dict(arguments)))
    assert fed in loaded.inputs
    loaded.loss(loaded.output()).backward()


def test_an_argument_can_be_a_list(tmp_path: Path) -> None:
    path = tmp_path / "widths.py"
    path.write_text(
        "import torch\ndef build(widths):\n    return torch.nn.Linear(widths[0], widths[1]), torch.ones(1, widths[0])\n"
    )
    linear = load(ModelRef(target=str(path), arguments={"widths": "[2, 3]"})).model
    assert isinstance(linear, nn.Linear) and (linear.in_features, linear.out_features) == (2, 3)
    with pytest.raises(ModelNotLoaded, match="TypeError"):
        load(ModelRef(target=str(path), arguments={"widths": "[2, 3"}))


def test_an_argument_can_be_nothing(tmp_path: Path) -> None:
    path = tmp_path / "optional.py"
    path.write_text(
        "import torch\ndef build(weights='some'):\n    assert weights is None\n"
        "    return torch.nn.Linear(2, 2), torch.ones(1, 2)\n"
    )
    load(ModelRef(target=str(path), arguments={"weights": "null"}))
    with pytest.raises(ModelNotLoaded, match="AssertionError"):
        load(ModelRef(target=str(path)))


def test_a_batch_that_does_not_fit_is_shown() -> None:
    with (
        pytest.raises(ModelFailed, match=r"forward of x raised RuntimeError: .*float32\[2, 3\]"),
        blaming(ModelRef(target="x"), torch.randn(2, 3), "forward"),
    ):
        nn.Linear(4, 4)(torch.randn(2, 3))


def test_inputs_by_their_form() -> None:
    class Adds(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + 2 * b

    one, two = torch.ones(1), torch.full((1,), 2.0)
    assert call(Adds(), (one, two)) == call(Adds(), [one, two]) == call(Adds(), {"b": two, "a": one}) == 5


def test_a_loss_is_one_number(good: Path) -> None:
    loaded = replace(load(ModelRef(target=f"{good}:with_loss", arguments={"width": 4})), loss_function=torch.sub)
    with pytest.raises(ModelFailed, match=r"returned float32\[2, 4\], not a tensor with one number"):
        loaded.loss(loaded.output())
    with pytest.raises(ModelFailed, match="returned float, not a tensor with one number"):
        replace(loaded, loss_function=lambda output, targets: 1.0).loss(loaded.output())


def test_a_factory_without_memory_is_out_of_memory_not_a_bad_factory(tmp_path: Path) -> None:
    path = tmp_path / "large.py"
    path.write_text("import torch\n\ndef build():\n    return torch.empty(2**50)\n")
    with pytest.raises(RuntimeError, match="tried to allocate"):
        load(ModelRef(target=str(path)))


def test_default_losses() -> None:
    x = torch.tensor([3.0, 4.0])
    assert default_loss(x) == 12.5
    assert default_loss({"loss": x.sum(), "logits": x}) == 7
    assert default_loss({"a": x, "ids": torch.tensor([1]), "b": [x]}) == 12.5
    with pytest.raises(ModelFailed, match="nothing to take a loss of"):
        default_loss(torch.tensor([1]))


def test_place_moves_floats_and_leaves_whole_numbers(good: Path) -> None:
    loaded = load(ModelRef(target="sample_models/tied_lm.py", arguments={"batch": 2, "n_layers": 1, "length": 4}))
    placed = place(loaded, "cpu", torch.float64)
    assert {p.dtype for p in placed.model.parameters()} == {torch.float64}
    assert placed.inputs.dtype == placed.targets.dtype == torch.int64
    assert placed.loss(placed.output()).dtype == torch.float64


class Said(nn.Module):
    def forward(self, *args: object, **kwargs: object) -> tuple[object, object]:
        return args, kwargs


@pytest.mark.parametrize(("inputs", "args", "kwargs"), [
    (1, (1,), {}),
    ((1, 2), (1, 2), {}),
    ([1, {"x": 2}], (1, {"x": 2}), {}),
    (({"x": 1},), ({"x": 1},), {}),
    ({"x": 1, "y": 2}, (), {"x": 1, "y": 2}),
    ({"*": (1, 2), "x": 3}, (1, 2), {"x": 3}),
    ({"x": 3, "*": 1}, (1,), {"x": 3}),
    ({"*": ({"x": 1},)}, ({"x": 1},), {}),
])  # fmt: skip
def test_the_forms_of_inputs(inputs: object, args: object, kwargs: object) -> None:
    assert call(Said(), inputs) == (args, kwargs)


def test_a_dict_that_was_meant_as_one_argument_is_told_how() -> None:
    ref = ModelRef(target="net.py")
    with pytest.raises(ModelFailed, match=r"gets it as \(dict,\)"), blaming(ref, {"x": torch.ones(1)}, "forward"):
        call(nn.Linear(1, 1), {"x": torch.ones(1)})
    with pytest.raises(ModelFailed) as failed, blaming(ref, torch.ones(1), "forward"):
        call(nn.Linear(2, 1), torch.ones(1))
    assert "dict" not in failed.value.hint


CANNOT_BE_OPENED = """
import torch, warnings
from torch import nn
def lazy():
    return nn.Sequential(nn.LazyLinear(3), nn.LazyConv1d(2, 1)), torch.ones(2, 4)
def warmed():
    model = nn.Sequential(nn.LazyLinear(3))
    model(torch.ones(2, 4))
    return model, torch.ones(2, 4)
def scripted():
    return nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4))), torch.ones(2, 4)
def old_norm():
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)), torch.ones(2, 4)
def sparse():
    return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1)), torch.tensor([1, 2])
"""


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    path = tmp_path / "closed.py"
    path.write_text(CANNOT_BE_OPENED)
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("factory", "said", "hint"), [
    ("lazy", r"without a shape: 0\.weight, 0\.bias, 1\.weight and 1 more", "once before the factory returns"),
    ("scripted", r"torch\.jit compiled: 1\.", r"before torch\.jit\.script"),
])  # fmt: skip
def test_models_that_cannot_be_watched_say_why_and_what_next(closed: Path, factory: str, said: str, hint: str) -> None:
    with pytest.raises(ModelNotLoaded, match=f"{said}.*{hint}"):
        load(ModelRef(target=f"{closed}:{factory}"))


@pytest.mark.filterwarnings("ignore")
def test_what_can_be_opened_is_opened(closed: Path) -> None:
    assert describe(ModelRef(target=f"{closed}:warmed")).by_fqn["0"].parameter_bytes == 60
    found = describe(ModelRef(target=f"{closed}:old_norm"))
    assert found.chain == ("0", "1") and preset("all", found).blocks
    spec = RunSpec(model=found.model, policy=Policy.recompute(["0"]), optimizer="adamw")
    with left_as_found():
        assert run_step(prepare(spec)) > 0
    with pytest.raises(ModelFailed, match=r"weight_norm keeps a computed weight in 0.*parametrizations\.weight_norm"):
        graph_of(load(found.model).model, torch.ones(2, 4))


def test_a_sparse_gradient_needs_another_optimizer(closed: Path) -> None:
    spec = RunSpec(model=ModelRef(target=f"{closed}:sparse"))
    with left_as_found():
        with pytest.raises(BadInput, match=r"gradient of 0 is sparse.*AdamW.*sgd.*sparse=False"):
            prepare(spec)
        assert run_step(prepare(msgspec.structs.replace(spec, optimizer="sgd"))) > 0
        assert run_step(prepare(msgspec.structs.replace(spec, frozen=("0",)))) > 0


HOSTILE = """
import torch
from torch import nn

def greedy():
    kept = [torch.empty(2**20) for _ in range(2**8)]
    return nn.Linear(4, 4), torch.randn(2, 4)

def ungraded():
    torch.set_grad_enabled(False)
    return nn.Linear(4, 4), torch.randn(2, 4)

class Ungrading(nn.Linear):
    def forward(self, x):
        torch.set_grad_enabled(False)
        return super().forward(x)

def ungrading():
    return Ungrading(4, 4), torch.randn(2, 4)

def garbled():
    model = nn.Linear(4, 4)
    model.add_module("half\\udc80", nn.Linear(4, 4))
    return model, torch.randn(2, 4)
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    path = tmp_path / "hostile.py"
    path.write_text(HOSTILE)
    return path


def test_a_factory_that_takes_too_much_is_out_of_memory(hostile: Path) -> None:
    spec = RunSpec(model=ModelRef(target=f"{hostile}:greedy"), memory_limit_bytes=2**28)
    with pytest.raises(OutOfMemory, match=f"asked for {2**22:,} bytes and was refused") as caught:
        load_for(spec)
    assert failure_in_step(caught.value).kind == "out of memory"
    assert load_for(msgspec.structs.replace(spec, memory_limit_bytes=None)).inputs.shape == (2, 4)


def test_gradients_that_stay_off_are_said(hostile: Path) -> None:
    with pytest.raises(ModelNotLoaded, match="switched gradients off"):
        load(ModelRef(target=f"{hostile}:ungraded"))
    assert torch.is_grad_enabled()
    with left_as_found():
        trainee = prepare(RunSpec(model=ModelRef(target=f"{hostile}:ungrading")))
        with pytest.raises(ModelFailed, match="switched gradients off"):
            run_step(trainee)
    assert torch.is_grad_enabled()


def test_a_name_that_is_no_text_is_refused_before_anything_is_written(hostile: Path) -> None:
    with pytest.raises(ModelNotLoaded, match=r"half\\udc80") as caught:
        load(ModelRef(target=f"{hostile}:garbled"))
    assert caught.value.sentence.encode()
