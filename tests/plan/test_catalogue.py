"""Sample models, arguments of factories and challenges are read from text; marks are those of the run."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.errors import BadInput, UnreadableFile
from explorer.plan.catalogue import (
    HUGGING_FACE,
    SAMPLES,
    FactoryArguments,
    catalogue,
    default_size,
    factory_arguments,
    own_samples,
    sample,
)
from explorer.plan.challenges import CHALLENGES, is_about, marks, peak_guesses
from explorer.plan.recognize import recognize
from explorer.record.comparison import Comparison
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from tests.graphs import compared, gpt

NET = "from torch import nn\nexit()\nclass Block(nn.Module):\n    def forward(self): ...\n"
SOURCE = '''"""A chain of linears.

It teaches that depth costs memory.

Second paragraph.
"""
import torch_is_not_here

SIZES: dict[str, dict[str, int]] = {"small": {"n_layers": 4}, "gpu": {"n_layers": 64}}
raise SystemExit("never executed")
'''


def test_a_sample_is_read_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "chain.py").write_text(SOURCE)
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "bare.py").write_text("x = 1")
    bare, chain = catalogue(tmp_path)
    assert chain.name == "chain" and chain.target == f"{tmp_path.name}/chain.py"
    assert chain.title == "A chain of linears"
    assert chain.lesson.startswith("It teaches") and chain.lesson.endswith("Second paragraph.")
    assert chain.sizes == {"small": {"n_layers": 4}, "gpu": {"n_layers": 64}}
    assert (bare.title, bare.lesson, bare.sizes) == ("bare", "", {})


@pytest.mark.parametrize("source", ["def (", "SIZES = dict(small=make())", "SIZES = {'small': print('x')}"])
def test_a_bad_sample_is_named(tmp_path: Path, source: str) -> None:
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(UnreadableFile, match=r"bad\.py"):
        sample(tmp_path / "bad.py")


def test_the_samples_of_this_project_are_lessons() -> None:
    samples = catalogue()
    assert len(samples) == len([path for path in SAMPLES.glob("*.py") if path.stem != "__init__"])
    for entry in samples:
        assert entry.title and entry.lesson, f"{entry.name} teaches nothing"
        assert {"small", "gpu"} <= set(entry.sizes), f"{entry.name} lacks a size"
        assert entry.target == f"sample_models/{entry.name}.py"


def test_own_models_have_names_of_their_own_and_their_sizes(tmp_path: Path) -> None:
    nets = tmp_path / "nets.py"
    nets.write_text("SIZES = {'small': {'n': 1}, 'large': {'n': 2}}\ndef a(n): ...\ndef b(n): ...\n")
    other = tmp_path / "other" / "nets.py"
    targets = [
        f"{nets}:a", f"{nets}:b", f"{nets}:a", "hf:/llama/config.json", "hf:/bert/config.json", "hf:GPT2Config",
        "package.module:build", f"{other}:a",
    ]  # fmt: skip
    samples = own_samples(targets)
    titles = [sample.title for sample in samples]
    assert len(set(titles)) == len(samples) == 7
    assert titles[1] == "nets.py, b" and "llama/config.json" in titles and "GPT2Config" in titles
    assert not any(":" in title for title in titles), "the page shows what stands before a colon"
    assert list(samples[0].sizes) == ["small", "large"] and samples[-1].sizes == {}
    assert default_size({"large": 1, "small": 2}) == "small" and default_size({}) is None


NETS = """
from typing import Literal
raise SystemExit("nobody imports this")

def build(n, batch=4, /, width: int = 64, *, dropout=0.1, bias: bool = True, shift=-1, where="/tmp/x", inner=None,
          norm: Literal["layer", "batch"] = "layer", late: "Literal['a', 'b']" = "b", size=2 * 3):
    ...

class Net:
    def __init__(self, width=8, *, depth=2): ...

class Config:
    width: int = 8
    kind = "net"
    rate: float = 0.5
