"""What all sessions of a server share: models of the command line, and the latest records."""

from __future__ import annotations

from explorer.ui.session import backend


def test_models_come_from_the_command_line() -> None:
    assert backend.given_after("--model", ["--model", "a.py:f", "--model=b.py", "x"]) == ("a.py:f", "b.py")
    assert backend.given_after("--model", ["--weights", "a.pt"]) == ()


def test_the_oldest_record_makes_room() -> None:
    kept = backend.Records(limit=2)
    for key in ("a", "b"):
        kept.keep(key, key)
    assert kept.get("a") == "a"
    kept.keep("c", "c")
    assert kept.get("b") is None
    assert kept.get("a") == "a"
