"""One palette for every picture: a colour means the same thing in graph, timeline, ledger and table.

Rules that the tests keep:
1. Every colour reaches a contrast of 3:1 against the light and against the dark page (WCAG 2.2, 1.4.11).
2. Any two roles differ to a colour-blind eye, or by their pattern: colour alone carries no meaning.
3. Text on a colour is black or white (`ink`), text on the page has the theme's own colour: 4.5:1 (WCAG 2.2, 1.4.3).
4. A phase wears the colour of the role that it produces: forward saves activations, recompute makes them again,
   backward makes gradients, the optimizer moves its state.
"""

from __future__ import annotations

from explorer.record.allocations import Phase, Role
from explorer.record.comparison import Verdict

LIGHT_PAGE, DARK_PAGE = "#FFFFFF", "#171614"
"""Streamlit's two page backgrounds."""

RECOMPUTE = "#1F77C8"
KEEP = "#E0650A"
"""Colour of kept blocks, whose saved activations stay."""

_ROLES: dict[Role, tuple[str, str]] = {
    "parameter": ("#6B7785", ""),
    "buffer": ("#A08060", "."),
    "optimizer state": ("#8A6A00", "-"),
    "input": ("#1B9AA8", "+"),
    "temporary": ("#C45CA0", "\\"),
    "saved activation": (KEEP, ""),
    "recomputed": (RECOMPUTE, "/"),
    "gradient": ("#1E9E62", "|"),
    "unattributed": ("#8C8C8C", "x"),
    "gathered parameter": ("#7A5AC8", "+"),
    "reduce-scatter buffer": ("#B0483A", "."),
    "gradient bucket": ("#5F8A1E", "\\"),
    "cuBLAS workspace": ("#4E5FA8", "-"),
}
"""Colour, and Plotly's pattern shape; `/` is recompute wherever a pattern is drawn."""
ROLE_COLOURS: dict[Role, str] = {role: colour for role, (colour, _) in _ROLES.items()}
ROLE_PATTERNS: dict[Role, str] = {role: pattern for role, (_, pattern) in _ROLES.items()}

PHASE_COLOURS: dict[Phase, str] = {
    "forward": ROLE_COLOURS["saved activation"],
    "recompute": RECOMPUTE,
    "backward": ROLE_COLOURS["gradient"],
    "optimizer": ROLE_COLOURS["optimizer state"],
    "between": ROLE_COLOURS["temporary"],
}
PHASE_PATTERNS: dict[Phase, str] = {"forward": "", "recompute": "/", "backward": "", "optimizer": "-", "between": "."}

RUN_COLOURS: dict[str, str] = {"baseline": "#7A828C", "candidate": "#C2417C"}
RUN_DASHES: dict[str, str] = {"baseline": "dot", "candidate": "solid"}
DASHES = ("solid", "dash", "dot", "dashdot")
"""Dashes of lines of equal rank, by turns: a lower line shows through the gaps of an upper line."""
ON_COLOUR = "#000000"
"""Words on a bar: they read at 4.5:1 on the colour of every action of a schedule, in both themes."""

_VERDICTS: dict[Verdict, tuple[str, str]] = {
    "bitwise equal": ("#2E8B57", "circle"),
    "rounding": ("#B07A00", "diamond"),
    "state moved": ("#8E5BC0", "square"),
    "different": ("#C8324A", "x"),
    "not comparable": ("#8C8C8C", "circle-open"),
}
"""Colour, and Plotly's marker symbol."""
VERDICT_COLOURS: dict[Verdict, str] = {verdict: colour for verdict, (colour, _) in _VERDICTS.items()}
VERDICT_SYMBOLS: dict[Verdict, str] = {verdict: symbol for verdict, (_, symbol) in _VERDICTS.items()}

STAGE_COLOURS: tuple[str, ...] = (
    "#7E62C6", "#2098AE", "#B85C9E", "#9A7B5B", "#C9404F", "#6B7785", "#927200", "#3B6FB6", "#2E9E6B", "#D9730D",
)  # fmt: skip
"""The last four look like phases: a split of six stages or fewer wears no colour of forward, backward or recompute."""
ALLOCATOR = {"allocated": "#9A7B5B", "reserved": "#7E62C6"}
"""Bytes of an allocator's live blocks, and of its segments."""
STAGE_PATTERNS: tuple[str, ...] = ("", "/", "\\", "x", "-", "|", "+", ".")
"""Ten colours and eight patterns: stage j takes j modulo each, so forty stages in a row look different."""

QUIET_TEXT = {"light": "#555B66", "dark": "#B6BAC4"}
"""Axis labels on either page."""
FULL_TEXT = {"light": "#111111", "dark": "#FAFAFA"}
"""Words on a translucent area of either page."""
CURSOR = "#8A63D2"
"""The moment that a person picked."""
GRID = "rgba(128, 128, 128, 0.25)"
"""Lines behind data, on either page."""


def stage_colour(stage: int) -> str:
    """Colour of stage `stage`, counted from 0."""
    return STAGE_COLOURS[stage % len(STAGE_COLOURS)]


def stage_pattern(stage: int) -> str:
    """Pattern of stage `stage`, counted from 0."""
    return STAGE_PATTERNS[stage % len(STAGE_PATTERNS)]


def translucent(colour: str, alpha: float) -> str:
    """`#RRGGBB` as `rgba(...)` with opacity `alpha` in 0..1."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {alpha:g})"
