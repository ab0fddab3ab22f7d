"""Lessons are read from text, each fault with its file."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import get_args

import pytest

from explorer.errors import BadInput, UnreadableFile
from explorer.lab import plan as lessons_file
from explorer.lab.plan import LESSONS, lesson_called, lessons, settings
from explorer.lab.record import Choice, Switch, Theme
from explorer.lab.view.glossary import GLOSSARY
from tests.lab.added import ONE_MORE, with_one_more


def test_every_file_is_a_lesson_and_each_theme_stands_together() -> None:
    assert {lesson.name.replace("-", "_") for lesson in lessons()} == {
        p.stem for p in LESSONS.glob("*.py") if p.stem != "__init__"
    }
    assert [theme for theme, _ in groupby(lessons(), key=lambda lesson: lesson.theme)] == list(get_args(Theme))
    assert lessons()[0].name == "dropout", "what a newcomer opens first"


def test_a_lesson_is_told_by_its_file() -> None:
    lesson = lesson_called("router-noise")
    assert lesson.title == "A router that changes its mind" and len(lesson.paragraphs) == 2
    assert lesson.paragraphs[0].startswith("A mixture of experts sends") and "\n" not in lesson.paragraphs[0]
    assert lesson.switches[1].label("weak") == "Weak: a few tokens change their expert"
    assert settings(lesson, {"noise": "weak"}) == {"preserve_rng_state": "off", "noise": "weak"}


def test_a_place_may_stand_on_a_line_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ONE_MORE.replace('THEME = "Traps"', 'THEME = "Wrapped blocks"\nPLACE = 0')
    monkeypatch.setattr(lessons_file, "LESSONS", with_one_more(tmp_path, first))
    assert lessons()[0].name == "one-more"


def test_unknown_names_are_told_with_what_there_is() -> None:
    with pytest.raises(BadInput, match=r"no experiment 'dropuot'"):
        lesson_called("dropuot")
    with pytest.raises(BadInput, match=r"p cannot be '9'.*no switch 'q'"):
        settings(lesson_called("dropout"), {"p": "9", "q": "1"})


def test_a_file_added_is_a_lesson_offered_last_on_its_shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [lesson.name for lesson in lessons()]
    monkeypatch.setattr(lessons_file, "LESSONS", with_one_more(tmp_path))
    assert [lesson.name for lesson in lessons()] == [*before, "one-more"]
    assert lesson_called("one-more").paragraphs == ("A file is all that it takes.", "Nothing else names it.")


@pytest.mark.parametrize(("written", "instead", "fault"), [
    ("QUESTION = ", "ASKED = ", "it has no QUESTION"),
    ("WORDS = ", "ABOUT = ", "it has no WORDS"),
    ('THEME = "Traps"', 'THEME = "Odds and ends"', r"Invalid enum value 'Odds and ends'.*theme"),
    ('("gradient",)', "tuple(map(str, [1]))", "WORDS is no literal"),
    ("def run(", "def run(:", "invalid syntax"),
    ('THEME = "Traps"', 'THEME, PLACE = "Traps", "first"', "could not convert string to float: 'first'"),
    ('{"this": "This one", "that": "That one"}', '"this or that"', "SWITCHES must be"),
    ("\n\nA file is all that\nit takes.\n\nNothing else names it.\n", "", "no story below its title"),
])  # fmt: skip
def test_a_file_that_is_no_lesson_is_named_with_its_fault(
    written: str, instead: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert written in ONE_MORE
    monkeypatch.setattr(lessons_file, "LESSONS", with_one_more(tmp_path, ONE_MORE.replace(written, instead)))
    with pytest.raises(UnreadableFile, match=rf"one_more\.py cannot be read as a lesson: .*{fault}"):
        lessons()


SWITCH = Switch(name="mode", question="?", choices=(Choice(value="on", label="Yes"), Choice(value="off", label="No")))


def test_the_first_choice_is_the_default() -> None:
    assert (SWITCH.default, SWITCH.values, SWITCH.label("off")) == ("on", ("on", "off"), "No")
    with pytest.raises(StopIteration):
        SWITCH.label("perhaps")


def test_every_word_of_a_lesson_is_explained_and_none_is_left_over() -> None:
    assert {word for lesson in lessons() for word in lesson.words} == set(GLOSSARY)
