"""Short ways to write a switch; two of them appear in more than one story."""

from __future__ import annotations

from explorer.record.lab import Choice, Switch


def switch(name: str, question: str, **choices: str) -> Switch:
    """`choices` maps a value to its label, the default first. `_0_3` writes the value 0.3."""
    labelled = tuple(Choice(value=_decimal(value), label=label) for value, label in choices.items())
    return Switch(name=name, question=question, choices=labelled)


def counts(name: str, question: str, *values: int) -> Switch:
    """A switch over whole numbers, the default first."""
    return Switch(name=name, question=question, choices=tuple(Choice(value=str(n), label=str(n)) for n in values))


def _decimal(value: str) -> str:
    return value.removeprefix("_").replace("_", ".") if value.startswith("_") else value
