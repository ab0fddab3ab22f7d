"""Scripts as people publish them, in the Markdown files of this folder: written to a folder, and run under watch."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
_FILE = re.compile(r"^## (\S+)\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SMALL: dict[str, str] = {
    "gpt.py": "--batch_size=2 --block_size=64 --n_layer=2 --n_head=2 --n_embd=64 --vocab_size=512",
    "classifier.py": "-b 4 --img-size 64 --width 8 --layers 1 1 --num-classes 10 --amp --channels-last",
    "trainer.py": "--hidden_size 64 --num_hidden_layers 2 --vocab_size 256 --block_size 32 --bf16 --output_dir out",
    "lit.py": "--vocab 128 --width 64 --depth 2 --length 16 --batch_size 4",
    "diffusion.py": "--dim 8 --image_size 16 --batch 2 --amp",
    "gan.py": "--batchSize 4 --ngf 8 --ndf 8 --nz 8",
    "ddp.py": "--width 32 --batch_size 16",
    "fsdp.py": "--vocab_size 512 --dim 64 --n_layers 2 --seq_len 16",
    "accumulate.py": "--size 32 --base 8 -b 2 --amp",
    "tagger.py": "--vocab 64 --emsize 16 --nhid 16 --nlayers 2 --longest 12 --batch-size 4",
}
"""Scripts of `cuda_scripts.md`, with arguments for a step of some MiB."""
LARGE: dict[str, tuple[str, str]] = {
    "gpt.py": ("", "--batch_size=48"),
    "classifier.py": ("--amp --channels-last", "-b 640"),
    "trainer.py": ("--bf16 --output_dir out --per_device_train_batch_size 4", "--per_device_train_batch_size 16"),
    "lit.py": ("", "--batch_size 128"),
    "diffusion.py": ("--amp", "--batch 128"),
    "gan.py": ("--batchSize 128", "--batchSize 4096 --ngf 256 --ndf 256"),
    "ddp.py": ("", "--depth 12"),
    "fsdp.py": ("", ""),
    "accumulate.py": ("--amp", "-b 32"),
    "tagger.py": ("", "--batch-size 4096"),
}
"""Arguments of a usual size, and those to add so that a card of 24 GiB refuses a request."""
RANKS = {"ddp.py": "2", "fsdp.py": "2"}


def scripts_of(markdown: str, folder: Path) -> Path:
    """`folder`, with the scripts of that file of this folder."""
    for name, text in _FILE.findall((HERE / markdown).read_text()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def answer(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m explorer ARGUMENTS` in `folder`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    paths = {"PYTHONPATH": str(HERE.parents[1]), "CHECKPOINT_EXPLORER_HOME": str(folder)}
    command = [sys.executable, "-P", "-m", "explorer", *arguments]
    environment = {**os.environ, **paths, "MASTER_PORT": port}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def on_card(folder: Path, card: str, script: str, arguments: str) -> subprocess.CompletedProcess[str]:
    """A script of `cuda_scripts.md` on an imaginary card, with as many ranks as it needs."""
    ranks = ("--ranks", RANKS[script]) if script in RANKS else ()
    command = ("run", "--card", card, "--json", "--out", f"{script}.explorer", *ranks, script, "--")
    return answer(folder, *command, *arguments.split())
