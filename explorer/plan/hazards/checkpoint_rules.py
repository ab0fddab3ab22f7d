"""Rules for policies that change gradients or state of a model, one rule for each trap. Pure: traits in, hazards out.

Every rule has a test that runs a tiny model into its trap and out again: tests/engine/policy/test_hazards_shown.py.
Some traps show in no observed forward: a temperature changed between forward and backward, a mutated global. They have
no rule here; the comparison finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from explorer.plan.names import innermost, is_within, lineage, some, written_results
from explorer.record.graph import Block, Hazard, ModelGraph, Trait
from explorer.record.policy import Policy, Unit
from explorer.record.run import PipelinePlan, RunSpec


@dataclass(frozen=True)
class Case:
    """The input of the rules. No rule runs the model."""

    graph: ModelGraph
    policy: Policy
    plan: PipelinePlan | None = None
    spec: RunSpec | None = None

    @cached_property
    def rerun(self) -> tuple[Block, ...]:
        """Every block that runs again: those the policy recomputes and all below them, in module order."""
        tops = {fqn for unit in self.policy.units if unit.action != "offload" for fqn in unit.blocks}
        return tuple(block for block in self.graph.blocks if not tops.isdisjoint(lineage(block.fqn)))

    @cached_property
    def units(self) -> tuple[tuple[Unit, tuple[Block, ...]], ...]:
        """Each unit with the blocks it names, as far as the graph knows them."""
        by_fqn = self.graph.by_fqn
        return tuple((unit, tuple(by_fqn[fqn] for fqn in unit.blocks if fqn in by_fqn)) for unit in self.policy.units)

    def rerun_with(self, trait: Trait) -> tuple[str, ...]:
        """Innermost blocks with `trait` among those that run again: the ones a person can point at."""
        return innermost(block.fqn for block in self.rerun if trait in block.traits)

    def handed(self, trait: Trait) -> tuple[str, ...]:
        """Blocks with `trait` that their unit begins with. What a unit is handed from outside is kept for its rerun."""
        return tuple(block.fqn for _, named in self.units for block in named[:1] if trait in block.traits)

    def handing_on(self, trait: Trait) -> tuple[str, ...]:
        """Blocks with `trait` that their unit ends with."""
        return tuple(block.fqn for _, named in self.units for block in named[-1:] if trait in block.traits)

    @property
    def trains(self) -> bool:
        """True in train mode, in which dropout draws and running statistics move."""
        return self.spec is None or self.spec.mode == "train"

    @property
    def on_cuda(self) -> bool:
        return self.spec is not None and self.spec.device == "cuda"

    @cached_property
    def stage_of(self) -> dict[str, int]:
        """Stage of each block that a stage holds, everything below included."""
        if self.plan is None:
            return {}
        tops = {fqn: j for j, stage in enumerate(self.plan.stages) for fqn in stage}
        stages = {}
        for block in self.graph.blocks:
            nearest = next((fqn for fqn in lineage(block.fqn) if fqn in tops), None)
            if nearest is not None:
                stages[block.fqn] = tops[nearest]
        return stages


Rule = Callable[[Case], Iterator[Hazard]]

RANDOM_OPS = ("bernoulli", "dropout", "rand", "normal", "uniform", "multinomial", "rrelu", "exponential")


def dropout_redrawn(case: Case) -> Iterator[Hazard]:
    drawing = case.rerun_with("uses_rng")
    if drawing and not case.policy.preserve_rng_state and case.trains:
        yield Hazard(
            rule="dropout-redrawn", severity="error", blocks=drawing,
            sentence="preserve_rng_state is off, so the recompute draws other random numbers than forward did, in "
            f"{some(drawing)}: the gradients belong to another forward.",
            remedy="Switch preserve_rng_state on.",
        )  # fmt: skip


def random_numbers_torch_does_not_stash(case: Case) -> Iterator[Hazard]:
    """torch stashes its own default generators only, whatever preserve_rng_state says."""
    registered = case.policy.restore_rng
    generators = case.rerun_with("own_generator")
    unnamed = tuple(fqn for fqn in generators if not any(_reaches(path, fqn) for path in registered))
    sources = (
        ("own-generator", unnamed, "a generator object of its own", "the dotted path of the generator, an attribute"),
        ("python-rng", case.rerun_with("python_rng"), "Python's random", "`python`"),
        ("numpy-rng", case.rerun_with("numpy_rng"), "numpy's global generator", "`numpy`"),
    )
    for rule, blocks, source, name in sources:
        if blocks and name.strip("`") not in registered:
            yield Hazard(
                rule=rule, severity="error", blocks=blocks,
                sentence=f"Random numbers in {some(blocks)} come from {source}, which torch does not set back: the "
                "recompute draws others.",
                remedy=f"Name {name} in the policy's restore_rng, or draw from torch's default generator.",
            )  # fmt: skip


def running_statistics(case: Case) -> Iterator[Hazard]:
    blocks = case.rerun_with("running_statistics")
    if blocks and case.trains and case.policy.running_stats == "every_forward":
        yield Hazard(
            rule="running-statistics", severity="error", blocks=blocks,
            sentence=f"Running statistics of {some(blocks)} move at every forward, so twice a step: gradients stay "
            "equal, the model in eval mode does not.",
            remedy="Set running_stats to once.",
        )  # fmt: skip


def moved_buffers(case: Case) -> Iterator[Hazard]:
    """Spectral norm's power iteration, moving averages, load counters."""
    blocks = case.rerun_with("moves_buffers")
    if blocks and case.trains:
        yield Hazard(
            rule="moved-buffers", severity="error", blocks=blocks,
            sentence=f"The forward of {some(blocks)} changes a buffer that is not a running statistic; running it "
            "again starts from the changed one, and what reads the buffer computes another gradient.",
            remedy="Keep these blocks, or skip the update while explorer.is_recomputing().",
        )  # fmt: skip


