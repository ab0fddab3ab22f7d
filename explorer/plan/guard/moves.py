"""What moved between two locks: causes first, each as one sentence that names its blocks, then the step's totals.

conditions, inputs, types, blocks      found first: they explain the figures of every block
calls and reruns of a block            explain the bytes inside the block
operators, collectives of a block      one kind a sentence, equal siblings in one sentence
FLOPs, totals                          what is left, so that no difference passes in silence
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

from explorer.plan.names import innermost, is_within, listed, operator_word, outermost
from explorer.plan.sizes import distinct_texts, mib
from explorer.record.base import to_plain
from explorer.record.files import CollectiveBytes, Lock, LockedBlock, Move, MoveKind, OperatorBytes

_ORDER: tuple[MoveKind, ...] = get_args(MoveKind)
_NUMBER = re.compile(r"\b\d+\b")
_CAST = "aten._to_copy.default"
_NOTHING = OperatorBytes(n=0, n_bytes=0)
_NO_CALLS = CollectiveBytes(n=0, n_bytes=0)
Rows = Mapping[str, OperatorBytes]
Calls = Mapping[str, int]
Pairs = Mapping[str, tuple[LockedBlock, LockedBlock]]
Changed = dict[str, tuple[OperatorBytes, OperatorBytes]]
"""Rows of both locks by key; _NOTHING: the lock has no such row."""


def moves(old: Lock, new: Lock) -> tuple[Move, ...]:
    """Differences in the order of MoveKind, larger ones first. Empty: every figure is equal.

    Consequences are left out if their cause is there: sizes of a wider batch, the backward of another forward, the
    buffers of another gather in backward.
    Versions of packages are no move by themselves: `versions` has their sentence.
    """
    step, of_calls = [*_of_step(old, new)], [*_of_calls(old, new)]
    # The type with the most numbers comes first: another one of a single block leaves the others comparable.
    scaled = old.inputs != new.inputs or old.dtype.partition(",")[0] != new.dtype.partition(",")[0]
    inside = [move.block for move in of_calls if move.kind in _EXPLAIN_INSIDE]
    common = [fqn for fqn in new.blocks if fqn in old.blocks and not any(is_within(fqn, block) for block in inside)]
    of_blocks = [move for move in of_calls if not (scaled and move.kind == "parameters")]
    if not scaled:
        for fqn in common:
            of_blocks += _of_collectives(fqn, old.blocks[fqn], new.blocks[fqn])
        for is_forward in (True, False):
            for fqn in common if is_forward or not of_blocks else ():
                older, newer = old.blocks[fqn], new.blocks[fqn]
                written = (older.in_place, newer.in_place) if is_forward else ({}, {})
                rows = _rows(older, is_forward=is_forward), _rows(newer, is_forward=is_forward)
                of_blocks += _of_operators(fqn, rows, written)
        if not of_blocks:
            of_blocks += _of_flops(common, old, new)
    causes = sorted((*step, *_joined(of_blocks)), key=lambda move: (_ORDER.index(move.kind), -abs(move.n_bytes)))
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


def in_one_line(changes: Sequence[Move]) -> str:
    """`blocks.3 now saves its softmax in float32: +84 MiB; peak +2.1 %`: the first cause and the first total."""
    causes = [move.sentence for move in changes if move.kind != "totals"]
    totals = [move.sentence for move in changes if move.kind == "totals"]
    more = f" (and {len(causes) - 1} more)" if len(causes) > 1 else ""
    return "; ".join([sentence.rstrip(".") for sentence in (*causes[:1], *totals[:1])]) + more


class _BlockMove(NamedTuple):
    """A move of one block. `words` follow the block's name; `n_bytes` is the change of bytes."""

    kind: MoveKind
    block: str
    words: str
    n_bytes: int = 0


_EXPLAIN_INSIDE = ("forward calls", "checkpoint lost", "checkpoint added", "reruns", "block added", "block replaced")


