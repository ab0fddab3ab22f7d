"""A step's allocations sent through the caching allocator: what the card would hold, or the request that it refuses.

The step is repeated, because its first run differs from the later ones: the optimizer has no state yet, no gradients
are freed at its start, and the cache is empty. The repetition ends when a step leaves every block where a step before
left it, because all later steps then repeat too. An optimizer that makes its state in new memory may never get there:
its steps differ, and the answer is an interval over them.

A step of the record is taken as the loop that most people write:
1. parameters, buffers and the batch exist before the step, in the order of the record;
2. gradients of the step before are freed first (`zero_grad`);
3. the optimizer's state is made when the first step reaches the optimizer, all of it at once, as torch's optimizers do;
   an optimizer that does otherwise needs a record of its first step;
4. the first matrix product of a thread takes a workspace for cuBLAS; forward and backward are two threads;
   up to torch 2.11 the first product that adds a bias takes one for cuBLASLt too. Those of a step that was recorded
   on a GPU are left out: the card's own settings decide.

In a step that a user's own loop recorded, lifetimes are those of the record:
5. what is alive at the end of the step lives until the next step has made it again, as a variable does;
6. gradients die where the record frees those of the step before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from explorer.errors import BadInput
from explorer.plan.card.allocator_options import OTHER_OPTIONS, parse_options
from explorer.plan.card.caching_allocator import CachedBlock, CachingAllocator, OutOfCardMemory
from explorer.plan.card.cards import LARGEST_CARD, PRODUCTS, capacity_bytes, unknown_memory
from explorer.plan.card.torch_rules import lt_workspace_bytes, torch_of, workspace_bytes
from explorer.plan.memory.next_step import GRADIENT, STATE, WORKSPACE, replacements, survivors
from explorer.record.allocations import Allocations, Phase, PhaseSpan
from explorer.record.base import column
from explorer.record.card import Card, CardMemory, OtherSetting, RefusedRequest, UnknownMemory
from explorer.record.measurement import Measurement

COUNTER_BYTES = 4
EFFICIENT, SEED_BYTES = "_scaled_dot_product_efficient_attention.default", 8

OTHER_KERNELS = "what CUDA's kernels and its foreach optimizers hold otherwise: the step ran on the CPU"


@dataclass
class _Program:
    """The events of a step by tick, ready to be repeated."""

    log: Allocations
    first: list[int]
    """Entries alive before the step."""
    events: list[list[tuple[int, bool]]]
    """(entry, whether it is born) of each tick."""
    phase_of: list[int]
    phases: tuple[PhaseSpan, ...]
    user_loop: bool
    replaced: dict[int, int]
    """Entry alive at the end, by the entry of the next step that it stands for."""

    def role(self, entry: int) -> int:
        return self.log.role[entry]


def program_of(run: Measurement) -> _Program:
    """The step of `run`. Raises BadInput if the run has no timeline."""
    log, phases = run.allocations, run.phases
    if log is None:
        raise BadInput("A card is filled from a timeline, and this run has none.", hint="Run it again.")
    counters = _counters(run, log)
    first: list[int] = []
    events: list[list[tuple[int, bool]]] = [[] for _ in range(log.n_ticks + 1)]
    for entry, (born, died, role) in enumerate(zip(log.born, log.died, log.role)):
        if role == WORKSPACE or entry in counters or _is_seed(log, entry):
            continue
        if born > 0:
            events[born].append((entry, True))
        else:
            first.append(entry)
        if 0 < died <= log.n_ticks:
            events[died].append((entry, False))
    phase_of = [0] * len(events)
    for index, span in enumerate(phases):
        for tick in range(len(events))[span.first_tick : span.end_tick]:
            phase_of[tick] = index
    return _Program(log, first, events, phase_of, phases, run.origin == "recorded", replacements(log))


def _counters(run: Measurement, log: Allocations) -> set[int]:
    """Entries that count the steps of torch's AdamW: on a card they lie on the host, but in its `fused` form.

    The moments of a parameter of one element are as small, so the number of counters decides.
    """
    if run.origin == "recorded" or run.spec.optimizer != "adamw" or run.spec.optimizer_form == "fused":
        return set()
    state = [entry for entry, role in enumerate(log.role) if role == STATE]
    small = [entry for entry in state if log.n_bytes[entry] == COUNTER_BYTES]
    return set(small[: len(state) // 3])  # a counter and two moments for each parameter


def _is_seed(log: Allocations, entry: int) -> bool:
    """Whether the entry is a generator's seed or offset that the memory-efficient attention returns."""
    return log.n_bytes[entry] == SEED_BYTES and EFFICIENT in log.ops[log.op[entry]]


