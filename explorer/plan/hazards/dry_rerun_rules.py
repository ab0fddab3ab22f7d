"""Rules for what a dry rerun of the blocks has shown, see engine/watch/dry_rerun.py: no cause has to be known.

The rules of checkpoint_rules.py name a cause. A block with such a cause has none of these traits besides.
"""

from __future__ import annotations

from collections.abc import Iterator

from explorer.plan.hazards.checkpoint_rules import Case, Rule
from explorer.plan.names import lineage, listed, some
from explorer.record.graph import Block, Hazard


def reruns_apart(case: Case) -> tuple[Block, ...]:
    """Blocks that a recompute runs as the dry rerun did: named by the policy, or in a Sequential that is named."""
    tops = {fqn for unit, _ in case.units if unit.action != "offload" for fqn in unit.blocks}
    kinds = {block.fqn: block.kind for block in case.graph.blocks}

    def is_apart(fqn: str) -> bool:
        for holder in lineage(fqn):
            if holder in tops:
                return True
            if kinds.get(holder.rpartition(".")[0]) != "Sequential":
                return False
        return False

    return tuple(block for block in case.rerun if is_apart(block.fqn))


_LASTING = "Hand the value to the block as an argument, change it only after backward, or keep these blocks."


def departs(case: Case) -> Iterator[Hazard]:
    """What a dry rerun has shown; the names of the values that the code reads come from a comparison of two entries."""
    blocks = [block for block in reruns_apart(case) if "departs" in block.traits]
    if blocks:
        yield Hazard(
            rule="departs", severity="error", blocks=tuple(block.fqn for block in blocks),
            sentence=f"{some([block.fqn for block in blocks])} returns something else when it runs again after the "
            f"forward, on equal inputs and random numbers{_reads(blocks, ': its code reads ')}.",
            remedy=_LASTING,
        )  # fmt: skip


def reads_late(case: Case) -> Iterator[Hazard]:
    blocks = [b for b in reruns_apart(case) if "reads_late" in b.traits and "departs" not in b.traits]
    if blocks:
        yield Hazard(
            rule="reads-late", severity="warning", blocks=tuple(block.fqn for block in blocks),
            sentence=f"Once the forward is over, the code of {some([block.fqn for block in blocks])} reads another "
            f"value than in forward{_reads(blocks, ': ')}. The recompute may belong to another forward.",
            remedy=_LASTING,
        )  # fmt: skip


def _reads(blocks: list[Block], before: str) -> str:
    reads = dict.fromkeys(read for block in blocks for read in block.late_reads)
    return before + listed(tuple(reads)) if reads else ""


def moves_shared(case: Case) -> Iterator[Hazard]:
    blocks = [block for block in case.rerun if "moves_shared" in block.traits]
    if blocks:
        names = dict.fromkeys(name for block in blocks for name in block.moved_shared)
        yield Hazard(
            rule="moved-shared", severity="warning", blocks=tuple(block.fqn for block in blocks),
            sentence=f"{some([block.fqn for block in blocks])} changes {listed(tuple(names))} outside of the model "
            "whenever it runs, so twice a step.",
            remedy="Skip the update while explorer.is_recomputing(), or keep these blocks.",
        )  # fmt: skip


DRY_RERUN_RULES: tuple[Rule, ...] = (departs, reads_late, moves_shared)