def _joined(changes: Iterable[_BlockMove]) -> Iterator[Move]:
    """Equal moves of siblings as one: names that differ in numbers alone, with equal words."""
    groups: dict[tuple[str, str, str], list[_BlockMove]] = defaultdict(list)
    for move in changes:
        groups[move.kind, _NUMBER.sub("*", move.block), move.words].append(move)
    for group in groups.values():
        names = tuple(dict.fromkeys(move.block for move in group))
        n_bytes = sum(move.n_bytes for move in group)
        many = f"{names[0]} to {names[-1]}" if len(names) > 2 else " and ".join(names)
        subject = (names[0] or "The model") if len(names) == 1 else f"Each of {many} ({len(names)} blocks)"
        sign = "+" if n_bytes > 0 else ""
        size = f": {sign}{mib(n_bytes)}{' in all' if len(names) > 1 else ''}" if n_bytes else ""
        yield Move(kind=group[0].kind, blocks=names, sentence=f"{subject} {group[0].words}{size}.", n_bytes=n_bytes)


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


def _of_calls(old: Lock, new: Lock) -> Iterator[_BlockMove]:
    """Blocks that came or went, and blocks that run more or less often. A block inside such a block is left out."""
    sides: tuple[tuple[MoveKind, Lock, Lock], ...] = (("block added", new, old), ("block removed", old, new))
    for kind, here, there in sides:
        gone = [fqn for fqn in here.blocks if fqn not in there.blocks]
        for fqn in outermost(gone):
            block, sign = here.blocks[fqn], 1 if here is new else -1
            words = f"is {'new' if here is new else 'gone'} ({block.kind})"
            yield _BlockMove(kind, fqn, words, sign * block.saved_bytes)
    pairs = {fqn: (old.blocks[fqn], new.blocks[fqn]) for fqn in new.blocks if fqn in old.blocks}
    replaced = [fqn for fqn, (older, newer) in pairs.items() if fqn and older.kind != newer.kind]
    for fqn in outermost(replaced):
        older, newer = pairs[fqn]
        yield _BlockMove("block replaced", fqn, f"is a {newer.kind}, was a {older.kind}")
    others = [*replaced, *(fqn for fqn in {**old.blocks, **new.blocks} if fqn not in pairs)]
    resized = [fqn for fqn, (older, newer) in pairs.items() if older.parameter_bytes != newer.parameter_bytes]
    for fqn in innermost(resized):
        older, newer = pairs[fqn]
        if not any(is_within(name, fqn) for name in others):
            words = f"has {mib(newer.parameter_bytes)} of parameters, had {mib(older.parameter_bytes)}"
            yield _BlockMove("parameters", fqn, words)
    yield from _of_counts(pairs)


def _of_counts(pairs: Pairs) -> Iterator[_BlockMove]:
    called = [fqn for fqn, (older, newer) in pairs.items() if older.n_forward != newer.n_forward]
    for fqn in outermost(called):
        older, newer = pairs[fqn]
        words = f"runs forward {_times(newer.n_forward)} in a step, ran {_times(older.n_forward)}"
        if not newer.n_forward or not older.n_forward:
            words = "is called now" if newer.n_forward else "is not called any more"
        yield _BlockMove("forward calls", fqn, words, newer.saved_bytes - older.saved_bytes)
    rerun = [fqn for fqn, (older, newer) in pairs.items() if older.n_recompute != newer.n_recompute]
    for fqn in outermost(_with_holders([fqn for fqn in rerun if fqn not in called], pairs)):
        older, newer = pairs[fqn]
        kind: MoveKind = "reruns"
        inside = [pair for name, pair in pairs.items() if is_within(name, fqn)]
        n_before, n_after = (max(pair[i].n_recompute for pair in inside) for i in (0, 1))
        words = f"runs again {_times(n_after)} for backward, ran again {_times(n_before)}"
        if not n_after:
            kind, words = "checkpoint lost", "is not recomputed any more, its checkpoint is lost"
        elif not n_before:
            kind, words = "checkpoint added", "is recomputed now"
        yield _BlockMove(kind, fqn, words, newer.saved_bytes - older.saved_bytes)


