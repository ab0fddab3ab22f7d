"""What `run` is asked for: the file of a module, and a card, which crosses to the processes that see it."""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from pathlib import Path

from explorer.errors import BadInput
from explorer.record.base import Record


class OnCardRequest(Record):
    """`steps` None: until the peak repeats. `ranks` None: not under torchrun. `out` names the file of the last step."""

    card: str
    out: str
    json: bool
    steps: int | None = None
    ranks: int | None = None


def file_of_module(name: str) -> Path:
    """The file that `python -m name` runs. Raises BadInput if there is none."""
    spec = None
    with suppress(ImportError):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.origin is None:
        raise BadInput(f"There is no module {name} to run.", hint="Give the name that `python -m` would be given.")
    return Path(spec.origin)
