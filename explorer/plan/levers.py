"""Levers that lower the peak of a step: how each changes the step, and how rows of them rank.

Nothing here computes the bytes of a lever. engine/compare/fit.py plays each changed step and judges it by real steps.
`lever_text.py` has their words and lines for a script; `summary.py` the changes of a recorded step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple, get_args

from msgspec.structs import replace

from explorer.errors import BadInput
from explorer.plan import budget_text
from explorer.plan.card.cards import LARGEST_CARD, capacity_bytes
from explorer.plan.card.step_on_card import memory_on
from explorer.plan.planners.confirm import within_bytes
from explorer.record.card import Card
from explorer.record.fit import Effect, Fit, LeverRow, PlayedStep
from explorer.record.graph import Lora
from explorer.record.measurement import Measurement
from explorer.record.plan import Wish
from explorer.record.policy import Policy, Unit
from explorer.record.run import RunSpec

RECOMPUTE, OFFLOAD = "recompute", "offload"
ATTENTION = "attn_implementation"
"""Argument of a factory, and setting of a Hugging Face configuration, that chooses the attention."""
SDPA = "sdpa"
SEGMENTS, MAX_SPLIT = "expandable_segments", "max_split_size_mb"
ALLOCATOR = {SEGMENTS: "True", MAX_SPLIT: "128"}
"""Settings of CUDA's allocator that lower what is reserved between blocks, and their values."""
BUDGETS = "Give a size or a share of the peak of the step as it is, such as 8GiB or 70%."
POLICIES = (RECOMPUTE, OFFLOAD)
"""Levers that set the policy of a step: a combination adds recompute by itself."""
EFFECTS: tuple[Effect, ...] = get_args(Effect)


class Parts(NamedTuple):
    """What levers change of a model."""

    has_attention: bool = False
    """Whether the model has the switch ATTENTION."""
    all_but_last: tuple[str, ...] = ()
    """fqns of blocks and parameters that hold all parameters but those of the last layer."""
    linears: str = ""
    """Regular expression of the Linear layers but the last; empty: there are none."""
    last: str = ""
    """fqn of the last layer, if its output is that of the model."""
    logits_text: str = ""
    """The line that calls the last layer, or why its output cannot be made in chunks."""
    blocks: tuple[str, ...] = ()
    """fqns of the outermost modules that are called."""


_FORMS = ("adamw", "sgd")
"""Optimizers of torch, with its forms."""


class Lever(NamedTuple):
    """A change of a step. `change` returns None for a step that the lever does not change."""

    key: str
    group: str
    """Of a group, a combination has one lever at most."""
    title: str
    change: Callable[[RunSpec, Parts], RunSpec | None]
    line: str
    """For the user's script. Words in braces are those of the changed step, see `script_lines`."""


def _for_loop(spec: RunSpec, parts: Parts) -> RunSpec | None:
    default_is_foreach = spec.optimizer_form == "default" and (spec.card is not None or spec.device == "cuda")
    if spec.optimizer not in _FORMS or not (default_is_foreach or spec.optimizer_form == "foreach"):
        return None
    return replace(spec, optimizer_form="for-loop")


def _fused(spec: RunSpec, parts: Parts) -> RunSpec | None:
    if spec.optimizer not in _FORMS or spec.optimizer_form == "fused":
        return None
    return replace(spec, optimizer_form="fused")


def _sgd(spec: RunSpec, parts: Parts) -> RunSpec | None:
    return replace(spec, optimizer="sgd") if spec.optimizer == "adamw" else None


def _adamw_8bit(spec: RunSpec, parts: Parts) -> RunSpec | None:
    return replace(spec, optimizer="adamw8bit") if spec.optimizer == "adamw" else None


def _accumulate(spec: RunSpec, parts: Parts) -> RunSpec | None:
    return replace(spec, n_accumulation=2 * spec.n_accumulation)


def _autocast(spec: RunSpec, parts: Parts) -> RunSpec | None:
    return replace(spec, autocast="bfloat16") if _is_float32(spec) else None


def _bfloat16(spec: RunSpec, parts: Parts) -> RunSpec | None:
    return replace(spec, dtype="bfloat16") if _is_float32(spec) else None


