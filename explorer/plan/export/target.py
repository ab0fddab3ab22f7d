"""The part of a policy that a target can express, and the losses of the export.

A loss changes the recomputed blocks or their results. An option that only moves memory inside one block is a note, and
so is an engine that computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from explorer.plan.names import some
from explorer.record.base import Record
from explorer.record.files import Export, PolicyFile
from explorer.record.policy import Policy, Unit

CHECKPOINT_OPTIONS = ("preserve_rng_state", "use_reentrant", "determinism_check", "early_stop")
"""Keyword arguments of torch.utils.checkpoint.checkpoint; where no random numbers are drawn they change no gradient."""
STATISTICS = "Where a recomputed block has running statistics (BatchNorm), they move twice a step there."


@dataclass(frozen=True)
class Target:
    """A program, and the part of a policy that its settings can express."""

    name: str
    written_for: str
    whole: bool = False
    """True if every policy reaches the program as it is: segments, kept operators, offloading and all options."""

    def losses(self, policy: Policy) -> tuple[str, ...]:
        """A sentence for each part of the policy that the target cannot express."""
        if self.whole:
            return ()
        selective = [fqn for unit in policy.units if unit.action == "save_ops" for fqn in unit.blocks]
        offloaded = [fqn for unit in policy.units if unit.action == "offload" for fqn in unit.blocks]
        segments = [" and ".join(unit.blocks) for unit in policy.units if len(unit.blocks) > 1]
        rows = (
            (selective, "{} keeps the results of some operators; there it is recomputed whole."),
            (offloaded, "Offloaded here and kept there: {}."),
            (segments, "{} are recomputed together; there one by one, so what passes between them is kept."),
            (policy.restore_rng, "Generators that torch does not stash ({}) are not set back there."),
        )
        return tuple(sentence.format(some(names)) for names, sentence in rows if names)

    def recomputed(self, policy: Policy) -> tuple[str, ...]:
        """The blocks of all units that run again in some form there."""
        units = [unit for unit in policy.units if unit.action != "offload"]
        return tuple(dict.fromkeys(fqn for unit in units for fqn in unit.blocks))

    def exported(self, policy: Policy, text: str, note: str = "") -> Export:
        """`text` as an export, exact if there are no losses."""
        chosen = self.recomputed(policy)
        losses, missing = self.losses(policy), tuple(fqn for fqn in policy.blocks if fqn not in chosen)
        moved = ""
        if missing and self.whole:
            moved, missing = f"It offloads {some(missing)} on a GPU; on a CPU nothing moves.", ()
        statistics = STATISTICS if chosen and not self.whole and policy.running_stats == "once" else ""
        return Export(
            target=self.name,
            written_for=self.written_for,
            fit="approximated" if losses else "exact",
            text=text,
            recomputed=chosen,
            missing=missing,
            reasons=losses,
            notes=tuple(filter(None, (moved, statistics, note))),
            as_run=self._as_run(policy, chosen),
        )

    def _as_run(self, policy: Policy, chosen: tuple[str, ...]) -> Policy:
        """The policy that the target runs: single blocks, if it does not take the whole policy."""
        if self.whole:
            return policy
        single = tuple(Unit(blocks=(fqn,)) for fqn in chosen)
        return replace(policy, units=single, running_stats="every_forward", restore_rng=())


class ExportFormat(Record):
    """A target of `export --to NAME`."""

    name: str
    title: str
    write: Callable[[PolicyFile], Export]
    suffix: str = ".py"