def hidden_state(case: Case) -> Iterator[Hazard]:
    """A module in a plain list or a closure: no policy can hold its running statistics still."""
    blocks = case.rerun_with("hidden_state")
    if blocks and case.trains:
        yield Hazard(
            rule="hidden-state", severity="error", blocks=blocks,
            sentence=f"{some(blocks)} calls a module that is not registered (it stands in a list or a closure) and "
            "whose buffers move at every forward, so twice a step.",
            remedy="Register the module, in an nn.ModuleList say, or keep these blocks.",
        )  # fmt: skip


def statistics_in_use(case: Case) -> Iterator[Hazard]:
    """Batch renormalisation and its kin."""
    blocks = case.rerun_with("reads_statistics")
    if blocks and case.trains:
        yield Hazard(
            rule="statistics-in-use", severity="error", blocks=blocks,
            sentence=f"In training {some(blocks)} computes with its running statistics and moves them; running it "
            "again finds them moved and computes with others.",
            remedy="Keep these blocks.",
        )  # fmt: skip


def moved_attributes(case: Case) -> Iterator[Hazard]:
    blocks = case.rerun_with("moves_attributes")
    if blocks:
        yield Hazard(
            rule="moved-attributes", severity="warning", blocks=blocks,
            sentence=f"The forward of {some(blocks)} changes an attribute of the module (a counter, a kept loss, "
            "a cache); running it again starts from the changed one.",
            remedy="Skip the update while explorer.is_recomputing(), or keep these blocks.",
        )  # fmt: skip


def kept_cache(case: Case) -> Iterator[Hazard]:
    """Only lists from outside a unit matter: a list made inside the unit is made again by the rerun."""
    blocks = case.handed("keeps_cache")
    if blocks:
        yield Hazard(
            rule="kept-cache", severity="error", blocks=blocks,
            sentence=f"{some(blocks)} reads a cache, list or dictionary that it is handed and that changes while or "
            "after it runs; running again finds another content, so shapes or values differ from forward.",
            remedy="Train with use_cache=False, or recompute the block around it, which makes a new list.",
        )  # fmt: skip


def emptied_store(case: Case) -> Iterator[Hazard]:
    """A unit that holds a skip's stash and its pop fills the store again before it empties it."""
    blocks = []
    for unit, named in case.units:
        n_stored = 0
        for block in named if unit.action != "offload" else ():
            if "takes_stored" in block.traits:
                blocks += [] if n_stored else [block.fqn]
                n_stored = max(n_stored - 1, 0)
            n_stored += "stores_tensors" in block.traits
    if blocks:
        yield Hazard(
            rule="emptied-store", severity="error", blocks=tuple(blocks),
            sentence=f"{some(blocks)} takes a tensor out of an object that another block filled (a skip connection, "
            "stash and pop); running again finds it gone.",
            remedy="Recompute the block around both, pass the tensor as an argument, or keep this block.",
        )  # fmt: skip


