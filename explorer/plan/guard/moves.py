"""The difference of two locks, causes first: each a sentence that names its blocks, then the step's totals.

A figure that another one explains is left out: every figure of a wider batch, figures inside a block that runs more
or less often, and figures of backward if the forward has moved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple, get_args

from explorer.plan.names import innermost, is_within, listed, operator_word, outermost
from explorer.plan.sizes import distinct_texts, mib
from explorer.record.base import to_plain
from explorer.record.files import CollectiveBytes, Lock, LockedBlock, Move, MoveKind, OperatorBytes

_ORDER: tuple[MoveKind, ...] = get_args(MoveKind)
_CALLS: tuple[tuple[MoveKind, str, str], ...] = (
    ("block replaced", "kind", "is a {1}, was a {0}"),
    ("forward calls", "n_forward", "runs forward {1} times in a step, ran {0}"),
    ("reruns", "n_recompute", "runs again {1} times for backward, ran {0}"),
)
_FLOPS = ("forward_flops", "recompute_flops", "backward_flops")
_TOTALS = {"peak_bytes": "Peak", "saved_bytes": "Saved after forward", "card_reserved_bytes": "Reserved on the card"}
_NO_CALLS = CollectiveBytes(n=0, n_bytes=0)
_NO_RESULT = OperatorBytes(n=0, n_bytes=0)


class _BlockMove(NamedTuple):
    """A move of one block. `words` follow the block's name; `n_bytes` is the change of bytes."""

    kind: MoveKind
    block: str
    words: str
    n_bytes: int = 0


def moves(old: Lock, new: Lock) -> tuple[Move, ...]:
    """Differences in the order of MoveKind, larger ones first. Empty: every figure is equal.

    Versions of packages are no move by themselves: `versions` has their sentence.
    """
    of_blocks: Iterable[_BlockMove] = ()
    # The type with the most numbers comes first: another one of a single block leaves the others comparable.
    if old.inputs == new.inputs and old.dtype.partition(",")[0] == new.dtype.partition(",")[0]:
        of_blocks = _of_blocks(old, new)
    causes = [*_of_step(old, new), *_joined(of_blocks)]
    causes.sort(key=lambda move: (_ORDER.index(move.kind), -abs(move.n_bytes)))
    changes = (*causes, *_totals(old, new))
    others = tuple(fqn for fqn in new.blocks if old.blocks.get(fqn) != new.blocks[fqn])
    if not changes and (others or old.step != new.step):  # calls that write in place, say, without a byte
        where = listed([fqn or "the model" for fqn in others]) or "the step"
        return (Move(kind="totals", blocks=others, sentence=f"Figures without bytes differ in {where}."),)
    return changes


def versions(old: Lock, new: Lock) -> str:
    """A sentence on packages whose version differs; empty if none does."""
    names = [name for name in {**old.packages, **new.packages} if old.packages.get(name) != new.packages.get(name)]
    pairs = [f"{name} {old.packages.get(name, 'none')} → {new.packages.get(name, 'none')}" for name in names]
    return f"The lock was written with other versions: {', '.join(pairs)}." if pairs else ""


def _of_step(old: Lock, new: Lock) -> Iterator[Move]:
    before, after = ({**to_plain(lock.run), "ranks": lock.run.ranks and lock.run.ranks.in_words} for lock in (old, new))
    differing = [f"{name} is {after[name]}, was {before[name]}" for name in before if before[name] != after[name]]
    if old.policy != new.policy:
        differing.append(f"the policy is {new.policy}, was {old.policy}")
    if differing:
        yield Move(kind="conditions", blocks=(), sentence=f"The step is another one: {'; '.join(differing)}.")
    if old.inputs != new.inputs:
        shapes = f"{', '.join(new.inputs) or 'nothing'}, was {', '.join(old.inputs) or 'nothing'}"
        yield Move(kind="inputs", blocks=(), sentence=f"The batch is {shapes}.")
    if old.dtype != new.dtype:
        yield Move(kind="dtype", blocks=(), sentence=f"The parameters are {new.dtype}, were {old.dtype}.")


def _joined(changes: Iterable[_BlockMove]) -> Iterator[Move]:
    """Equal moves of several blocks as one."""
    groups: dict[tuple[MoveKind, str], dict[str, int]] = defaultdict(dict)
    for move in changes:
        groups[move.kind, move.words][move.block] = move.n_bytes
    for (kind, words), sizes in groups.items():
        subject, n_bytes = next(iter(sizes)) or "The model", sum(sizes.values())
        size = ""
        if n_bytes:
            size = f": {'+' * (n_bytes > 0)}{mib(n_bytes)}"
        if len(sizes) > 1:
            subject = f"Each of {listed(list(sizes))} ({len(sizes)} blocks)"
            size = size and f"{size} in all"
        yield Move(kind=kind, blocks=tuple(sizes), sentence=f"{subject} {words}{size}.", n_bytes=n_bytes)


def _of_blocks(old: Lock, new: Lock) -> list[_BlockMove]:
    changes = [*_of_calls(old, new)]
    explained = [move.block for move in changes]
    pairs = {fqn: pair for fqn, pair in _pairs(old, new).items() if not is_within(fqn, *explained)}
    for fqn in innermost([fqn for fqn, (was, now) in pairs.items() if was.parameter_bytes != now.parameter_bytes]):
        before, after = (mib(block.parameter_bytes) for block in pairs[fqn])
        changes.append(_BlockMove("parameters", fqn, f"has {after} of parameters, had {before}"))
    for fqn, pair in pairs.items():
        changes += _of_collectives(fqn, *pair)
        changes += _of_results(fqn, *pair, is_forward=True)
    if not changes:
        for fqn, pair in pairs.items():
            changes += _of_results(fqn, *pair, is_forward=False)
    return changes


