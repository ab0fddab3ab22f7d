"""Arguments are read from the text of a factory: numbers, switches and named choices, and no code runs for it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from explorer.plan.catalogue import HUGGING_FACE, FactoryArguments, factory_arguments

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
        usual={**numbers, "norm": "layer", "late": "b"}, choices=words
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
