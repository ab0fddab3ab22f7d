"""A lesson that is not among the lab's own: what somebody who adds one writes."""

from __future__ import annotations

from pathlib import Path

from explorer.lab.plan import LESSONS

ONE_MORE = '''"""One more lesson.

A file is all that
it takes.

Nothing else names it.
"""

from __future__ import annotations

from explorer.lab.engine.kit.bench import Answer, LabBench, Setting, gradients_of
from explorer.lab.engine.kit.nets import Smooth
from explorer.lab.engine.kit.rows import baseline_row, compared_row, distance_bars

THEME = "Traps"
QUESTION = "Can a lesson be added as a file?"
SWITCHES = {"which": ("Which switch?", {"this": "This one", "that": "That one"})}
WORDS = ("gradient",)


def run(setting: Setting, bench: LabBench) -> Answer:
    """Compares gradients with themselves."""
    model = Smooth().to(bench.device)
    model(bench.normal(4, 16)).sum().backward()
    rows = (baseline_row("first"), compared_row("again", gradients_of(model), gradients_of(model)))
    return Answer(rows, distance_bars(rows[1:], "How wrong?"), (f"It ran with {setting['which']}.",))
'''


def with_one_more(folder: Path, source: str = ONE_MORE) -> Path:
    """`folder`, holding the lab's own files and `one_more.py`."""
    for path in LESSONS.glob("*.py"):
        (folder / path.name).symlink_to(path)
    (folder / "one_more.py").write_text(source)
    return folder