def _pairs(old: Lock, new: Lock) -> dict[str, tuple[LockedBlock, LockedBlock]]:
    """The blocks that both locks have."""
    return {fqn: (old.blocks[fqn], block) for fqn, block in new.blocks.items() if fqn in old.blocks}


def _of_calls(old: Lock, new: Lock) -> Iterator[_BlockMove]:
    """The outermost blocks that came, went, have another class, or run more or less often."""
    for fqn in outermost([fqn for fqn in new.blocks if fqn not in old.blocks]):
        yield _BlockMove("block added", fqn, f"is new ({new.blocks[fqn].kind})", new.blocks[fqn].saved_bytes)
    for fqn in outermost([fqn for fqn in old.blocks if fqn not in new.blocks]):
        yield _BlockMove("block removed", fqn, f"is gone ({old.blocks[fqn].kind})", -old.blocks[fqn].saved_bytes)
    pairs = _pairs(old, new)
    for kind, field, words in _CALLS:
        changed = [fqn for fqn, (was, now) in pairs.items() if getattr(was, field) != getattr(now, field)]
        for fqn in outermost(changed):
            was, now = pairs[fqn]
            n_bytes = now.saved_bytes - was.saved_bytes
            before, after = getattr(was, field), getattr(now, field)
            if field == "n_recompute" and not after:
                yield _BlockMove("checkpoint lost", fqn, "is not recomputed any more, its checkpoint is lost", n_bytes)
            elif field == "n_recompute" and not before:
                yield _BlockMove("checkpoint added", fqn, "is recomputed now", n_bytes)
            else:
                yield _BlockMove(kind, fqn, words.format(before, after), n_bytes)


def _of_results(fqn: str, old: LockedBlock, new: LockedBlock, *, is_forward: bool) -> Iterator[_BlockMove]:
    """Operators of forward, or of all other phases, whose results differ: larger changes first."""
    keys = [key for key in {**old.operators, **new.operators} if key.startswith("forward ") == is_forward]
    rows = {key: (old.operators.get(key, _NO_RESULT), new.operators.get(key, _NO_RESULT)) for key in keys}
    rows = {key: pair for key, pair in rows.items() if pair[0] != pair[1]}
    is_saved = any(row.saved_bytes for pair in rows.values() for row in pair)
    field = "saved_bytes" if is_saved else "n_bytes"
    changes = {key: getattr(now, field) - getattr(was, field) for key, (was, now) in rows.items()}
    by_size = sorted(rows, key=lambda key: -abs(changes[key]))
    texts = [f"{_word(key)} {_result(rows[key][0])} → {_result(rows[key][1])}" for key in by_size]
    if texts:
        yield _BlockMove("results", fqn, f"has other results: {listed(texts, 4)}", sum(changes.values()))


def _result(row: OperatorBytes) -> str:
    """`256 B kept`: bytes, and whether they are kept for backward."""
    if not row.n:
        return "none"
    return f"{mib(row.n_bytes)} kept" if row.saved_bytes else mib(row.n_bytes)


def _word(key: str) -> str:
    """`softmax (float32)` of `forward aten._softmax.default float32`; another phase than forward is named."""
    phase, operator, *dtypes = key.split(" ")
    word = operator_word(operator).strip("_")
    for dtype in dtypes:
        word += f" ({dtype})"
    return word if phase == "forward" else f"{word} in {phase}"


def _of_collectives(fqn: str, old: LockedBlock, new: LockedBlock) -> Iterator[_BlockMove]:
    for key in {**old.collectives, **new.collectives}:
        was, now = (block.collectives.get(key, _NO_CALLS) for block in (old, new))
        phase, _, kind = key.partition(" ")
        if was != now:
            words = f"has {now.n} {kind}{'' if now.n == 1 else 's'} in {phase}, had {was.n}"
            yield _BlockMove("collectives", fqn, words, now.n_bytes - was.n_bytes)


def _totals(old: Lock, new: Lock) -> Iterator[Move]:
    for field, name in _TOTALS.items():
        before, after = (getattr(lock.step, field) for lock in (old, new))
        if before is not None and after is not None and before != after:
            sentence = f"{name} {_percent(before, after)}: {' → '.join(distinct_texts(before, after))}"
            if field == "peak_bytes" and new.step.peak_phase:
                sentence += f" in {new.step.peak_phase}"
            yield Move(kind="totals", blocks=(), sentence=f"{sentence}.", n_bytes=after - before)
    for kind in {**old.step.collectives, **new.step.collectives}:
        was, now = (lock.step.collectives.get(kind, _NO_CALLS) for lock in (old, new))
        if was != now:
            counts = [f"{calls.n} times, {mib(calls.n_bytes)} in all" if calls.n else "none" for calls in (was, now)]
            sentence = f"{kind}: {' became '.join(counts)}."
            yield Move(kind="totals", blocks=(), sentence=sentence, n_bytes=now.n_bytes - was.n_bytes)
    before, after = (sum(getattr(lock.step, field) for field in _FLOPS) for lock in (old, new))
    if before != after:
        yield Move(kind="totals", blocks=(), sentence=f"FLOPs {_percent(before, after)}: {before:,} → {after:,}.")


def _percent(before: int, after: int) -> str:
    if not before:
        return f"+{after:,}"
    share = 100 * (after / before - 1)
    text = f"{abs(share):.1f} %" if abs(share) >= 0.05 else "<0.1 %"
    return f"{'+' if share > 0 else chr(0x2212)}{text}"
