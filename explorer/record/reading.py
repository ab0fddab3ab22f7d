"""A policy that came from outside as it is on one model: a policy file, or the settings of another program."""

from __future__ import annotations

from explorer.record.base import Record
from explorer.record.export import Fit
from explorer.record.policy import Policy
from explorer.record.policy_file import PolicyFile


class Reading(Record):
    """What a text says, and what became of it on the way. What cannot be said as a policy at all is an error."""

    source: str
    """`a policy file`, or program and version: `transformers 5.23`."""
    file: PolicyFile
    """With the model's own names."""
    fit: Fit = "exact"
    reasons: tuple[str, ...] = ()
    """Why it is approximated: what the program does that the policy does not."""
    changed: str = ""
    """How the model differs from the one that a policy file was made for."""
    notes: tuple[str, ...] = ()
    """What patterns stand for, which layers were counted, options that differ there and change no gradient."""

    @property
    def policy(self) -> Policy:
        return self.file.policy

    @property
    def told(self) -> tuple[str, ...]:
        """Everything that a person has to know of it. Empty: a policy file that was made for this very model."""
        return (*self.reasons, *((self.changed,) if self.changed else ()), *self.notes)