@dataclass
class _Play:
    """An allocator while it repeats a program."""

    program: _Program
    allocator: CachingAllocator
    card: Card
    live: dict[int, CachedBlock] = field(default_factory=dict)
    workspaces: dict[tuple[bool, str], int] = field(default_factory=dict)
    """Bytes by thread, forward (False) or backward (True), and by library."""
    requested: int = 0
    """Peak of the step, as `allocated` and `reserved`."""
    allocated: int = 0
    reserved: int = 0
    reserved_line: list[int] = field(default_factory=list)
    """Reserved bytes after each event of the step."""
    allocated_line: list[int] = field(default_factory=list)
    step: int = 0
    tick: int = 0
    entry: int = -1
    peaks: list[tuple[int, int]] = field(default_factory=list)
    """Allocated and reserved peak of each step."""
    layouts: dict[int, int] = field(default_factory=dict)
    """Steps by the hash of where every block was at their end."""

    def opening(self) -> None:
        for entry in self.program.first:
            if self.program.role(entry) != STATE:
                self._take(entry)

    def run(self) -> None:
        """One step, with peaks of its own."""
        program, self.step = self.program, self.step + 1
        self.requested, self.allocated, self.reserved = 0, 0, self.allocator.reserved_bytes
        self._begin()
        self.reserved_line, self.allocated_line = [], []
        first_ticks = {span.phase: span.first_tick for span in reversed(program.phases)}
        optimizer, backward = first_ticks.get("optimizer"), first_ticks.get("backward")
        for tick, events in enumerate(program.events):
            self.tick = tick
            if tick == backward:
                self.allocator.capacity_bytes = capacity_bytes(self.card)
            if self.step == 1 and optimizer is not None and tick == max(optimizer, 1):
                for entry in program.first:
                    if program.role(entry) == STATE:
                        self._take(entry)
            for entry, born in events:
                if born and entry in self.live:
                    self._remake(entry)
                elif born:
                    self._take(entry)
                elif entry in self.live:
                    self.allocator.release(self.live.pop(entry))
            self.reserved_line.append(self.allocator.reserved_bytes)
            self.allocated_line.append(self.allocator.allocated_bytes)
        self.peaks.append((self.allocated, self.reserved))

    def equal_step(self) -> int:
        """The step before that left every block where the last one left it; 0: none did."""
        live = frozenset((entry, block.address, block.n_bytes) for entry, block in self.live.items())
        before = self.layouts.setdefault(hash((live, self.allocator.reserved_bytes)), self.step)
        return before if before < self.step else 0

    def _begin(self) -> None:
        """Frees what the step before left, and lets its survivors stand for what they replaced."""
        program = self.program
        for entry, survivor in program.replaced.items():
            if survivor in self.live:
                self.live[entry] = self.live.pop(survivor)
        fixed = set(program.first)
        if program.user_loop:
            fixed |= {entry for entry in survivors(program.log) if program.role(entry) != GRADIENT}
        for entry in sorted(self.live.keys() - fixed):
            self.allocator.release(self.live.pop(entry))

    def _remake(self, entry: int) -> None:
        """A variable gets its new value while the old one is alive (rule 5). State of the optimizer is made once."""
        if self.program.role(entry) != STATE:
            old = self.live.pop(entry)
            self._take(entry)
            self.allocator.release(old)

    def follow(self, program: _Program) -> None:
        """Goes on with steps of another record. Its first entries lie in the blocks of what is alive, by size."""
        alive = defaultdict(list)
        for entry, block in self.live.items():
            alive[block.request_bytes, self.program.role(entry) == GRADIENT].append(entry)
        before, self.live, self.program = self.live, {}, program
        for entry in program.first:
            if candidates := alive[program.log.n_bytes[entry], program.role(entry) == GRADIENT]:
                self.live[entry] = before.pop(candidates.pop(0))
        for block in before.values():
            self.allocator.release(block)

    def _take(self, entry: int) -> None:
        log, self.entry = self.program.log, entry
        if log.n_bytes[entry] == 0:
            return
        stream = log.stream[entry] if log.stream else 0
        self.live[entry] = self.allocator.allocate(log.n_bytes[entry], stream)
        if log.born[entry] > 0 and (product := PRODUCTS.search(log.ops[log.op[entry]])):
            self._take_workspaces(with_bias=product[1] == "addmm")
        self.requested = max(self.requested, self.allocator.requested_bytes)
        self.allocated = max(self.allocated, self.allocator.allocated_bytes)
        self.reserved = max(self.reserved, self.allocator.reserved_bytes)

    def _take_workspaces(self, *, with_bias: bool) -> None:
        """A thread keeps the workspaces that its first product and its first product with a bias take (rule 4)."""
        backward = self.program.phases[self.program.phase_of[self.tick]].phase in ("backward", "recompute")
        workspaces = {"cublas": workspace_bytes(self.card)}
        if with_bias:
            workspaces["cublasLt"] = lt_workspace_bytes(self.card)
        for library, n_bytes in workspaces.items():
            if n_bytes and (backward, library) not in self.workspaces:
                self.workspaces[backward, library] = n_bytes
                self.allocator.allocate(n_bytes)


