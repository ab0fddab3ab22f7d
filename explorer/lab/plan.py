"""The lessons that can run, read from source text: torch stays out, no code of theirs runs.

A lesson is one file of `explorer/lab/engine/lessons/`. Its docstring is the title and the story;
literals hold the rest:

    THEME, PLACE   the shelf it stands on, and where on it; without a place it stands last
    QUESTION       the one thing that it answers
    SWITCHES       {name: (question, {value: what it means})}, the default value first
    WORDS          terms of the glossary (explorer/lab/view/glossary.py)
    TAKES_MODEL    True: a person may name a model for it; without it the lesson brings its own nets
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import get_args

from explorer.errors import BadInput, UnreadableFile, message_of, nearest
from explorer.lab.record import Lesson, Theme
from explorer.plan.catalogue import literals
from explorer.record.base import from_plain

LESSONS = Path(__file__).resolve().parent / "engine" / "lessons"
_LITERALS = ("THEME", "QUESTION", "SWITCHES", "WORDS")


def lessons() -> tuple[Lesson, ...]:
    """Every lesson, in the order in which they are offered. Raises UnreadableFile for a file that is none."""
    return _lessons_in(LESSONS)


def lesson_called(name: str) -> Lesson:
    """The lesson called `name`. Raises BadInput that offers the nearest names."""
    by_name = {lesson.name: lesson for lesson in lessons()}
    if name in by_name:
        return by_name[name]
    raise BadInput(f"The lab has no experiment {name!r}.", hint=nearest(name, by_name) or ", ".join(by_name))


def settings(lesson: Lesson, values: Mapping[str, str]) -> dict[str, str]:
    """Every switch with its value: the one in `values` or the default. Raises BadInput with all faults at once."""
    switches = {switch.name: switch for switch in lesson.switches}
    faults = []
    for name, value in values.items():
        if name not in switches:
            faults.append(f"{lesson.name} has no switch {name!r} (it has {', '.join(switches) or 'none'})")
        elif value not in switches[name].values:
            faults.append(f"{name} cannot be {value!r} (it can be {', '.join(switches[name].values)})")
    if faults:
        raise BadInput(f"{'; '.join(faults)}.", hint=f"`python -m explorer lab {lesson.name} --json` runs it as it is.")
    return {name: values.get(name, switch.default) for name, switch in switches.items()}


@cache
def _lessons_in(folder: Path) -> tuple[Lesson, ...]:
    files = (path for path in sorted(folder.glob("*.py")) if path.stem != "__init__")
    return tuple(lesson for _, lesson in sorted(map(_read, files), key=lambda placed: placed[0]))


def _read(path: Path) -> tuple[tuple[int, float], Lesson]:
    """The position of a lesson in the list, and the lesson. Raises UnreadableFile."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        values = literals(tree, (*_LITERALS, "PLACE", "TAKES_MODEL"))
        title, _, story = (ast.get_docstring(tree) or "").partition("\n\n")
        missing = [name for name in _LITERALS if name not in values] + ["story below its title"] * (not story)
        if missing:
            raise ValueError(f"it has no {', no '.join(missing)}")
        lesson = {
            "name": path.stem.replace("_", "-"),
            "theme": values["THEME"],
            "title": " ".join(title.split()).rstrip("."),
            "question": values["QUESTION"],
            "paragraphs": [" ".join(paragraph.split()) for paragraph in story.split("\n\n")],
            "switches": _switches(values["SWITCHES"]),
            "words": values["WORDS"],
            "takes_model": values.get("TAKES_MODEL", False),
        }
        shelf = get_args(Theme)
        read = from_plain(lesson, Lesson)
        return (shelf.index(read.theme), float(values.get("PLACE", math.inf))), read
    except (OSError, SyntaxError, ValueError, TypeError, UnreadableFile) as error:
        raise UnreadableFile(f"{path} cannot be read as a lesson: {message_of(error)}.") from error


def _switches(written: Mapping[str, tuple[str, Mapping[str, str]]]) -> list[dict[str, object]]:
    try:
        return [
            {
                "name": name,
                "question": question,
                "choices": [{"value": v, "label": label} for v, label in words.items()],
            }
            for name, (question, words) in written.items()
        ]
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError("SWITCHES must be {name: (question, {value: what it means})}") from error