def _is_float32(spec: RunSpec) -> bool:
    return spec.autocast == "none" and spec.dtype in ("own", "float32")


def _attention(spec: RunSpec, parts: Parts) -> RunSpec | None:
    arguments = spec.model.arguments
    if not parts.has_attention or arguments.get(ATTENTION) == SDPA:
        return None
    return replace(spec, model=replace(spec.model, arguments={**arguments, ATTENTION: SDPA}))


def _lora(spec: RunSpec, parts: Parts) -> RunSpec | None:
    if spec.lora is not None or spec.frozen or not parts.linears:
        return None
    return replace(spec, lora=Lora(targets=parts.linears))


def _qlora(spec: RunSpec, parts: Parts) -> RunSpec | None:
    if spec.lora is not None and spec.lora.quantize == "none":
        return replace(spec, lora=replace(spec.lora, quantize="nf4"))
    changed = _lora(spec, parts)
    return None if changed is None else replace(changed, lora=Lora(targets=parts.linears, quantize="nf4"))


def _freeze(spec: RunSpec, parts: Parts) -> RunSpec | None:
    if spec.lora is not None or spec.frozen or not parts.all_but_last:
        return None
    return replace(spec, frozen=parts.all_but_last)


def _setting(name: str, spec: RunSpec, parts: Parts) -> RunSpec | None:
    card = spec.card
    if card is None or name in card.options:
        return None
    options = ",".join(filter(None, (card.options, f"{name}:{ALLOCATOR[name]}")))
    return replace(spec, card=replace(card, options=options))


def _chunks(spec: RunSpec, parts: Parts) -> RunSpec | None:
    return replace(spec, chunked_layer=parts.last) if parts.last and not spec.chunked_layer else None


def _offload(spec: RunSpec, parts: Parts) -> RunSpec | None:
    units = tuple(Unit(blocks=(fqn,), action="offload") for fqn in parts.blocks)
    return replace(spec, policy=Policy(units=units)) if units and not spec.policy.units else None


OPTIMIZER = "optimizer = {optimizer}"
PEFT = (
    'model = peft.get_peft_model(model, peft.LoraConfig(r={rank}, target_modules=r"{targets}"), '
    "autocast_adapter_dtype=False)"
)
SETTINGS = 'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "{options}"  # before torch is imported'
LEVERS = (
    Lever(SEGMENTS, "allocator", "allocator with expandable segments", partial(_setting, SEGMENTS), SETTINGS),
    Lever(
        MAX_SPLIT, "allocator", "allocator that splits no block from 128 MiB", partial(_setting, MAX_SPLIT), SETTINGS
    ),
    Lever(
        OFFLOAD,
        OFFLOAD,
        "activations offloaded to the host",
        _offload,
        "# {host}\nexplorer.apply_policy(model, {policy})",
    ),
    Lever("foreach", "optimizer", "optimizer with foreach=False", _for_loop, OPTIMIZER),
    Lever("fused", "optimizer", "optimizer with fused=True", _fused, OPTIMIZER),
    Lever("sgd", "optimizer", "SGD instead of AdamW", _sgd, OPTIMIZER),
    Lever("adamw8bit", "optimizer", "AdamW with moments in 8 bits", _adamw_8bit, OPTIMIZER),
    Lever(
        "accumulate",
        "batch",
        "half the batch, accumulated twice",
        _accumulate,
        "for part in batch.chunk({n}): (loss_of(model, part) / {n}).backward()",
    ),
    Lever(
        "autocast",
        "precision",
        "bfloat16 by autocast",
        _autocast,
        'with torch.autocast("{device}", dtype=torch.bfloat16): loss = loss_of(model, batch)',
    ),
    Lever(
        "dtype",
        "precision",
        "bfloat16 weights and state",
        _bfloat16,
        "model = model.to(torch.bfloat16)\n"
        "batch = [t.bfloat16() if t.is_floating_point() else t for t in batch]  # inputs and targets of each step",
    ),
    Lever(
        "attention",
        "attention",
        "attention by scaled_dot_product_attention",
        _attention,
        f'model = {{factory}}{ATTENTION}="{SDPA}")',
    ),
    Lever(
        "chunks",
        "loss",
        "loss over 8 chunks of the batch",
        _chunks,
        "loss = sum(checkpoint(lambda x, t: len(x) / len(targets) * loss_function(model.get_submodule({last!r})(x), t)"
        ", x, t, use_reentrant=False) for x, t in zip(hidden.chunk(8), targets.chunk(8)))"
        "  # hidden: the input of {last}\n"
        "del hidden  # else it is held through backward",
    ),
    Lever("lora", "trained", "LoRA of rank 8, the model frozen", _lora, PEFT),
    Lever(
        "qlora",
        "trained",
        "QLoRA: LoRA beside Linear layers in four bits",
        _qlora,
        "{four_bits}\n" + PEFT,
    ),
    Lever(
        "freeze",
        "trained",
        "all but the last layer frozen",
        _freeze,
        'for name, p in model.named_parameters(): p.requires_grad &= not f"{{name}}.".startswith({frozen})',
    ),
)
BY_KEY = {lever.key: lever for lever in LEVERS}


