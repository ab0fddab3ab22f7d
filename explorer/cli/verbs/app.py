"""`checkpoint-explorer app [FILE]`: the page, in a browser on this machine."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated
from urllib.parse import urlencode

import typer

from explorer.cli.command import answer_console, verb
from explorer.errors import BadInput, brings
from explorer.jobs.connection import free_port
from explorer.plan.catalogue import beside_or_inside
from explorer.plan.recognize import model_in

OwnFile = Annotated[str | None, typer.Argument(metavar="FILE", help="A model that the page opens first.")]
Weights = Annotated[Path | None, typer.Option(metavar="FILE", help="Weights that the page may start from.")]
Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Of the loopback; by default the first free one.")]


@verb
def app(
    file: OwnFile = None,
    weights: Weights = None,
    port: Port = None,
) -> None:
    """The page: choose what is recomputed, run it, compare. Opening a model runs its code with your rights."""
    if find_spec("streamlit") is None:
        raise BadInput("The page needs streamlit, which is not installed.", hint=f"{brings('streamlit')}.")
    target = "" if file is None else model_in(file)
    port = port or free_port()
    options = [f"--model={target}", f"--weights={weights or ''}"]
    query = f"?{urlencode({'model': target})}" if target else ""
    answer_console().print(f"The page: http://localhost:{port}/{query}  Ctrl-C ends it.", markup=False)
    sys.stdout.flush()
    # -P: a person's own explorer.py in this folder would be imported instead of the library.
    page = str(beside_or_inside("app.py", "page"))
    start = [sys.executable, "-P", "-m", "streamlit", "run", page, f"--server.port={port}", "--", *options]
    os.execv(sys.executable, start)
