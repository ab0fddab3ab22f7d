"""Models in Python files of a person, found by reading the files as text: no code of theirs runs, torch stays out.

`catalogue.py` reads the arguments of a model that is named; this file finds the names. A name is offered if it is a
class that derives from a module, or a function whose name says that it builds a model.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

from explorer.errors import BadInput, ModelNotLoaded, UnreadableFile, message_of, nearest
from explorer.plan.catalogue import factory_arguments, sizes_of, source_path
from explorer.plan.factory_text import Value
from explorer.record.bounded_file import read_text

LARGEST_SOURCE = 1 << 20
"""Bytes of a file that is searched for models."""
MOST_FILES, MOST_FOLDERS_DEEP = 400, 3
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "tests", "build", "dist"}
_BUILDERS = re.compile(r"build$|(\w+_)?(model|net|network)$")
_MODULES = re.compile(r"(Module|(?<!Base)Model|Net|Sequential|ModuleList)$")


def models_in(path: Path) -> tuple[str, ...]:
    """Names in a file that make a model: `build`, then classes that no other of its classes contains, then all others.

    Raises UnreadableFile, and ModelNotLoaded with the line of a syntax error.
    """
    text = read_text(path, LARGEST_SOURCE)
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ModelNotLoaded(f"{path} cannot be read at line {error.lineno}: {error.msg}.") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ModelNotLoaded(f"{path} cannot be read as Python: {message_of(error)}.") from error
    modules: dict[str, ast.ClassDef] = {}
    builders = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(_is_module(base, modules) for base in node.bases):
            modules[node.name] = node
        elif isinstance(node, ast.FunctionDef) and _BUILDERS.match(node.name):
            builders.append(node.name)
    parts = {
        inner.id
        for name, node in modules.items()
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and inner.id != name
    }
    classes = [name for name in modules if not name.startswith("_")]
    wholes = [name for name in classes if name not in parts]
    builders.sort(key=lambda name: name != "build")
    return (*builders, *wholes, *(name for name in classes if name in parts))


def _is_module(base: ast.expr, modules: dict[str, ast.ClassDef]) -> bool:
    name = ast.unparse(base)
    return name in modules or _MODULES.search(name) is not None


def found_models(folder: Path) -> tuple[str, ...]:
    """References to the first model of each file below `folder`, the nearest files first."""
    references = []
    for path in _python_files(folder):
        try:
            names = models_in(path)
        except (BadInput, UnreadableFile):
            continue
        if names:
            where = path.relative_to(folder).as_posix()
            references.append(where if names[0] == "build" else f"{where}:{names[0]}")
    return tuple(references)


def _python_files(folder: Path) -> Iterator[Path]:
    """Python files below `folder`, level by level."""
    level, n_files = [folder], 0
    for _ in range(MOST_FOLDERS_DEEP):
        below: list[Path] = []
        for parent in level:
            try:
                entries = sorted(os.scandir(parent), key=lambda entry: entry.name)
            except OSError:
                continue
            for entry in entries:
                if entry.name.startswith(".") or entry.name in _SKIPPED or entry.is_symlink():
                    continue
                if entry.is_dir():
                    below.append(Path(entry.path))
                elif entry.name.endswith(".py") and n_files < MOST_FILES:
                    n_files += 1
                    yield Path(entry.path)
        level = below


def choices_for(target: str) -> tuple[str, ...]:
    """The references that `target` may mean: itself, or one for each model of a file that is named without one.

    Raises BadInput: no such file, a line that is no Python, a file without models, text that names nothing.
    """
    where, colon, name = target.partition(":")
    if where.startswith("~"):
        where = str(Path(where).expanduser())
        target = f"{where}{colon}{name}"
    if target.startswith("hf:") or target.endswith(".json"):
        return (target,)
    if not where.endswith(".py"):
        if not name or not re.fullmatch(r"[\w.]+", where):
            raise BadInput(
                f"{target!r} names no model.",
                hint="Type path/to/file.py, file.py:factory, package.module:factory or hf:GPT2Config.",
            )
        return (target,)
    path = source_path(where)
    if not path.is_file():
        stems = [each.name for each in path.parent.glob("*.py")]
        raise BadInput(f"There is no file {path.resolve()}.", hint=nearest(path.name, stems))
    names = models_in(path)
    if name:
        return (target,)
    if not names:
        raise BadInput(
            f"{where} has no class of nn.Module and no function that builds a model.",
            hint=f"Name it as {where}:name. A training script runs with `python -m explorer run {where}`.",
        )
    return (where,) if names[0] == "build" else tuple(f"{where}:{each}" for each in names)


def needed_arguments(target: str) -> tuple[str, ...]:
    """Arguments without a default that a person has to give; a file's SIZES give theirs."""
    return () if sizes_of(target) else factory_arguments(target).needed


def typed_value(text: str) -> Value:
    """A number or a switch if `text` reads as one, else the text."""
    try:
        value = ast.literal_eval(text.capitalize() if text in ("true", "false") else text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text
    return value if isinstance(value, (bool, int, float)) else text
