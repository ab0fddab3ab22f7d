"""What a plan for a step of somebody's own came to, by real steps of it."""

from __future__ import annotations

from explorer.record.base import Record
from explorer.record.plan import Certificate, Plan
from explorer.record.policy import Policy


class Missed(Record):
    """A plan whose run was over the budget."""

    plan: Plan
    measured_peak_bytes: int | None
    """None: it was refused memory."""


class AutoPlan(Record):
    """What `explorer.auto_policy` found for a step of somebody's own, and what real steps of it say."""

    plan: Plan
    measured_peak_bytes: int | None
    """None: its run holds no allocations."""
    n_steps: int
    """Real steps that it took; everything that they moved has been put back."""
    measured_time_ratio: float | None = None
    """Step time under the policy over that with everything kept, in turns; None: the latter does not fit."""
    time_spread: float | None = None
    front: tuple[Plan, ...] = ()
    """From everything kept down to the lowest peak: what other budgets would cost. Predicted."""
    missed: tuple[Missed, ...] = ()
    refused: tuple[str, ...] = ()
    """What did not fit on the device before a step did: `everything kept`."""

    @property
    def policy(self) -> Policy:
        return self.plan.policy

    @property
    def certificate(self) -> Certificate:
        return self.plan.certificate

    @property
    def predicted_peak_bytes(self) -> int:
        return self.plan.step_peak_bytes

    @property
    def predicted_time_ratio(self) -> float | None:
        return self.plan.cost_ratio

    @property
    def kept(self) -> bool:
        """Whether the measured peak is within the budget; one that is not known keeps none."""
        budget, peak = self.plan.budget_bytes, self.measured_peak_bytes
        return budget is None or (peak is not None and peak <= budget)
