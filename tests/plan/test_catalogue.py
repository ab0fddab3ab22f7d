"""The list of samples comes from their source text alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from explorer.errors import UnreadableFile
from explorer.plan.catalogue import SAMPLES, catalogue, default_size, own_samples, sample

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
