"""Seconds of every lab experiment at its default switches, in one warm process; the limit is 5 s on two cores."""

from __future__ import annotations

import torch._dynamo  # noqa: F401  the first checkpoint call imports it, which is no experiment's fault

from explorer.lab.engine.run import run_lab
from explorer.lab.plan import lessons

LIMIT_S = 5.0


def main() -> None:
    seconds = {lesson.name: run_lab(lesson.name, {}).seconds for lesson in lessons()}
    for name, taken in sorted(seconds.items(), key=lambda entry: -entry[1]):
        print(f"{name:20} {taken:6.2f} s{'  above the limit' if taken > LIMIT_S else ''}")


if __name__ == "__main__":
    main()