def levers_for(spec: RunSpec, parts: Parts) -> Iterator[tuple[Lever, RunSpec]]:
    """The levers that change the step of `spec`, and the changed steps."""
    for lever in LEVERS:
        changed = lever.change(spec, parts)
        if changed is not None:
            yield lever, changed


def under(spec: RunSpec, keys: Iterable[str], parts: Parts, policy: Policy | None = None) -> RunSpec:
    """The step of `spec` under several levers, and under `policy` if one of them recomputes."""
    for key in keys:
        if key == RECOMPUTE:
            assert policy is not None, "recomputing needs a policy"
            spec = replace(spec, policy=policy)
        else:
            spec = BY_KEY[key].change(spec, parts) or spec
    return spec


def check_budget(text: str) -> Wish:
    """How `text` is read before a step is played. Raises BadInput for what limits no memory, or time too."""
    wish = budget_text.check_budget(text)
    if wish.more_time is not None:
        raise BadInput(f"fit takes a limit of memory, and {text!r} limits time.", hint=BUDGETS)
    return wish


def budget_bytes_of(budget: str | int | None, run: Measurement, card: Card | None) -> int | None:
    """Bytes of a budget of the step of `run`, which keeps everything; None for the card alone, or no budget.

    Raises BadInput for a budget that `fit` does not take, or that the step or its machine cannot answer.
    """
    if budget is None or isinstance(budget, int):
        return budget
    if check_budget(budget).card and card is not None:
        return None
    try:
        return budget_text.parse_budget(budget, run.step_peak_bytes or 0, run).budget_bytes
    except BadInput as error:
        raise BadInput(error.sentence, hint=BUDGETS) from None


def limit_of(run: Measurement, card: Card | None, budget_bytes: int | None) -> int:
    """The lowest of the budget and the card; without both, the memory of the machine."""
    bounds = [] if budget_bytes is None else [budget_bytes]
    bounds += [] if card is None else [capacity_bytes(card)]
    return min(bounds, default=run.environment.total_memory_bytes or run.step_peak_bytes or 0)


def played_step(run: Measurement, limit_bytes: int, first: Measurement | None = None) -> PlayedStep:
    """The figures of `run` for a row. `first`: the step before it, as for `memory_on`."""
    card, memory = run.spec.card, None
    if card is not None:  # a refused step has no peak of its own
        memory = memory_on(replace(card, total_bytes=LARGEST_CARD, taken_bytes=0), run, first, others=())
    return PlayedStep(
        spec=run.spec,
        step_peak_bytes=run.step_peak_bytes or 0,
        allocated_bytes=None if memory is None else memory.allocated_bytes,
        reserved_bytes=None if memory is None else memory.reserved_bytes,
        total_flops=run.total_flops,
        fits=within_bytes(run, limit_bytes),
        host_peak_bytes=run.peaks.offloaded_peak_bytes,
    )


def price(step: PlayedStep, as_is: PlayedStep) -> float:
    """Counted FLOPs over those of the step as it is; infinite if they are not counted."""
    if step.total_flops is None or not as_is.total_flops:
        return math.inf
    return step.total_flops / as_is.total_flops