def _of_operators(fqn: str, of: tuple[Rows, Rows], in_place: tuple[Calls, Calls]) -> Iterator[_BlockMove]:
    """Moves of the block's operators in one phase: types first, then in place, then what came, went or changed."""
    old, new = of
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    changed = {key: (old.get(key, _NOTHING), new.get(key, _NOTHING)) for key in keys}
    retyped = [*_of_types(fqn, changed)]
    yield from retyped
    if retyped:  # the casts around the operator are part of the same change
        changed = {key: rows for key, rows in changed.items() if _operator(key) != _CAST}
    yield from _of_in_place(fqn, changed, in_place)
    added: Changed = {}
    removed: Changed = {}
    for key, (older, newer) in changed.items():
        if older.n == newer.n:
            yield _resized(fqn, key, older, newer)
        else:
            (added if newer.n > older.n else removed)[key] = (older, newer)
    if added:
        yield _counted("operator added", fqn, added)
    if removed:
        yield _counted("operator removed", fqn, removed)


def _of_types(fqn: str, changed: Changed) -> Iterator[_BlockMove]:
    """Operators whose results have another type; their rows leave `changed`."""
    for key, (older, newer) in list(changed.items()):
        others = (other for other, (_, after) in changed.items() if _operator(other) == _operator(key) and not after.n)
        if not older.n and (other := next(others, None)) is not None:
            before, _ = changed.pop(other)
            del changed[key]
            verb = "saves" if newer.saved_bytes else "computes"
            words = f"now {verb} its {_word(key)} in {_dtype(key)} (was {_dtype(other)})"
            yield _BlockMove("result dtype", fqn, words, _moved(before, newer))


def _of_in_place(fqn: str, changed: Changed, in_place: tuple[Calls, Calls]) -> Iterator[_BlockMove]:
    """Operators that write into an argument in one lock and allocate in the other; their rows leave `changed`."""
    old, new = in_place
    for name in {**old, **new}:
        n_more = new.get(name, 0) - old.get(name, 0)
        for key, (older, newer) in list(changed.items()):
            if n_more and _word(key) == operator_word(name).strip("_") and (newer.n - older.n) * n_more < 0:
                del changed[key]
                words = "now works in place in" if n_more > 0 else "no longer works in place in"
                yield _BlockMove("in place", fqn, f"{words} its {_word(key)}", newer.n_bytes - older.n_bytes)
                break


def _counted(kind: MoveKind, fqn: str, rows: Changed) -> _BlockMove:
    """The operators that came, or that went, in one sentence: those whose results are kept first, then the largest."""
    keys = sorted(rows, key=lambda key: (not any(row.saved_bytes for row in rows[key]), -abs(_moved(*rows[key]))))
    names = listed([f"{_word(key)}{f' ({_dtype(key)})' if _dtype(key) else ''}" for key in keys])
    saved = sum(newer.saved_bytes - older.saved_bytes for older, newer in rows.values())
    allocated = sum(newer.n_bytes - older.n_bytes for older, newer in rows.values())
    more = any(older.n for older, _ in rows.values())
    if kind == "operator added":
        words = f"now {'saves' if saved else 'allocates'} {'more ' if more else ''}results of {names}"
    else:
        words = f"has {'fewer' if any(newer.n for _, newer in rows.values()) else 'no'} results of {names} any more"
    return _BlockMove(kind, fqn, words, saved or allocated)


