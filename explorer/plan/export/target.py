"""The part of a policy that a target can express, and the losses of the export.

A loss changes the recomputed blocks or their results. An option that only moves memory inside one block is a note, and
so is an engine that computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from explorer.plan.names import above, some
from explorer.record.policy import Action, Policy, Unit
from explorer.record.policy_file import Checked, Export

CHECKPOINT_OPTIONS = ("preserve_rng_state", "use_reentrant", "determinism_check", "early_stop")
"""Keyword arguments of torch.utils.checkpoint.checkpoint; where no random numbers are drawn they change no gradient."""
STATISTICS = "Where a recomputed block has running statistics (BatchNorm), they move twice a step there."


@dataclass(frozen=True, kw_only=True)
class Target:
    """A program, and the part of a policy that its settings can express."""

    name: str
    written_for: str
    options: tuple[str, ...] = ()
    """Options of a policy that reach the program unchanged."""
    fixed: tuple[tuple[str, object], ...] = ()
    """Options that the program sets itself to other values than torch's defaults."""
    actions: tuple[Action, ...] = ("recompute",)
    segments: bool = False
    nested: bool = True
    checked: Checked = "grammar"

    def losses(self, policy: Policy) -> tuple[str, ...]:
        """A sentence for each part of the policy that the target cannot express."""
        return tuple(sentence for sentence in (*self._of_units(policy), *self._of_options(policy)) if sentence)

    def notes(self, policy: Policy) -> tuple[str, ...]:
        """A sentence for each difference that changes no gradient."""
        set_there = {**{name: getattr(Policy(), name) for name in CHECKPOINT_OPTIONS}, **dict(self.fixed)}
        differing = [
            f"{name} is {_in_words(set_there[name])} there and {_in_words(getattr(policy, name))} in the policy"
            for name in CHECKPOINT_OPTIONS
            if name not in self.options
            and set_there[name] != getattr(policy, name)
            and not (name == "preserve_rng_state" and policy.preserve_rng_state)  # that is a loss
        ]
        recomputes = any(unit.action != "offload" for unit in policy.units)
        loose = "running_stats" not in self.options and policy.running_stats == "once"
        statistics = STATISTICS if recomputes and loose else ""
        return tuple(filter(None, (f"{'; '.join(differing)}." if differing else "", statistics)))

    def recomputed(self, policy: Policy) -> tuple[str, ...]:
        """The blocks of all units that the target can take in some form."""
        units = [unit for unit in policy.units if unit.action != "offload" or "offload" in self.actions]
        return tuple(dict.fromkeys(fqn for unit in units for fqn in unit.blocks))

    def exported(self, policy: Policy, text: str, *, there: tuple[str, ...] | None = None, note: str = "") -> Export:
        """`text` as an export, exact if there are no losses. `there`: blocks that `text` names, if not the policy's."""
        chosen = self.recomputed(policy)
        losses = self.losses(policy)
        there = chosen if there is None else there
        extra = tuple(fqn for fqn in there if fqn not in chosen)
        missing = tuple(fqn for fqn in chosen if fqn not in there)
        if extra or missing:
            losses = (*losses, _differ(extra, missing))
        offloaded = tuple(fqn for fqn in policy.blocks if fqn not in chosen)
        return Export(
            target=self.name,
            written_for=self.written_for,
            fit="approximated" if losses else "exact",
            text=text,
            recomputed=there,
            missing=(*missing, *offloaded),
            extra=extra,
            reasons=losses,
            notes=(*self.notes(policy), *filter(None, (note,))),
            checked=self.checked,
            as_run=self._as_run(policy, there),
        )

    def refused(self, *reasons: str) -> Export:
        """An export without text, for a policy that no setting of the target expresses."""
        return Export(
            target=self.name,
            written_for=self.written_for,
            fit="not expressible",
            recomputed=(),
            reasons=reasons,
            checked=self.checked,
        )

    def _as_run(self, policy: Policy, there: tuple[str, ...]) -> Policy:
        """The policy that the target runs: its own options, and single blocks if it knows no segments."""
        usual = {**{name: getattr(Policy(), name) for name in CHECKPOINT_OPTIONS}, "running_stats": "every_forward"}
        set_there = {**usual, "restore_rng": (), **dict(self.fixed)}
        options = {name: value for name, value in set_there.items() if name not in self.options}
        if self.segments:
            return msgspec.structs.replace(policy, **options)
        units = {fqn: unit for unit in policy.units for fqn in unit.blocks if unit.action in self.actions}
        whole = tuple(
            msgspec.structs.replace(units[fqn], blocks=(fqn,)) if fqn in units else Unit(blocks=(fqn,))
            for fqn in there
            if self.nested or set(above(fqn)).isdisjoint(there)
        )
        return msgspec.structs.replace(policy, units=whole, **options)

    def _of_units(self, policy: Policy) -> tuple[str, ...]:
        selective = tuple(fqn for unit in policy.units if unit.action == "save_ops" for fqn in unit.blocks)
        offloaded = tuple(fqn for unit in policy.units if unit.action == "offload" for fqn in unit.blocks)
        segments = tuple(" and ".join(unit.blocks) for unit in policy.units if len(unit.blocks) > 1)
        named = set(policy.blocks)
        inner = tuple(fqn for fqn in policy.blocks if not named.isdisjoint(above(fqn)))
        return (
            f"{some(selective)} keeps the results of some operators; there it is recomputed whole."
            if selective and "save_ops" not in self.actions
            else "",
            f"{some(offloaded)} is offloaded; there it is kept." if offloaded and "offload" not in self.actions else "",
            f"{some(segments)} are recomputed together; there one by one, so what passes between them is kept."
            if segments and not self.segments
            else "",
            f"{some(inner)} lies inside another recomputed block; there it does not run a second time."
            if inner and not self.nested
            else "",
        )

    def _of_options(self, policy: Policy) -> tuple[str, ...]:
        stashes = True if "preserve_rng_state" in self.options else dict(self.fixed).get("preserve_rng_state", True)
        return (
            "Random numbers are not set back there: the gradients of dropout belong to another forward."
            if policy.preserve_rng_state and not stashes
            else "",
            f"Generators that torch does not stash ({some(policy.restore_rng)}) are not set back there."
            if policy.restore_rng and "restore_rng" not in self.options
            else "",
        )


def _differ(extra: tuple[str, ...], missing: tuple[str, ...]) -> str:
    parts = [f"{some(missing)} is kept there"] if missing else []
    parts += [f"{some(extra)} is recomputed there"] if extra else []
    return f"{' and '.join(parts)}, other than the policy says."


def _in_words(value: object) -> str:
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)