def severity(row: LeverRow) -> int:
    """Place of the row's effect on gradients, 0 for bitwise equal."""
    return EFFECTS.index(row.judgement.effect)


def ranked(rows: Iterable[LeverRow], as_is: PlayedStep) -> tuple[LeverRow, ...]:
    """Rows that fit first; then by price; at equal price by the effect on gradients, then by bytes.

    Offload comes last of both kinds: the time of its copies is an interval, and recompute may lie in it.
    Prices are equal below a tenth of a percent. A lever that saves FLOPs, as frozen parameters do, costs nothing.
    """

    def key(row: LeverRow) -> tuple[bool, bool, float, int, int, tuple[str, ...], float]:
        exact = price(row.step, as_is)
        return (
            not row.step.fits,
            row.levers == (OFFLOAD,),
            round(max(1.0, exact), 3),
            severity(row),
            row.step.needed_bytes,
            row.levers,
            exact,  # else the order of play would decide
        )

    return tuple(sorted(rows, key=key))


def undominated(rows: Sequence[LeverRow], as_is: PlayedStep) -> tuple[LeverRow, ...]:
    """`rows` without rows that another row beats in price or gradients and equals in the other.

    Of rows that are equal in both, the row with the fewest levers stays, then the row with the lowest peak.
    """
    best: list[LeverRow] = []
    order = sorted(
        rows, key=lambda row: (price(row.step, as_is), severity(row), len(row.levers), row.step.needed_bytes)
    )
    for row in order:
        if not best or severity(row) < min(map(severity, best)):
            best.append(row)
    return tuple(best)


def combinations(rows: Iterable[LeverRow], as_is: PlayedStep) -> list[tuple[LeverRow, ...]]:
    """Sets of single levers with at most one of a group, the mildest first, then the smallest.

    A lever that alone saves nothing may save bytes where recompute has moved the peak, into the optimizer for example.
    Within a group, a lever is left out if another saves as many bytes at no higher price and no worse gradients.
    """
    saving = [row for row in rows if row.step.needed_bytes <= as_is.needed_bytes and row.levers[0] not in POLICIES]
    groups: dict[str, list[LeverRow]] = {}
    for row in saving:
        groups.setdefault(BY_KEY[row.levers[0]].group, []).append(row)
    options = [[None, *_not_beaten(group, as_is)] for group in groups.values()]
    sets = [tuple(filter(None, chosen)) for chosen in product(*options)]
    return sorted(filter(None, sets), key=lambda chosen: (_worst(chosen), len(chosen)))


def is_beaten(chosen: Sequence[LeverRow], fitting: Iterable[LeverRow], as_is: PlayedStep) -> bool:
    """Whether a row that fits is as mild as the levers of `chosen` together, and costs less than they can cost.

    Recompute only adds FLOPs. Levers together save no larger share of FLOPs than each saves of what the others leave.
    """
    least = math.prod(min(1.0, price(row.step, as_is)) for row in chosen)
    return any(price(row.step, as_is) < least and severity(row) <= _worst(chosen) for row in fitting)


def _worst(chosen: Iterable[LeverRow]) -> int:
    return max(map(severity, chosen))


def _not_beaten(group: Sequence[LeverRow], as_is: PlayedStep) -> list[LeverRow]:
    def figures(row: LeverRow) -> tuple[float, int, int]:
        return price(row.step, as_is), severity(row), row.step.needed_bytes

    def beats(other: LeverRow, row: LeverRow) -> bool:
        no_worse = all(left <= right for left, right in zip(figures(other), figures(row)))
        return no_worse and (figures(other) != figures(row) or group.index(other) < group.index(row))

    def is_beaten(row: LeverRow) -> bool:
        return any(beats(other, row) for other in group)

    return [row for row in group if not is_beaten(row)]


def bitwise_only(fit: Fit) -> Fit:
    """`fit` without rows whose gradients are not bitwise equal, or were not judged."""
    rows = tuple(row for row in fit.rows if row.judgement.effect == "bitwise")
    combined = tuple(row for row in fit.combinations if row.judgement.effect == "bitwise")
    return replace(fit, rows=rows, combinations=combined)
