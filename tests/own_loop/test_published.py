"""Scripts of the kinds that people publish, as they are: one command each answers with figures that add up.

The second method for the size of a model is the script's own: each prints the number of its parameters.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = Path(__file__).parent / "published.md"
_FILE = re.compile(r"^## (\S+)\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMANDS = {
    "gpt with a configurator": ("gpt", "train.py", "--", "config/tiny.py", "--device=cpu", "--compile=False"),
    "loop over images": (".", "vision.py", "--", "-b", "4"),
    "causal language model": (".", "causal_lm.py"),
    "lightning": (".", "lightning_module.py"),
    "diffusion": (".", "diffusion.py"),
    "gan": (".", "gan.py"),
    "seq2seq": (".", "seq2seq.py"),
    "accelerate": (".", "accelerated.py"),
    "arguments in a package": (".", "pkg/imagenet/train.py", "--", "--depth", "2"),
    "module of a package": ("pkg", "-m", "imagenet.train", "--", "--depth", "2"),
    "configuration": ("hydra_like", "train.py", "--", "trainer.batch_size=4"),
    "spawned workers": (".", "spawned.py"),
}
MODELS = {
    "gan": "Generator netG, Discriminator netD",
    "seq2seq": "AttnDecoderRNN attn_decoder1, EncoderRNN encoder1",
    "spawned workers": "DistributedDataParallel",
    "configuration": "TextCNN",
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scripts_of(PUBLISHED, tmp_path_factory.mktemp("published"))


def scripts_of(markdown: Path, place: Path) -> Path:
    for name, text in _FILE.findall(markdown.read_text()):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return place


def answer(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CHECKPOINT_EXPLORER_HOME": str(folder), "MASTER_PORT": port}
    command = [sys.executable, "-P", "-m", "explorer", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def as_document(arguments: tuple[str, ...]) -> list[str]:
    """The same command with `--json` before the script's own arguments."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return [*arguments[:place], "--json", *arguments[place:]]


@pytest.mark.parametrize("kind", COMMANDS)
def test_one_command_answers_for_an_unmodified_script(folder: Path, kind: str) -> None:
    place, *arguments = COMMANDS[kind]
    result = answer(folder / place, *as_document(tuple(arguments)))
    assert result.returncode == 0, result.stderr[-2000:]
    document: dict[str, Any] = json.loads(result.stdout)
    (counted,) = set(re.findall(r"(?:parameters|param count)\D*(\d+)", result.stderr))
    assert document["n_parameters"] == int(counted)
    assert document["peak_bytes"] == sum(document["held"].values()) > 4 * document["n_parameters"]
    assert document["model"] == MODELS.get(kind, document["model"])
    assert document["step"].split(", ")[1] == "step 2" and document["next"].startswith("checkpoint-explorer ")
    assert all(change["gradients"] == "not judged" for change in document["changes"])
    if kind == "spawned workers":
        records = sorted(path.name for path in (folder / place).glob("step2.rank*"))
        assert records == ["step2.rank0.explorer", "step2.rank1.explorer"], "each process wrote its own"


def test_the_terminal_has_about_twelve_lines_and_the_next_command_runs(folder: Path) -> None:
    place, *arguments = COMMANDS["gpt with a configurator"]
    printed = answer(folder / place, *arguments).stdout.splitlines()
    labels = [line.partition(" ")[0] for line in printed if not line.startswith((" ", "iter", "number"))]
    assert labels == ["train.py", "Step", "Peak", "Held", "Fits", "Helps", "Next"] and len(printed) <= 14
    planned = answer(folder / place, *printed[-1].split()[2:])
    assert planned.returncode == 0 and (folder / place / "policy.yaml").exists(), planned.stderr
