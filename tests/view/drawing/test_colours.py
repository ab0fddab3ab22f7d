"""The palette keeps its rules: contrast on both pages, and nothing said by colour alone."""

from __future__ import annotations

import itertools
from typing import get_args

import numpy as np
import pytest

from explorer.record import PHASES, ROLES, Verdict
from explorer.view.drawing import colours

# Machado, Oliveira and Fernandes 2009, severity 1.0, for linear RGB.
EYES = {
    "full colour": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
EVERY = {
    **{f"role {name}": value for name, value in colours.ROLE_COLOURS.items()},
    **{f"phase {name}": value for name, value in colours.PHASE_COLOURS.items()},
    **{f"verdict {name}": value for name, value in colours.VERDICT_COLOURS.items()},
    **{f"run {name}": value for name, value in colours.RUN_COLOURS.items()},
    **{f"stage {j}": value for j, value in enumerate(colours.STAGE_COLOURS)},
}


@pytest.mark.parametrize("page", [colours.LIGHT_PAGE, colours.DARK_PAGE])
@pytest.mark.parametrize("name", EVERY)
def test_every_colour_stands_out_from_both_pages(name: str, page: str) -> None:
    assert colours.contrast(EVERY[name], page) >= 3.0


def test_contrast_of_black_on_white_is_twenty_one() -> None:
    assert colours.contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert colours.contrast("#FFFFFF", "#FFFFFF") == pytest.approx(1)


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(ROLES, 2)))
def test_two_roles_differ_by_pattern_or_to_every_eye(one: str, other: str) -> None:
    if colours.ROLE_PATTERNS[one] == colours.ROLE_PATTERNS[other]:
        for eye, matrix in EYES.items():
            distance = np.linalg.norm(
                oklab(matrix @ linear(colours.ROLE_COLOURS[one])) - oklab(matrix @ linear(colours.ROLE_COLOURS[other]))
            )
            assert distance > 0.08, (one, other, eye)


def test_the_eye_test_can_fail() -> None:
    red, green = (EYES["deuteranopia"] @ linear(c) for c in ("#B4543C", "#7F7030"))
    assert np.linalg.norm(oklab(red) - oklab(green)) < 0.08


def test_every_text_reaches_four_and_a_half_to_one() -> None:
    assert colours.contrast(colours.QUIET_TEXT["light"], colours.LIGHT_PAGE) >= 4.5
    assert colours.contrast(colours.QUIET_TEXT["dark"], colours.DARK_PAGE) >= 4.5
    for ground in (*colours.PHASE_COLOURS.values(), *colours.STAGE_COLOURS, *colours.ROLE_COLOURS.values()):
        assert colours.contrast(colours.ink(ground), ground) >= 4.5
    assert colours.contrast("#FFFFFF", colours.RECOMPUTE) >= 4.5, "the word on a recomputed block is white"


def test_nothing_is_unnamed() -> None:
    assert set(colours.ROLE_COLOURS) == set(colours.ROLE_PATTERNS) == set(ROLES)
    assert set(colours.PHASE_COLOURS) == set(colours.PHASE_PATTERNS) == set(PHASES)
    assert set(colours.VERDICT_COLOURS) == set(colours.VERDICT_SYMBOLS) == set(get_args(Verdict))


def test_recompute_has_one_colour_and_one_pattern_everywhere() -> None:
    assert colours.ROLE_COLOURS["recomputed"] == colours.PHASE_COLOURS["recompute"] == colours.RECOMPUTE
    assert colours.ROLE_PATTERNS["recomputed"] == colours.PHASE_PATTERNS["recompute"] == "/"
    assert list(colours.ROLE_PATTERNS.values()).count("/") == 1


def test_symbols_tell_the_verdicts_apart() -> None:
    assert len(set(colours.VERDICT_SYMBOLS.values())) == len(colours.VERDICT_SYMBOLS)


def test_forty_stages_look_different() -> None:
    assert len({(colours.stage_colour(j), colours.stage_pattern(j)) for j in range(40)}) == 40


def test_translucent() -> None:
    assert colours.translucent("#1F77C8", 0.5) == "rgba(31, 119, 200, 0.5)"


def linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def oklab(rgb: np.ndarray) -> np.ndarray:
    """Ottosson 2020: distances in this space are near to what is seen."""
    cones = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
    mix = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
    return mix @ np.cbrt(np.clip(cones @ np.clip(rgb, 0, 1), 0, None))