def filled_inputs(case: Case) -> Iterator[Hazard]:
    blocks = case.handed("fills_inputs")
    if blocks:
        yield Hazard(
            rule="filled-inputs", severity="warning", blocks=blocks,
            sentence=f"A list, dictionary or object that {some(blocks)} is handed changes while or after it runs "
            "(a collection of losses, say); what the block adds is added again when it runs again.",
            remedy="Return it instead, or skip the update while explorer.is_recomputing().",
        )  # fmt: skip


def changed_inputs(case: Case) -> Iterator[Hazard]:
    """Only tensors from outside a unit matter: a tensor made inside the unit is made again by the rerun."""
    blocks = case.handed("changes_inputs")
    if blocks:
        yield Hazard(
            rule="changed-inputs", severity="error", blocks=blocks,
            sentence=f"A tensor that {some(blocks)} is given is written into while or after the block runs, and it is "
            "what checkpointing keeps to run it again.",
            remedy="Use the out-of-place operation, or start the unit one block earlier.",
        )  # fmt: skip


def never_called(case: Case) -> Iterator[Hazard]:
    named = tuple(block for _, blocks in case.units for block in blocks if not block.n_calls)
    ran = {(block.parent, block.kind) for block in case.graph.blocks if block.n_calls and block.name.isdigit()}
    blocks = tuple(block.fqn for block in named if (block.parent, block.kind) not in ran)  # others: LayerDrop
    if blocks:
        yield Hazard(
            rule="never-called", severity="warning", blocks=blocks,
            sentence=f"The observed forward never calls {some(blocks)} as a module: to name it has no effect, unless "
            "another forward does.",
            remedy="Name its children, or the block around it.",
        )  # fmt: skip


def segment_apart(case: Case) -> Iterator[Hazard]:
    """Two blocks of a segment between which the model does more than hand on; files of old do not say."""
    following = case.graph.next_in_turn
    pairs = (pair for _, blocks in case.units for pair in zip(blocks, blocks[1:]))
    apart = [
        (before.fqn, after.fqn)
        for before, after in pairs
        if before.n_calls and after.n_calls and after.follows is not None and following.get(before.fqn) != after.fqn
    ]
    if apart:
        yield Hazard(
            rule="segment-apart", severity="error", blocks=tuple(dict.fromkeys(fqn for pair in apart for fqn in pair)),
            sentence="Between blocks of one segment the model does more than hand on what the first returns: "
            f"{some([' and '.join(pair) for pair in apart])} cannot be recomputed together.",
            remedy="Recompute them one by one, or end the segment there.",
        )  # fmt: skip


def random_last(case: Case) -> Iterator[Hazard]:
    """RReLU fills its noise after autograd packed it; early stop leaves the region before (pytorch 193671)."""
    last = case.handing_on("rng_last")
    if last and case.policy.stops_early and case.trains:
        yield Hazard(
            rule="random-last", severity="error", blocks=last,
            sentence=f"The noise of RReLU at the end of {some(last)} is filled in after early stop has left the "
            "block: backward reads uninitialized memory.",
            remedy="Switch early_stop off, or end the unit one block later.",
        )  # fmt: skip


def selective(case: Case) -> Iterator[Hazard]:
    for unit, _ in case.units:
        if unit.action != "save_ops":
            continue
        blocks = unit.blocks
        drawing = tuple(op for op in unit.save_ops if any(word in op for word in RANDOM_OPS))
        written = tuple(op for op in written_results(unit, case.graph) if op not in drawing)
        if drawing:
            yield Hazard(
                rule="selective-random", severity="error", blocks=blocks,
                sentence=f"The results of {some(drawing)} are kept in {some(blocks)}, so nothing is drawn for them at "
                "recompute, and what draws later gets their random numbers.",
                remedy="Keep matrix products, not random operations.",
            )  # fmt: skip
        if written:
            yield Hazard(
                rule="selective-in-place", severity="error", blocks=blocks,
                sentence=f"To keep {some(written)} in {some(blocks)} is to keep a result that is written in place: "
                "torch refuses it.",
                remedy="Keep operations that return a new tensor which nothing writes into afterwards.",
            )  # fmt: skip
        yield Hazard(
            rule="selective-once", severity="note", blocks=blocks,
            sentence=f"Selective checkpointing gives {some(blocks)} one backward: a second one or a Hessian-vector "
            "product raises. So does a kept result that the block changes in place afterwards.",
            remedy="Recompute the whole block where you need second order.",
        )  # fmt: skip


