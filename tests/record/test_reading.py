"""All that a person has to know of a policy from outside, in one order; a file made for this model has nothing."""

from __future__ import annotations

from explorer.record.policy import Policy
from explorer.record.policy_file import PolicyFile, Reading


def test_what_is_told() -> None:
    file = PolicyFile(policy=Policy.recompute(["a"]))
    assert Reading(source="a policy file", file=file).told == ()
    told = Reading(source="x", file=file, reasons=("r",), changed="c", notes=("n",))
    assert told.told == ("r", "c", "n") and told.policy is file.policy
