"""The policy: the units to recompute, and the options of recomputing them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta
from msgspec.structs import force_setattr

from explorer.errors import InvalidPolicy
from explorer.record.base import Record

Action = Literal["recompute", "save_ops", "offload"]
RunningStats = Literal["once", "every_forward"]
DeterminismCheck = Literal["default", "none"]


class Unit(Record):
    """A block, or siblings that are called one after the other and recomputed together (a segment)."""

    blocks: Annotated[tuple[str, ...], Meta(min_length=1)]
    action: Action = "recompute"
    """recompute: keep the input. save_ops: recompute all but `save_ops`. offload: saved tensors wait on the CPU."""
    save_ops: tuple[str, ...] = ()
    """Operators whose results are kept, such as `aten.mm.default`; only with the action `save_ops`."""

    def __post_init__(self) -> None:
        _as_tuples(self, "blocks", "save_ops")


class Policy(Record):
    """The recomputed units, and options of torch.utils.checkpoint under torch's names.

    Nested checkpointing names a unit and also its descendants.
    """

    units: tuple[Unit, ...] = ()
    preserve_rng_state: bool = True
    use_reentrant: bool = False
    determinism_check: DeterminismCheck = "default"
    early_stop: bool = True
    running_stats: RunningStats = "once"
    restore_rng: tuple[str, ...] = ()
    """Generators torch does not stash, set back at recompute: `python`, `numpy`, or the dotted path of a
    torch.Generator attribute in the model."""

    def __post_init__(self) -> None:
        _as_tuples(self, "units", "restore_rng")

    @classmethod
    def recompute(cls, blocks: Iterable[str | Iterable[str]], **options: Any) -> Policy:
        """A policy that recomputes each of `blocks`; a tuple of fqns is one segment."""
        if isinstance(blocks, str):
            raise _one_name("blocks", blocks)
        units = tuple(Unit(blocks=(entry,) if isinstance(entry, str) else tuple(entry)) for entry in blocks)
        return cls(units=units, **options)

    def with_model_blocks(self, blocks: Mapping[str, int]) -> Policy:
        """The same policy with the `blocks` of its model noted. The note is not part of equality."""
        self.__dict__["_model_blocks"] = dict(blocks)
        return self

    @property
    def model_blocks(self) -> Mapping[str, int]:
        """Blocks of the policy's model, as the policy file counts them; empty: unknown."""
        counts: Mapping[str, int] = self.__dict__.get("_model_blocks", {})
        return counts

    @property
    def stops_early(self) -> bool:
        """True if recompute ends at the last tensor that forward saved; reentrant checkpointing has no early stop."""
        return self.early_stop and not self.use_reentrant

    @property
    def blocks(self) -> tuple[str, ...]:
        """Every fqn named, in order."""
        return tuple(fqn for unit in self.units for fqn in unit.blocks)


def outermost(fqns: Iterable[str]) -> list[str]:
    """The names of `fqns` that lie in no other name of `fqns`."""
    named = dict.fromkeys(fqns)
    prefixes = {fqn: [fqn[:i] for i, letter in enumerate(fqn) if letter == "."] for fqn in named}
    return [fqn for fqn in named if not (fqn and "" in named) and named.keys().isdisjoint(prefixes[fqn])]


def _as_tuples(record: Record, *fields: str) -> None:
    """Lists become tuples, so that a record can be hashed. Raises InvalidPolicy for a name where names belong."""
    for name in fields:
        value = getattr(record, name)
        if isinstance(value, str):
            raise _one_name(name, value)
        if not isinstance(value, tuple):
            force_setattr(record, name, tuple(value))


def _one_name(field: str, name: str) -> InvalidPolicy:
    return InvalidPolicy(
        f"{field} is {name!r}, one name where a list of names belongs.", hint=f"Write [{name!r}] for one."
    )


KEEP_ALL = Policy()