def unchecked_recompute(case: Case) -> Iterator[Hazard]:
    if case.policy.determinism_check == "none" and case.rerun and not case.policy.use_reentrant:
        yield Hazard(
            rule="unchecked-recompute", severity="note", blocks=case.policy.blocks,
            sentence="determinism_check is off: a recompute that takes another branch gives wrong gradients without "
            "an error.",
            remedy="Set determinism_check to default.",
        )  # fmt: skip


def mode_flips(case: Case) -> Iterator[Hazard]:
    modal = innermost(b.fqn for b in case.rerun if b.uses_rng or b.running_statistics)
    if modal and case.policy.use_reentrant and case.trains:
        yield Hazard(
            rule="mode-flips", severity="warning", blocks=modal,
            sentence=f"After model.eval() between forward and backward the recompute of {some(modal)} is in eval "
            "mode, and reentrant checkpointing does not notice.",
            remedy="Call eval() after backward, or set use_reentrant to False, which raises.",
        )  # fmt: skip


def offload_without_device(case: Case) -> Iterator[Hazard]:
    blocks = tuple(fqn for unit, _ in case.units if unit.action == "offload" for fqn in unit.blocks)
    if blocks and case.spec is not None and not case.on_cuda:
        yield Hazard(
            rule="offload-without-device", severity="note", blocks=blocks,
            sentence=f"Saved tensors of {some(blocks)} are on the CPU already: offload only copies them.",
            remedy="Choose recompute on the CPU, offload on a GPU.",
        )  # fmt: skip


def checkpoints_itself(case: Case) -> Iterator[Hazard]:
    """Both runs of a comparison have it, so no comparison of policies can say anything of it."""
    blocks = tuple(block.fqn for block in case.graph.blocks if "checkpoints_itself" in block.traits)
    if not blocks or not case.trains:
        return
    twice = {fqn for fqn in case.policy.blocks for name in blocks if is_within(fqn, name) or is_within(name, fqn)}
    again = f" The policy makes {some(tuple(sorted(twice)))} run a further time." if twice else ""
    yield Hazard(
        rule="checkpoints-itself", severity="warning", blocks=blocks,
        sentence=f"The model runs {some(blocks)} again for backward by itself, with a policy and without: a verdict "
        f"says nothing of that recompute, and a policy on these blocks frees little.{again}",
        remedy="Switch the model's own checkpointing off (gradient_checkpointing_disable() in transformers), and see "
        "with explorer.audit(model, step) whether it gives the same gradient.",
    )  # fmt: skip


def replay_draws_again(case: Case) -> Iterator[Hazard]:
    """torch_remat has no preserve_rng_state. The loss is that of forward; only the gradients are of another one."""
    blocks = innermost([block.fqn for block in case.graph.blocks if block.uses_rng and _REPLAYED in block.traits])
    if blocks and case.trains:
        yield Hazard(
            rule="replay-draws-again", severity="error", blocks=blocks,
            sentence=f"torch_remat runs {some(blocks)} again and sets no generator back, so the replay draws other "
            "random numbers: the loss is right, and the gradients belong to another forward.",
            remedy="Keep these calls by remat.region(..., recompute=False), or pass recompute_state_hooks that set "
            "the generators back: `export --to torch-remat` writes such a hook.",
        )  # fmt: skip


_REPLAYED = "replay_draws_again"


def _reaches(path: str, fqn: str) -> bool:
    """True if block `fqn` can draw from the generator at `path`: a generator of the block or of an ancestor."""
    owner = path.rpartition(".")[0]
    return path not in ("python", "numpy") and (is_within(owner, fqn) or is_within(fqn, owner))


POLICY_RULES: tuple[Rule, ...] = (
    dropout_redrawn, random_numbers_torch_does_not_stash, running_statistics, statistics_in_use, moved_buffers,
    hidden_state, moved_attributes, kept_cache, emptied_store, filled_inputs, changed_inputs, random_last, selective,
    never_called, segment_apart, unchecked_recompute, mode_flips, offload_without_device, checkpoints_itself,
    replay_draws_again,
)  # fmt: skip