def _resized(fqn: str, key: str, older: OperatorBytes, newer: OperatorBytes) -> _BlockMove:
    """The same number of results: other sizes, or kept for backward in one lock alone."""
    n_bytes = newer.saved_bytes - older.saved_bytes
    if older.n_bytes == newer.n_bytes:
        kind: MoveKind = "result saved" if n_bytes > 0 else "result freed"
        words = f"{'now keeps' if n_bytes > 0 else 'no longer keeps'} its {_word(key)} for backward"
        return _BlockMove(kind, fqn, words, n_bytes)
    before, after = distinct_texts(older.n_bytes, newer.n_bytes)
    return _BlockMove("result size", fqn, f"has {after} of {_word(key)}, had {before}", _moved(older, newer))


def _rows(block: LockedBlock, *, is_forward: bool) -> Rows:
    """Operators of the forward without the name of the phase, or of all other phases with it."""
    rows = {key: row for key, row in block.operators.items() if key.startswith("forward ") == is_forward}
    return {key.removeprefix("forward "): row for key, row in rows.items()}


def _of_collectives(fqn: str, older_block: LockedBlock, newer_block: LockedBlock) -> Iterator[_BlockMove]:
    old, new = older_block.collectives, newer_block.collectives
    for key in {**old, **new}:
        older, newer = (calls.get(key, _NO_CALLS) for calls in (old, new))
        phase, _, kind = key.partition(" ")
        counts = f"has {newer.n} {kind}{'' if newer.n == 1 else 's'} in {phase}, had {older.n}"
        words = f"has {kind}s of other sizes in {phase}" if older.n == newer.n else counts
        if older != newer:
            yield _BlockMove("collectives", fqn, words, newer.n_bytes - older.n_bytes)


def _of_flops(common: Sequence[str], old: Lock, new: Lock) -> Iterator[_BlockMove]:
    """FLOPs that changed although nothing else did, innermost blocks only."""
    for name in ("forward", "recompute", "backward"):
        field = f"{name}_flops"
        pairs = {fqn: (getattr(old.blocks[fqn], field), getattr(new.blocks[fqn], field)) for fqn in common}
        for fqn in innermost([fqn for fqn, (older, newer) in pairs.items() if older != newer]):
            older, newer = pairs[fqn]
            yield _BlockMove("flops", fqn, f"computes {newer:,} FLOP in {name}, computed {older:,}")


def _totals(old: Lock, new: Lock) -> Iterator[Move]:
    def total(sentence: str, n_bytes: int = 0) -> Move:
        return Move(kind="totals", blocks=(), sentence=sentence, n_bytes=n_bytes)

    phase = f" in {new.step.peak_phase}" if new.step.peak_phase else ""
    names = {
        "peak_bytes": ("Peak", phase),
        "saved_bytes": ("Saved after forward", ""),
        "card_reserved_bytes": ("Reserved on the card", ""),
    }
    for field, (name, where) in names.items():
        before, after = getattr(old.step, field), getattr(new.step, field)
        if before != after and before is not None and after is not None:
            sizes = " → ".join(distinct_texts(before, after))
            yield total(f"{name} {_percent(before, after)}: {sizes}{where}.", after - before)
    for kind in {**old.step.collectives, **new.step.collectives}:
        was, now = (lock.step.collectives.get(kind, _NO_CALLS) for lock in (old, new))
        if was != now:
            counts = [f"{calls.n} times, {mib(calls.n_bytes)} in all" if calls.n else "none" for calls in (was, now)]
            yield total(f"{kind}: {' became '.join(counts)}.", now.n_bytes - was.n_bytes)
    steps = (old.step, new.step)
    before, after = (step.forward_flops + step.recompute_flops + step.backward_flops for step in steps)
    if before != after:
        yield total(f"FLOPs {_percent(before, after)}: {before:,} → {after:,}.")


