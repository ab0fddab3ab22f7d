"""The sample models as a list, read from their source text: torch stays out, and no model runs to be listed."""

from __future__ import annotations

import ast
from pathlib import Path

from explorer.errors import UnreadableFile
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


def catalogue(folder: Path = SAMPLES) -> tuple[Sample, ...]:
    """Every sample in `folder`, by name. Raises UnreadableFile for a file that cannot be read as a sample."""
    return tuple(sample(path) for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_"))


def sample(path: Path) -> Sample:
    """One sample file. Raises UnreadableFile."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise UnreadableFile(f"{path} cannot be read as a sample model: {error}.") from error
    title, _, lesson = (ast.get_docstring(tree) or path.stem).partition("\n")
    return Sample(
        name=path.stem,
        target=f"{path.parent.name}/{path.name}",
        title=title.strip().rstrip("."),
        lesson=lesson.strip(),
        sizes=_sizes(tree, path),
    )


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
