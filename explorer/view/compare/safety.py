"""Is it safe? What is known to go wrong with the drawn policy, in words for strip, Run and download."""

from __future__ import annotations

from explorer.record.graph import Hazard
from explorer.view.drawing.units import count

TRUSTED = ("bitwise equal", "rounding")
"""Verdicts of a file's evidence that need no word of warning."""


def errors(fired: tuple[Hazard, ...]) -> tuple[Hazard, ...]:
    """Those that are wrong or refused for certain."""
    return tuple(hazard for hazard in fired if hazard.severity == "error")


def danger(fired: tuple[Hazard, ...], tab: str = "Gradients") -> str:
    """The first error with its remedy, and how many more there are in that tab; the empty string: none is known."""
    wrong = errors(fired)
    if not wrong:
        return ""
    more = f" {count(len(wrong) - 1, 'more error')} in the tab {tab}." if len(wrong) > 1 else ""
    return f"Known before any run: {wrong[0].sentence} {wrong[0].remedy}{more}"


def in_file(fired: tuple[Hazard, ...]) -> str:
    """Comment lines for a file that carries the policy away; a name cannot end the comment, nor name an encoding."""
    lines = [f"#   {' '.join(f'{hazard.sentence} {hazard.remedy}'.split())}\n" for hazard in errors(fired)]
    return "".join(["# WARNING\n", "# Known to go wrong before any run:\n", *lines]) if lines else ""


def doubt(verdict: str | None) -> str:
    """What a policy file's own evidence says against it; the empty string: nothing."""
    if verdict is None or verdict in TRUSTED:
        return ""
    return f"The evidence in this policy file says: {verdict}. Run it here before you use it."
