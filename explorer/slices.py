"""Slices: topics that are whole in one folder of the package. Delete the folder, and the rest works.

The rooms of a slice have the names of the rings. A ring of the core asks here for rows of its own kind: `parts("jobs")`
has `explorer.lab.jobs` and so on. No file of the core imports a slice by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from explorer.errors import BadInput

_PACKAGE = Path(__file__).parent


@cache
def names() -> tuple[str, ...]:
    """Slices that are here: folders with requests of their own."""
    return tuple(path.parent.name for path in sorted(_PACKAGE.glob("*/jobs.py")))


@cache
def parts(module: str) -> Mapping[str, ModuleType]:
    """The module of this name of each slice that has one, by slice."""
    path = module.replace(".", "/")
    files = [(name, _PACKAGE / name / file) for name in names() for file in (f"{path}.py", f"{path}/__init__.py")]
    return {name: import_module(f"{__package__}.{name}.{module}") for name, file in files if file.is_file()}


def part(name: str, module: str) -> ModuleType:
    """The module of one slice. Raises BadInput where the slice is not here."""
    if name not in parts(module):
        raise BadInput(f"This needs explorer/{name}, which is not here.", hint="Install the whole package.")
    return parts(module)[name]
