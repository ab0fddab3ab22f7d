"""A model of three blocks that may go wrong, and commands asked about it: what they print, as text or as a record."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from explorer.cli import main as cli
from explorer.record import Comparison, Measurement
from explorer.record.base import from_plain

TINY = '''"""Three blocks with dropout, and ways to go wrong."""
import os, time
import torch
from torch import nn

SIZES = {"small": {"width": 8}, "gpu": {"width": 16}}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.dropout(torch.relu(self.linear(x)))


class Tiny(nn.Module):
    def __init__(self, width, trouble):
        super().__init__()
        self.trouble = trouble
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        if self.trouble == "raises":
            x.view(3, 5)
        if self.trouble == "hangs":
            open(os.environ.get("STARTED", os.devnull), "w").close()
            time.sleep(60)
        if self.trouble == "exits":
            raise SystemExit(3)
        if self.trouble == "asks for too much":
            torch.empty(2**50)
        if self.trouble == "leaves":
            os._exit(7)
        return x


def build(width, trouble=""):
    print("a model may print")
    return Tiny(width, trouble), torch.randn(256, width)
'''
TROUBLE = '''"""Goes wrong as it is told."""
from tiny import build


def trouble(kind="raises"):
    return build(8, kind)
'''


def wrong(tiny: str) -> str:
    """The file beside it, whose model fails."""
    return tiny.replace("tiny.py", "wrong.py")


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli.app, list(arguments), terminal_width=120)
    assert result.exit_code == code, (result.exit_code, result.stdout, result.stderr, result.exception)
    return result


def read(*arguments: str, code: int = 0) -> Any:
    """The one document on stdout."""
    return json.loads(run(*arguments, "--json", code=code).stdout)


def as_record(document: dict[str, Any], kind: Any) -> Any:
    """The record in a document of `--json`, without the headline figures beside its fields."""
    fields = {name: document[name] for name in kind.__struct_fields__}
    if kind is Comparison:
        for name in ("baseline", "candidate"):
            fields[name] = {key: fields[name][key] for key in Measurement.__struct_fields__}
    return from_plain(fields, kind)