def _with_holders(fqns: Sequence[str], pairs: Pairs) -> list[str]:
    """`fqns`, and each block whose children are all among them, those without FLOPs and saved bytes left out.

    Such a block checkpoints its own code. Early stop does not reach a last child that saves nothing.
    """
    gathered = dict.fromkeys(fqns)
    for fqn in reversed([fqn for fqn, pair in pairs.items() if fqn and all(_runs_code(side) for side in pair)]):
        children = [name for name in pairs if name.rpartition(".")[0] == fqn and _works(pairs[name])]
        if children and all(name in gathered for name in children):
            gathered[fqn] = None
    return [fqn for fqn in pairs if fqn in gathered]


def _runs_code(block: LockedBlock) -> bool:
    """Whether a block has a forward with code that could be checkpointed: a Sequential calls its blocks one by one."""
    return bool(block.n_forward) and block.kind != "Sequential"


def _works(pair: tuple[LockedBlock, LockedBlock]) -> bool:
    return any(block.n_forward and (block.forward_flops or block.saved_bytes) for block in pair)


def _operator(key: str) -> str:
    """A key of `LockedBlock.operators` without its type."""
    return key.rpartition(" ")[0] or key


def _dtype(key: str) -> str:
    return key.rpartition(" ")[2] if " " in key else ""


def _word(key: str) -> str:
    """`softmax` of `aten._softmax.default float32`, `softmax in backward` of another phase than forward."""
    phase, _, name = _operator(key).rpartition(" ")
    return f"{operator_word(name).strip('_')}{f' in {phase}' if phase else ''}"


def _moved(older: OperatorBytes, newer: OperatorBytes) -> int:
    """Change of the saved bytes, or of all allocated bytes if neither is saved."""
    if older.saved_bytes or newer.saved_bytes:
        return newer.saved_bytes - older.saved_bytes
    return newer.n_bytes - older.n_bytes


def _times(n: int) -> str:
    return {1: "once", 2: "twice"}.get(n, f"{n} times")


def _percent(before: int, after: int) -> str:
    if not before:
        return f"+{after:,}"
    share = 100 * (after / before - 1)
    text = f"{abs(share):.1f} %" if abs(share) >= 0.05 else "<0.1 %"
    return f"{'+' if share > 0 else chr(0x2212)}{text}"


def runs_again(lock: Lock, fqn: str) -> bool:
    """Whether a block runs again in backward, or all of its code does: its children with FLOPs or saved bytes."""
    if lock.blocks[fqn].n_recompute:
        return True
    inside = ((name, block) for name, block in lock.blocks.items() if name.rpartition(".")[0] == fqn)
    children = [name for name, block in inside if _works((block, block))]
    return bool(children) and all(runs_again(lock, child) for child in children)


def markdown(old: Lock, new: Lock, changes: Sequence[Move]) -> str:
    """The moves as a list, and a table of the blocks whose figures differ: for the text of a pull request."""
    if not changes:
        return "The training step is as its lock says.\n"
    lines = [f"**{in_one_line(changes)}**", "", *(f"- {move.sentence}" for move in changes), ""]
    lines += ["| block | saved for backward | was | runs again | was |", "|---|---:|---:|---:|---:|"]
    rows = [*_table(old, new)]
    lines += rows[:_MOST_ROWS]
    if len(rows) > _MOST_ROWS:
        lines.append(f"| {len(rows) - _MOST_ROWS} more blocks | | | | |")
    if sentence := versions(old, new):
        lines += ["", sentence]
    return "\n".join(lines) + "\n"


_MOST_ROWS = 30


def _table(old: Lock, new: Lock) -> Iterator[str]:
    for fqn in dict.fromkeys((*old.blocks, *new.blocks)):
        older, newer = old.blocks.get(fqn, LockedBlock()), new.blocks.get(fqn, LockedBlock())
        if (older.saved_bytes, older.n_recompute) != (newer.saved_bytes, newer.n_recompute):
            name = f"`{fqn}`" if fqn else "the model"
            sizes = f"{mib(newer.saved_bytes)} | {mib(older.saved_bytes)}"
            yield f"| {name} | {sizes} | {newer.n_recompute} | {older.n_recompute} |"