"""


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "nets.py"
    path.write_text(NETS)
    words = {"norm": ("layer", "batch"), "late": ("a", "b")}
    numbers = {"batch": 4, "width": 64, "dropout": 0.1, "bias": True, "shift": -1}
    assert factory_arguments(str(path)) == FactoryArguments(
        usual={**numbers, "norm": "layer", "late": "b"}, choices=words, needed=("n",)
    ), "a word without choices may be a path, and what has to be computed is not known"
    assert factory_arguments(f"{path}:Net").usual == {"width": 8, "depth": 2}
    assert factory_arguments(f"{path}:Config").usual == {"width": 8, "rate": 0.5}


def test_a_configuration_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"hidden_size": 32, "act": "silu", "use_cache": True, "eos_token_id": 2, "eps": 1e-5}))
    expected = {**HUGGING_FACE, "hidden_size": 32, "eps": 1e-5}
    assert factory_arguments(f"hf:{path}").usual == factory_arguments(f"hf:{tmp_path}").usual == expected


@pytest.mark.parametrize("target", ["gone.py", "package.module:build", "hf:gone/config.json", "hf:NoSuchConfig"])
def test_what_is_not_found_offers_nothing_of_its_own(target: str) -> None:
    assert factory_arguments(target).usual == (HUGGING_FACE if target.startswith("hf:") else {})


@pytest.mark.parametrize("text", ["def (", "x = 1", "[1, 2]", "\0"])
def test_what_cannot_be_read_offers_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "nets.py").write_text(text)
    (tmp_path / "config.json").write_text(text)
    assert factory_arguments(f"{tmp_path / 'nets.py'}:build") == FactoryArguments()
    assert factory_arguments(f"hf:{tmp_path / 'config.json'}").usual == HUGGING_FACE


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize(("kind", "names"), [("GPT2Config", {"n_layer", "n_embd"}), ("LlamaConfig", {"hidden_size"})])
def test_a_configuration_of_the_library_has_its_numbers(kind: str, names: set[str]) -> None:
    usual = factory_arguments(f"hf:{kind}").usual
    assert names <= set(usual) and not any(name.endswith("token_id") for name in usual)


GPT = CHALLENGES["gpt"]


@pytest.fixture(scope="module")
def run() -> Comparison:
    graph = gpt(6)
    policy = RunSpec(model=GPT.model, policy=Policy.recompute([f"blocks.{i}" for i in range(5)]))
    return compared(graph, policy)


def test_each_mark_is_what_the_run_says(run: Comparison) -> None:
    peak, ratio = run.candidate.step_peak_bytes, run.headlines()["flop_ratio"]
    assert peak is not None and ratio is not None and is_about(GPT, run) and not is_about(CHALLENGES["resnet"], run)
    just = msgspec.structs.replace(GPT, peak_bytes=peak, flop_ratio=ratio)
    assert [mark.met for mark in marks(just, run)] == [True, True, True]
    tight = msgspec.structs.replace(GPT, peak_bytes=peak - 1, flop_ratio=ratio - 1e-9)
    assert [mark.met for mark in marks(tight, run)] == [False, False, True]


sizes = st.integers(1, 10**12)


@given(sizes, sizes, sizes)
def test_one_answer_is_right_and_the_others_lie_apart(peak: int, saved: int, foreseen: int) -> None:
    guesses = peak_guesses(peak, saved, foreseen)
    (right,) = (guess for guess in guesses if guess.right)
    assert right.peak_bytes == foreseen
    answers = [guess.peak_bytes for guess in guesses]
    assert all(one - other > 0.05 * foreseen for one, other in zip(answers, answers[1:]))


def test_what_people_usually_think_is_offered() -> None:
    answers = [guess.peak_bytes for guess in peak_guesses(200, 150, 70)]
    assert answers == [200, 100, 70, 50]


@pytest.mark.parametrize(("name", "text", "kind", "member"), [
    ("net.py", f"{NET}class Net(nn.Module):\n    def __init__(self): self.a = Block()\n", "model", ":Net"),
    ("made.py", f"{NET}def make_net(n=3): ...", "model", ":make_net"),
    ("held.py", f"{NET}net = Block()\n", "model", ":net"),
    ("one.py", "import torch\nloss = torch.nn.MSELoss()\nmodel = torch.nn.Linear(10, 10)\n", "model", ":model"),
    ("beside.py", f"{NET}act = nn.ReLU()\n", "model", ":Block"),
    ("loop.py", f"{NET}for i in range(3):\n    loss.backward()\n", "script", ""),
    ("hydra.py", "from lib import main\nif __name__ == '__main__':\n    main()\n", "script", ""),
    ("config.json", '{"model_type": "gpt2"}', "model", ""),
    ("p.yaml", "version: 1", "policy", ""),
    ("x.lock", '{"packages": {}, "step": {}}', "lock", ""),
    ("any.thing", "checkpoint-explorer run\nrest", "run", ""),
    ("t.json", '{"traceEvents": []}', "history", ""),
])  # fmt: skip
def test_a_file_is_recognized_by_its_text(tmp_path: Path, name: str, text: str, kind: str, member: str) -> None:
    (file := tmp_path / name).write_text(text)
    source = recognize(str(file))
    assert (source.kind, source.target) == (kind, f"{file}{member}") and name in source.sentence


def test_the_choice_among_several_models_is_named(tmp_path: Path) -> None:
    (file := tmp_path / "net.py").write_text(f"{NET}class Net(nn.Module):\n    def __init__(self): self.a = Block()\n")
    assert recognize(str(file)).sentence.endswith("its class Net, the last that no other class builds; besides: Block.")
    file.write_text(NET)
    assert recognize(str(file)).sentence.endswith("its only class Block.")
    file.write_text(f"{NET}def make_net(n=3): ...")
    assert "made by its function make_net" in recognize(str(file)).sentence
    file.write_text("def make_net(n=3): ...")
    assert "made by its only function make_net" in recognize(str(file)).sentence


def test_a_notebook_is_refused_with_the_command_that_makes_it_a_script(tmp_path: Path) -> None:
    file = tmp_path / "net.ipynb"
    file.write_text('{"cells": [], "nbformat": 4}')
    with pytest.raises(BadInput, match="notebook") as refused:
        recognize(str(file))
    assert f"--to script {file}" in refused.value.hint
