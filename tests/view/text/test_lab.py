"""The lab's glossary has every word that a lesson uses, and no other."""

from __future__ import annotations

from explorer.plan.lessons import lessons
from explorer.view.text.lab import GLOSSARY


def test_every_word_of_a_lesson_is_explained_and_none_is_left_over() -> None:
    assert {word for lesson in lessons() for word in lesson.words} == set(GLOSSARY)
