"""An error is the same sentence on either side of a process border; what others raise is repeated in one line."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.errors import (
    LONGEST_MESSAGE,
    BadInput,
    ExplorerError,
    InvalidPolicy,
    OutOfMemory,
    message_of,
    nearest,
    said_by,
    words_of,
)
from explorer.record.failure import failure_of, is_out_of_memory

# No word ends in vs or cf: a full stop after those ends no sentence.
WORD = st.text(alphabet="abdeghijklmnopqrstuwxyz_0123456789-'", min_size=1, max_size=12)
SENTENCE = st.lists(WORD, min_size=1, max_size=20).map(" ".join)


def test_what_to_do_next_follows_what_was_found() -> None:
    assert str(BadInput("Found 3.", hint="Give 4.")) == "Found 3. Give 4."
    assert str(BadInput("Found 3.")) == "Found 3."


@pytest.mark.parametrize(
    "error", [InvalidPolicy("No block a.", hint="Name one."), OutOfMemory("Full.", asked_bytes=7, free_bytes=3)]
)
def test_an_error_travels_whole(error: ExplorerError) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error) and str(arrived) == str(error) and vars(arrived) == vars(error)


def test_the_nearest_names_are_offered_and_none_that_is_far() -> None:
    assert nearest("laeyrs", ["layers", "head"]) == "Did you mean layers?"
    assert nearest("zzz", ["layers", "head"]) == ""


@given(st.text(max_size=2000), st.text(min_size=1, max_size=400).filter(lambda name: "\0" not in name))
def test_whatever_is_raised_fits_on_one_line(text: str, name: str) -> None:
    name = name.encode(errors="replace").decode()  # a class can have any name that is text
    line = said_by(type(name, (Exception,), {})(text))
    assert len(line.splitlines()) == 1 and line.isprintable() and "  " not in line
    assert len(message_of(Exception(text))) <= LONGEST_MESSAGE
    assert message_of(Exception(text)) not in ("", ".")


@given(SENTENCE, st.sampled_from([". ", "! ", "? ", ".\n", "\n\n", ".) "]), st.text(max_size=600))
def test_the_first_sentence_stays_whole(first: str, border: str, rest: str) -> None:
    told = message_of(Exception(f"{first}{border}What follows {rest}"))
    assert told.startswith(first)


@given(st.lists(SENTENCE.map("A{}".format), min_size=1, max_size=8))
def test_what_follows_is_repeated_in_whole_sentences_while_it_is_short(sentences: list[str]) -> None:
    told = message_of(Exception(". ".join(sentences) + "."))
    assert told in [". ".join(sentences[: n + 1]) for n in range(len(sentences))]
    assert len(told) <= 160 or told == sentences[0]


@pytest.mark.parametrize(
    ("raised", "repeated"),
    [
        (
            "Couldn't load custom C++ ops. This can happen if your PyTorch and torchvision versions are incompatible, "
            "or if you had errors while compiling torchvision from source. For further information, see the matrix.",
            "Couldn't load custom C++ ops",
        ),
        ("Given input size: (768x4x4). Output size is too small",) * 2,
        ("Error(s) in loading state_dict for Net:\n\tMissing key(s): 'a'.\n\tUnexpected key(s): 'b'.",
         "Error(s) in loading state_dict for Net: Missing key(s): 'a'"),
        ("CUDA error: device-side assert triggered\nKernel errors might be reported at some other call.",
         "CUDA error: device-side assert triggered"),
        ("expected e.g. Tensors. " + "X" * 200, "expected e.g. Tensors"),
        ("", "no message"),
        ("...", "no message"),
        (". " + "A" * 200, ". " + "A" * 200),
    ],
)  # fmt: skip
def test_what_libraries_say(raised: str, repeated: str) -> None:
    assert message_of(RuntimeError(raised)) == repeated


def test_what_we_say_ourselves_is_not_cut() -> None:
    error = BadInput("a " * 400 + "end.", hint="Do this. Then that.")
    assert message_of(error) + "." == str(error)


class Mute(Exception):
    """Its message is made of what its constructor was not given."""

    def __str__(self) -> str:
        raise KeyError("reason")


def test_an_error_that_cannot_say_what_it_is_has_no_message() -> None:
    assert said_by(Mute()) == "Mute: no message" and words_of(Mute()) == ""
    assert not is_out_of_memory(Mute())
    assert failure_of(Mute(), in_step=True).sentence == "The model raised Mute: no message."
