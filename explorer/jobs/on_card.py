"""What crosses to the processes that see an imaginary card: a script with its card, or one step to count."""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from pathlib import Path

from explorer.errors import BadInput
from explorer.record.base import Count, Record
from explorer.record.run import RunSpec


class CountOnCard(Record, tag=True):
    """-> CardCount: torch's own CUDA code takes the step of `spec` on the imaginary card that `spec` names."""

    spec: RunSpec


class CardCount(Record):
    """`figures`: allocated and reserved peak that torch's allocator counted in the step of `spec`."""

    spec: RunSpec
    figures: tuple[Count, Count]


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
