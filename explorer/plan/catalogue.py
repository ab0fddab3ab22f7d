"""The sample models as a list, read from their source text: torch stays out, and no model runs to be listed."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

from explorer.errors import UnreadableFile, message_of
from explorer.plan.factory_arguments import FactoryArguments, factory_arguments
from explorer.record.base import Record

SAMPLES = Path(__file__).resolve().parents[2] / "sample_models"
"""Beside the package in a checkout; absent where only the package is installed."""


class Sample(Record):
    """A sample model that can be loaded."""

    name: str
    target: str
    """Model reference: `sample_models/gpt.py`."""
    title: str
    """First line of the file's docstring."""
    lesson: str
    """The rest of it: what the model teaches, in Markdown."""
    sizes: dict[str, dict[str, int | float | str | bool]]
    """Arguments of the factory by size name."""
    arguments: FactoryArguments = FactoryArguments()
    """What can be changed besides, as it usually is."""

    def usual(self, size: str | None) -> dict[str, int | float | str | bool]:
        """Arguments, and over them those of that size, or of the size that is taken where none is named."""
        return {**self.arguments.usual, **self.sizes.get(size or default_size(self.sizes) or "", {})}


def catalogue(folder: Path = SAMPLES) -> tuple[Sample, ...]:
    """Every sample in `folder`, by name. Raises UnreadableFile for a file that cannot be read as a sample."""
    return tuple(sample(path) for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_"))


def sample(path: Path) -> Sample:
    """One sample file. Raises UnreadableFile."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise UnreadableFile(f"{path} cannot be read as a sample model: {message_of(error)}.") from error
    title, _, lesson = (ast.get_docstring(tree) or path.stem).partition("\n")
    return Sample(
        name=path.stem,
        target=f"{path.parent.name}/{path.name}",
        title=title.strip().rstrip("."),
        lesson=lesson.strip(),
        sizes=_sizes(tree, path),
    )


def own_samples(targets: Iterable[str]) -> tuple[Sample, ...]:
    """Models given by reference, each under a name that no other has; a file's SIZES are its sizes."""
    given = tuple(dict.fromkeys(targets))
    short = {target: _short(target) for target in given}
    return tuple(
        Sample(
            name=target,
            target=target,
            title=short[target] if list(short.values()).count(short[target]) == 1 else target.replace(":", ", "),
            lesson="Given on the command line.",
            sizes=sizes_of(target),
            arguments=factory_arguments(target),
        )
        for target in given
    )


def default_size(sizes: Mapping[str, object]) -> str | None:
    """The size that a model has when none is named."""
    return "small" if "small" in sizes else next(iter(sizes), None)


def _short(target: str) -> str:
    """`nets.py, build_b`; `llama/config.json`, because every local configuration is called config.json."""
    if target.startswith("hf:"):
        path = Path(target.removeprefix("hf:"))
        return "/".join(path.parts[-2:]) if path.suffix == ".json" else path.name
    where, _, factory = target.partition(":")
    return f"{Path(where).name}, {factory}" if factory else Path(where).name


def sizes_of(target: str) -> dict[str, dict[str, int | float | str | bool]]:
    """Arguments by size name of the file behind a reference; empty where it has no SIZES or cannot be read, of which
    opening the model says why."""
    path = Path(target.partition(":")[0])
    if path.suffix != ".py":
        return {}
    try:
        return _sizes(ast.parse(path.read_text(encoding="utf-8")), path)
    except (OSError, SyntaxError, ValueError, UnreadableFile):
        return {}


def _sizes(tree: ast.Module, path: Path) -> dict[str, dict[str, int | float | str | bool]]:
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "SIZES" for target in targets):
            value = getattr(statement, "value", None)
            try:
                return dict(ast.literal_eval(value)) if value is not None else {}
            except (ValueError, TypeError) as error:
                raise UnreadableFile(f"{path}: SIZES must be a literal dictionary.") from error
    return {}
