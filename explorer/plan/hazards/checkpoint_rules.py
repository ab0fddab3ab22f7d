"""Rules for policies that change gradients or state of a model, one rule for each trap. Pure: traits in, hazards out.

A rule is a row of the table at the end. What a row cannot say is a function, which stands in the table too.

Every rule has a test that runs a tiny model into its trap and out again: tests/engine/policy/test_hazards_shown.py.
Some traps show in no observed forward: a temperature that the training loop changes before backward. They have no rule
here; the comparison finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from explorer.plan.names import innermost, lineage, nearest_around, overlaps, some, written_results
from explorer.record.graph import Block, Hazard, ModelGraph, Trait
from explorer.record.policy import Action, Policy, Unit
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
        return tuple((unit, tuple(filter(None, map(by_fqn.get, unit.blocks)))) for unit in self.policy.units)

    @property
    def trains(self) -> bool:
        """True in train mode, in which dropout draws and running statistics move."""
        return self.spec is None or self.spec.mode == "train"

    @property
    def frozen(self) -> tuple[str, ...]:
        return () if self.spec is None else self.spec.frozen

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
            nearest = nearest_around(block.fqn, tops)
            if nearest is not None:
                stages[block.fqn] = tops[nearest]
        return stages


Rule = Callable[[Case], Iterator[Hazard]]
Blocks = Callable[[Case], tuple[str, ...]]


@dataclass(frozen=True)
class Trap:
    """A rule with one sentence, which fires if it finds `blocks` and its condition holds."""

    rule: str
    severity: Literal["error", "warning", "note"]
    blocks: Blocks
    sentence: str
    """`{blocks}` stands for the names of the blocks, `{schedule}` for the schedule of the plan."""
    remedy: str
    when: Callable[[Case], bool] = lambda case: True

    def __call__(self, case: Case) -> Iterator[Hazard]:
        if (blocks := self.blocks(case)) and self.when(case):
            schedule = case.plan.schedule_name if case.plan is not None else ""
            sentence = self.sentence.format(blocks=some(blocks), schedule=schedule)
            yield Hazard(rule=self.rule, severity=self.severity, blocks=blocks, sentence=sentence, remedy=self.remedy)


def rerun_with(trait: Trait) -> Blocks:
    """Innermost blocks with `trait` among those that run again: the ones a person can point at."""
    return lambda case: innermost(block.fqn for block in case.rerun if trait in block.traits)


def handed(trait: Trait) -> Blocks:
    """Blocks with `trait` that their unit begins with. What a unit is handed from outside is kept for its rerun."""
    return lambda case: tuple(block.fqn for _, named in case.units for block in named[:1] if trait in block.traits)


def handing_on(trait: Trait) -> Blocks:
    """Blocks with `trait` that their unit ends with."""
    return lambda case: tuple(block.fqn for _, named in case.units for block in named[-1:] if trait in block.traits)


def named_with(action: Action) -> Blocks:
    """Blocks of the units with `action`."""
    return lambda case: tuple(fqn for unit in case.policy.units if unit.action == action for fqn in unit.blocks)


def rerun_units(case: Case) -> tuple[str, ...]:
    """All blocks of the policy, if any block runs again."""
    return case.policy.blocks if case.rerun else ()


def in_training(case: Case) -> bool:
    return case.trains


RANDOM_OPS = ("bernoulli", "dropout", "rand", "normal", "uniform", "multinomial", "rrelu", "exponential")


def random_numbers_torch_does_not_stash(case: Case) -> Iterator[Hazard]:
    """torch stashes its own default generators only, whatever preserve_rng_state says."""
    registered = case.policy.restore_rng
    holders = [path.rpartition(".")[0] for path in registered if path not in ("python", "numpy")]
    generators = rerun_with("own_generator")(case)
    unnamed = tuple(fqn for fqn in generators if not overlaps(fqn, *holders))
    sources = (
        ("own-generator", unnamed, "a generator object of its own", "the dotted path of the generator, an attribute"),
        ("python-rng", rerun_with("python_rng")(case), "Python's random", "`python`"),
        ("numpy-rng", rerun_with("numpy_rng")(case), "numpy's global generator", "`numpy`"),
    )
    for rule, blocks, source, name in sources:
        if blocks and name.strip("`") not in registered:
            yield Hazard(
                rule=rule, severity="error", blocks=blocks,
                sentence=f"Random numbers in {some(blocks)} come from {source}, which torch does not set back: the "
                "recompute draws others.",
                remedy=f"Name {name} in the policy's restore_rng, or draw from torch's default generator.",
            )  # fmt: skip


def takes_from_outside(case: Case) -> tuple[str, ...]:
    """Blocks that take a stored tensor which their own unit did not store: the rerun stores its own again."""
    blocks: list[str] = []
    for unit, named in case.units:
        n_stored = 0
        for block in named if unit.action != "offload" else ():
            if "takes_stored" in block.traits:
                if not n_stored:
                    blocks.append(block.fqn)
                n_stored = max(n_stored - 1, 0)
            n_stored += "stores_tensors" in block.traits
    return tuple(blocks)


def never_called(case: Case) -> tuple[str, ...]:
    """Named blocks that did not run, without layers that LayerDrop left out beside others."""
    named = tuple(block for _, blocks in case.units for block in blocks if not block.n_calls)
    ran = {(block.parent, block.kind) for block in case.graph.blocks if block.n_calls and block.name.isdigit()}
    return tuple(block.fqn for block in named if (block.parent, block.kind) not in ran)


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


def checkpoints_itself(case: Case) -> Iterator[Hazard]:
    """Both runs of a comparison have it, so no comparison of policies can say anything of it."""
    blocks = tuple(block.fqn for block in case.graph.blocks if "checkpoints_itself" in block.traits)
    if not blocks or not case.trains:
        return
    twice = {fqn for fqn in case.policy.blocks if overlaps(fqn, *blocks)}
    again = f" The policy makes {some(tuple(sorted(twice)))} run a further time." if twice else ""
    yield Hazard(
        rule="checkpoints-itself", severity="warning", blocks=blocks,
        sentence=f"The model runs {some(blocks)} again for backward by itself, with a policy and without: a verdict "
        f"says nothing of that recompute, and a policy on these blocks frees little.{again}",
        remedy="Switch the model's own checkpointing off (gradient_checkpointing_disable() in transformers), and see "
        "with explorer.audit(model, step) whether it gives the same gradient.",
    )  # fmt: skip


POLICY_RULES: tuple[Rule, ...] = (
    Trap(
        "dropout-redrawn", "error", rerun_with("uses_rng"),
        "preserve_rng_state is off, so the recompute draws other random numbers than forward did, in {blocks}: the "
        "gradients belong to another forward.",
        "Switch preserve_rng_state on.",
        lambda case: case.trains and not case.policy.preserve_rng_state,
    ),
    random_numbers_torch_does_not_stash,
    Trap(
        "running-statistics", "error", rerun_with("running_statistics"),
        "Running statistics of {blocks} move at every forward, so twice a step: gradients stay equal, the model in "
        "eval mode does not.",
        "Set running_stats to once.",
        lambda case: case.trains and case.policy.running_stats == "every_forward",
    ),
    Trap(  # batch renormalisation and its kin
        "statistics-in-use", "error", rerun_with("reads_statistics"),
        "In training {blocks} computes with its running statistics and moves them; running it again finds them moved "
        "and computes with others.",
        "Keep these blocks.",
        in_training,
    ),
    Trap(  # spectral norm's power iteration, moving averages, load counters
        "moved-buffers", "error", rerun_with("moves_buffers"),
        "The forward of {blocks} changes a buffer that is not a running statistic; running it again starts from the "
        "changed one, and what reads the buffer computes another gradient.",
        "Keep these blocks, or skip the update while explorer.is_recomputing().",
        in_training,
    ),
    Trap(  # a module in a plain list or a closure: no policy can hold its running statistics still
        "hidden-state", "error", rerun_with("hidden_state"),
        "{blocks} calls a module that is not registered (it stands in a list or a closure) and whose buffers move at "
        "every forward, so twice a step.",
        "Register the module, in an nn.ModuleList say, or keep these blocks.",
        in_training,
    ),
    Trap(
        "moved-attributes", "warning", rerun_with("moves_attributes"),
        "The forward of {blocks} changes an attribute of the module (a counter, a kept loss, a cache); running it "
        "again starts from the changed one.",
        "Skip the update while explorer.is_recomputing(), or keep these blocks.",
    ),
    # Only lists and tensors from outside a unit matter: the rerun makes again what the unit itself makes.
    Trap(
        "kept-cache", "error", handed("keeps_cache"),
        "{blocks} reads a cache, list or dictionary that it is handed and that changes while or after it runs; running "
        "again finds another content, so shapes or values differ from forward.",
        "Train with use_cache=False, or recompute the block around it, which makes a new list.",
    ),
    Trap(
        "emptied-store", "error", takes_from_outside,
        "{blocks} takes a tensor out of an object that another block filled (a skip connection, stash and pop); "
        "running again finds it gone.",
        "Recompute the block around both, pass the tensor as an argument, or keep this block.",
    ),
    Trap(
        "filled-inputs", "warning", handed("fills_inputs"),
        "A list, dictionary or object that {blocks} is handed changes while or after it runs (a collection of losses, "
        "say); what the block adds is added again when it runs again.",
        "Return it instead, or skip the update while explorer.is_recomputing().",
    ),
    Trap(
        "changed-inputs", "error", handed("changes_inputs"),
        "A tensor that {blocks} is given is written into while or after the block runs, and it is what checkpointing "
        "keeps to run it again.",
        "Use the out-of-place operation, or start the unit one block earlier.",
    ),
    Trap(  # RReLU fills its noise after autograd packed it; early stop leaves the region before (pytorch 193671)
        "random-last", "error", handing_on("rng_last"),
        "The noise of RReLU at the end of {blocks} is filled in after early stop has left the block: backward reads "
        "uninitialized memory.",
        "Switch early_stop off, or end the unit one block later.",
        lambda case: case.trains and case.policy.stops_early,
    ),
    selective,
    Trap(
        "never-called", "warning", never_called,
        "The observed forward never calls {blocks} as a module: to name it has no effect, unless another forward does.",
        "Name its children, or the block around it.",
    ),
    segment_apart,
    Trap(
        "unchecked-recompute", "note", rerun_units,
        "determinism_check is off: a recompute that takes another branch gives wrong gradients without an error.",
        "Set determinism_check to default.",
        lambda case: case.policy.determinism_check == "none" and not case.policy.use_reentrant,
    ),
    Trap(
        "mode-flips", "warning",
        lambda case: innermost(block.fqn for block in case.rerun if block.uses_rng or block.running_statistics),
        "After model.eval() between forward and backward the recompute of {blocks} is in eval mode, and reentrant "
        "checkpointing does not notice.",
        "Call eval() after backward, or set use_reentrant to False, which raises.",
        lambda case: case.trains and case.policy.use_reentrant,
    ),
    Trap(
        "offload-without-device", "note", named_with("offload"),
        "Saved tensors of {blocks} are on the CPU already: offload only copies them.",
        "Choose recompute on the CPU, offload on a GPU.",
        lambda case: case.spec is not None and not case.on_cuda,
    ),
    checkpoints_itself,
    Trap(  # torch_remat has no preserve_rng_state. The loss is that of forward; only the gradients are of another one.
        "replay-draws-again", "error",
        lambda case: innermost(
            block.fqn for block in case.graph.blocks if block.uses_rng and "replay_draws_again" in block.traits
        ),
        "torch_remat runs {blocks} again and sets no generator back, so the replay draws other random numbers: the "
        "loss is right, and the gradients belong to another forward.",
        "Keep these calls by remat.region(..., recompute=False), or pass recompute_state_hooks that set the generators "
        "back: docs/torch-remat.md has such a hook.",
        in_training,
    ),
)  # fmt: skip
