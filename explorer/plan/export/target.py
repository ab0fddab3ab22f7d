"""The part of a policy that a target can express, and the losses of the export.

A loss changes the recomputed blocks or their results. An option that only moves memory inside one block is a note, and
so is an engine that computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from explorer.errors import InvalidPlan
from explorer.plan.names import above, some
from explorer.record.files import Checked, Export, PolicyFile
from explorer.record.policy import Policy, Unit
from explorer.record.run import PipelinePlan

CHECKPOINT_OPTIONS = ("preserve_rng_state", "use_reentrant", "determinism_check", "early_stop")
"""Keyword arguments of torch.utils.checkpoint.checkpoint; where no random numbers are drawn they change no gradient."""
STATISTICS = "Where a recomputed block has running statistics (BatchNorm), they move twice a step there."


@dataclass(frozen=True)
class Target:
    """A program, and the part of a policy that its settings can express."""

    name: str
    written_for: str
    options: tuple[str, ...] = ()
    """Options of a policy that reach the program unchanged."""
    fixed: tuple[tuple[str, object], ...] = ()
    """Options that the program sets itself to other values than torch's defaults."""
    nested: bool = True
    whole: bool = False
    """True if every policy reaches the program as it is: segments, kept operators, offloading and all options."""
    checked: Checked = "grammar"

    @property
    def _set_there(self) -> dict[str, object]:
        """Options of torch.utils.checkpoint as the program has them where a policy does not set them."""
        return {**{name: getattr(Policy(), name) for name in CHECKPOINT_OPTIONS}, **dict(self.fixed)}

    def losses(self, policy: Policy) -> tuple[str, ...]:
        """A sentence for each part of the policy that the target cannot express."""
        if self.whole:
            return ()
        selective = tuple(fqn for unit in policy.units if unit.action == "save_ops" for fqn in unit.blocks)
        offloaded = tuple(fqn for unit in policy.units if unit.action == "offload" for fqn in unit.blocks)
        segments = tuple(" and ".join(unit.blocks) for unit in policy.units if len(unit.blocks) > 1)
        named = set(policy.blocks)
        inner = tuple(fqn for fqn in policy.blocks if not (self.nested or named.isdisjoint(above(fqn))))
        rows = (
            (selective, "{} keeps the results of some operators; there it is recomputed whole."),
            (offloaded, "{} is offloaded; there it is kept."),
            (segments, "{} are recomputed together; there one by one, so what passes between them is kept."),
            (inner, "{} lies inside another recomputed block; there it does not run a second time."),
            (policy.restore_rng, "Generators that torch does not stash ({}) are not set back there."),
        )
        return tuple(sentence.format(some(names)) for names, sentence in rows if names)

    def notes(self, policy: Policy) -> tuple[str, ...]:
        """A sentence for each difference that changes no gradient."""
        words: dict[object, object] = {True: "on", False: "off"}
        differing = [
            f"{name} is {words.get(there, there)} there and {words.get(here, here)} in the policy"
            for name, there in self._set_there.items()
            if name not in self.options and there != (here := getattr(policy, name))
        ]
        recomputes = any(unit.action != "offload" for unit in policy.units)
        statistics = STATISTICS if recomputes and not self.whole and policy.running_stats == "once" else ""
        return tuple(filter(None, (f"{'; '.join(differing)}." if differing else "", statistics)))

    def recomputed(self, policy: Policy) -> tuple[str, ...]:
        """The blocks of all units that the target can take in some form."""
        units = [unit for unit in policy.units if self.whole or unit.action != "offload"]
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
        """The policy that the target runs: its own options, and single blocks if it does not take the whole policy."""
        if self.whole:
            return policy
        usual = {**self._set_there, "running_stats": "every_forward", "restore_rng": ()}
        options = {name: value for name, value in usual.items() if name not in self.options}
        whole = tuple(Unit(blocks=(fqn,)) for fqn in there if self.nested or set(above(fqn)).isdisjoint(there))
        return msgspec.structs.replace(policy, units=whole, **options)


def _differ(extra: tuple[str, ...], missing: tuple[str, ...]) -> str:
    parts = [f"{some(missing)} is kept there"] if missing else []
    parts += [f"{some(extra)} is recomputed there"] if extra else []
    return f"{' and '.join(parts)}, other than the policy says."


def plan_in(file: PolicyFile) -> PipelinePlan:
    """The pipeline plan of a policy file. Raises InvalidPlan where it has none."""
    if file.pipeline is None:
        raise InvalidPlan(
            "The policy file holds no pipeline plan.",
            hint="`python -m explorer pipeline MODEL --stages 4 --out FILE` writes one.",
        )
    return file.pipeline
