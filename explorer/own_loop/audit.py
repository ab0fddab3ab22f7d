"""`explorer.audit(model, step)`: a model's built-in recompute, and whether the gradients stay the same.

a recorded step                          forwards inside backward that no policy ordered
a recorded step, checkpointing off       does a recompute remain?
judge(plain, with recompute)             the verdict; without a switch for recompute, random draws are compared
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from explorer.engine.bench.user_loop import LoopRecording
from explorer.engine.compare.watched import RerunDraws
from explorer.engine.policy.apply import checkpointing_off, policy_of
from explorer.engine.state.global_state import preserve_global_state
from explorer.engine.state.snapshot import StepSnapshot
from explorer.engine.watch.uncompiled import compiler_off
from explorer.errors import BadInput
from explorer.own_loop.judge import Judged, judge_steps
from explorer.own_loop.record_step import place_of_caller
from explorer.plan.names import listed
from explorer.plan.why.caveats import in_words, self_checkpointing
from explorer.record.measurement import Measurement

Step = Callable[[], object]


class Audit:
    """The result of an audit."""

    def __init__(self, measurement: Measurement, judged: Judged | None, draws: RerunDraws | None) -> None:
        self.measurement = measurement
        """The recorded step with the model's checkpointing."""
        self.judged = judged
        """The model against itself with checkpointing off; None: no checkpointing, or no known switch."""
        self.other_draws: dict[str, int] = dict(draws.others) if draws is not None else {}
        """Random numbers drawn by the rerun and not by forward, by block."""
        self._n_drawn = draws.n_drawn if draws is not None else 0

    @property
    def reruns(self) -> dict[str, float]:
        """Blocks that the model runs again without a policy, with the reruns per forward."""
        return self_checkpointing(self.measurement)

    @property
    def is_same(self) -> bool | None:
        """Whether the model trains like the plain model; None: no plain version could be built or compared."""
        if not self.reruns:
            return True
        if self.judged is not None and self.judged.verdict != "not comparable":
            return self.judged.verdict in ("bitwise equal", "rounding")
        return False if self.other_draws else None

    def __repr__(self) -> str:
        if not self.reruns:
            return "The model runs nothing again by itself."
        lines = [f"{in_words(self.measurement)}."]
        if self.judged is not None:
            lines.append(f"Against itself with that switched off: {self.judged}")
        else:
            lines.append("No known switch turns that off, so no plain version could be built to judge it against.")
        if self.other_draws:
            where = listed([fqn or "no block of its own" for fqn in self.other_draws])
            lines.append(
                f"The rerun draws random numbers that forward did not, in {where}: the gradients belong to another "
                "forward. Set the generators back before it runs again, as torch.utils.checkpoint does."
            )
        elif self._n_drawn:
            lines.append("The rerun draws the very random numbers of forward.")
        return "\n  ".join(lines)


def audit(model: nn.Module, step: Step) -> Audit:
    """Audits a few real steps of `step()` (forward, loss, backward; an optimizer or none) and restores all state.

    The step must use the same batch at each call. Raises BadInput for a model with a policy, and the step's errors.
    """
    where = place_of_caller()
    if policy_of(model).units:
        raise BadInput("The model carries a policy, whose recompute is not its own.", hint="Undo the policy first.")

    def plain_step() -> None:
        with checkpointing_off(model):
            step()

    with compiler_off(), preserve_global_state():
        before = StepSnapshot(model, step)
        try:
            as_it_is = _recorded(model, step, where)
            if not self_checkpointing(as_it_is):
                return Audit(as_it_is, None, None)
            before.restore()
            with RerunDraws(model) as draws:
                step()
            before.restore()
            left = self_checkpointing(_recorded(model, plain_step, where))
        finally:
            before.restore()
    if left:
        return Audit(as_it_is, None, draws)
    try:
        sides = lambda model, batch: plain_step(), lambda model, batch: step()
        return Audit(as_it_is, judge_steps(sides, (model, model), None, where, before.restore), draws)
    finally:
        before.restore()


def _recorded(model: nn.Module, step: Step, where: str) -> Measurement:
    live = LoopRecording(model, None, where)
    with live:
        step()
    return live.measurement