def memory_on(
    card: Card, run: Measurement, first: Measurement | None = None, *, others: Sequence[str] = OTHER_OPTIONS
) -> CardMemory:
    """What `run`'s step holds on `card`, also under each of the `others`, options of the allocator.

    `first` is the step before it, in which the optimizer made its state; None: torch's optimizers make it at once.
    Raises BadInput if the run has no timeline, and for options that cannot be read.
    """
    card = replace(card, torch=torch_of(card))
    programs = tuple(program_of(step) for step in (first, run) if step is not None)
    memory = _memory(card, programs)
    if run.origin == "recorded" and run.environment.device == "cpu":
        memory = replace(memory, unknown=(UnknownMemory(what=OTHER_KERNELS), *memory.unknown))
    played = [_memory(replace(card, options=options), programs) for options in others if options != card.options]
    settings = (
        OtherSetting(
            options=other.card.options,
            allocated_bytes=other.allocated_bytes,
            reserved_bytes=other.reserved_bytes,
            refused=other.refused is not None,
        )
        for other in played
    )
    return replace(memory, other_settings=tuple(settings))


def _memory(card: Card, programs: tuple[_Program, ...]) -> CardMemory:
    """The step of the last program, repeated; programs before it run once."""
    options = parse_options(card.options)
    in_forward = capacity_bytes(replace(card, taken_in_backward_bytes=None))
    play = _Play(programs[0], CachingAllocator(in_forward, options, total_bytes=card.total_bytes), card)
    refused = None
    try:
        play.opening()
        for program in programs[1:]:
            play.run()
            play.follow(program)
        equal = 0
        while not equal and play.step < card.n_steps:
            play.run()
            equal = play.equal_step()
        peaks = play.peaks[equal or 1 :]
    except OutOfCardMemory as error:
        refused, peaks = _refusal(play, error.n_bytes), [(play.allocated, play.reserved)]
    allocated, reserved = zip(*peaks)
    return CardMemory(
        card=card,
        requested_bytes=play.requested,
        allocated_bytes=max(allocated),
        reserved_bytes=max(reserved),
        least_allocated_bytes=min(allocated),
        least_reserved_bytes=min(reserved),
        workspace_bytes=sum(play.workspaces.values()),
        n_steps=play.step,
        refused=refused,
        unknown=unknown_memory(programs[-1].log, () if refused else play.allocated_line, card),
        not_checked=options.played,
        not_played=options.not_played,
        reserved=column(play.reserved_line),
    )


def excess_bytes(run: Measurement) -> int:
    """What the step of `run` would reserve on its card if the card had no end, beyond what the card has."""
    assert run.card is not None
    card = run.card.card
    return max(0, reserved_bytes(card, run) - capacity_bytes(card))


def is_granted(card: Card, run: Measurement) -> bool:
    """Whether `card` has memory for every request of the step of `run`."""
    return _memory(card, (program_of(run),)).refused is None


def reserved_bytes(card: Card, run: Measurement) -> int:
    """What the step of `run` would reserve if `card` had no end."""
    endless = replace(card, total_bytes=LARGEST_CARD, taken_bytes=0)
    return _memory(endless, (program_of(run),)).reserved_bytes


def _refusal(play: _Play, n_bytes: int) -> RefusedRequest:
    log, phases = play.program.log, play.program.phases
    phase: Phase = phases[play.program.phase_of[play.tick]].phase if phases else "between"
    return RefusedRequest(
        n_bytes=n_bytes,
        step=max(1, play.step),
        phase=phase,
        block=log.blocks[log.block[play.entry]],
        op=log.ops[log.op[play.entry]],
        allocated_bytes=play.allocator.allocated_bytes,
        reserved_bytes=play.allocator.reserved_bytes,
        tick=play.tick,
    )
