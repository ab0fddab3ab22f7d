"""The row of choices at the top of the pages that run something: model, size and options of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import streamlit as st
from msgspec.structs import replace

from explorer.plan.card.allocator_options import OFFERED_OPTIONS, split_options
from explorer.plan.card.cards import CARDS
from explorer.plan.catalogue import Sample
from explorer.record.base import Record, limits
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.policy import Policy
from explorer.record.run import DataParallel, Ranks, RunSpec
from explorer.ui.session import backend
from explorer.ui.session.values import Bound, bound, select
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.draft import Draft
from explorer.ui.shared.elements import escape, fold, horizontal, small_text
from explorer.view.drawing.units import mib
from explorer.view.text import explore as glossary

Argument = int | float | str | bool
Choose = Callable[[ModelRef], None]
Change = Callable[[str, Any], None]
"""Takes the name of an option and its new value."""
AS_BUILT = "as built"
NO_CARD = "no card"
SIZE_WIDTH = 110
CHOICES: dict[str, tuple[Any, ...]] = {
    "dtype": ("own", "float32", "float64", "bfloat16", "float16"),
    "autocast": ("none", "bfloat16", "float16"),
    "optimizer": ("adamw", "sgd", "adamw8bit", "none"),
    "mode": ("train", "eval"),
}
SPLITS: dict[str, tuple[DataParallel, bool]] = {
    "FSDP2": ("fsdp", True),
    "FSDP2 without resharding": ("fsdp", False),
    "DDP": ("ddp", True),
    "tensor parallel": ("none", True),
}
"""How ranks share a step: `Ranks.data` and `Ranks.reshard`, by name."""
NUMBERS = {name: limits(RunSpec, name) for name in ("n_accumulation", "n_repeats", "n_threads", "seed")}


def model_row(draft: Draft, choose: Choose, *, key: str) -> None:
    """Draws model, size, weights, arguments and options of the step. A change takes effect at once; only a new model
    starts a job, its description. `choose` takes another model; `key` differs from page to page.
    """
    spec, graph = draft.spec, drafts.graph_of(draft)
    with horizontal(key, align="bottom"):
        _model(spec.model, choose)
        with st.popover("Options", icon=":material/settings:", key="options", help="The model's numbers, the step"):
            _lesson(backend.sample_of(spec.model))
            _arguments(spec.model, choose)
            if not spec.model.is_recorded:
                _options(draft, graph, choose)
    # Named beside the closed popover that holds them; nothing can be changed of a step that was recorded elsewhere.
    if not spec.model.is_recorded and (changed := _changed_options(draft)):
        small_text(f":orange-badge[:material/tune: changed options] {escape(', '.join(changed))}")


def _model(model: ModelRef, choose: Choose) -> None:
    """Model and size. Another model, or size, starts with the factory's own weights and usual arguments."""
    by_target = {sample.target: sample for sample in backend.samples()}
    targets = list(by_target)
    if model.target not in by_target:
        targets = [model.target, *targets]
    titles = {target: sample.title.partition(":")[0] for target, sample in by_target.items()}
    target = bound("model", model.target, lambda target: choose(backend.in_default_size(ModelRef(target=target))))
    bare: dict[str, Any] = {"label_visibility": "collapsed"}
    select("Model", targets, target, format_func=lambda target: titles.get(target, target), **bare)
    sizes = list(by_target[model.target].sizes) if model.target in by_target else []
    offered = sizes or [AS_BUILT]
    size = backend.in_default_size(model).size or AS_BUILT
    field = bound("size", size, lambda size: choose(ModelRef(target=model.target, size=size)))
    select("Size", offered, field, disabled=not sizes, width=SIZE_WIDTH, **bare)


def _lesson(sample: Sample | None) -> None:
    """What the model is good for, and which models and sizes there are."""
    if sample:
        st.markdown(f"**{sample.title}**")
        for paragraph in sample.lesson.split("\n\n"):
            small_text(paragraph)
    small_text(f"{glossary.MODEL} {glossary.SIZE}")


def _arguments(model: ModelRef, choose: Choose) -> None:
    """The numbers of the model, folded in; nothing of a model without any."""
    sample = backend.sample_of(model)
    if sample is not None and sample.usual(model.size):
        with fold("Numbers of the model", key="arguments"):
            st.caption("Arguments of the model's factory. Using others describes and measures the model again.")
            arguments_form(sample, model, choose, key="argument")


def arguments_form(sample: Sample, model: ModelRef, choose: Choose, *, key: str) -> None:
    """The numbers that the factory takes, as the size sets them or as a person changed them."""
    usual, chosen = sample.usual(model.size), dict[str, Any]()
    fields = {
        name: bound(f"{key}_{name}", model.arguments.get(name, value), partial(chosen.__setitem__, name))
        for name, value in usual.items()
    }

    def use() -> None:
        for field in fields.values():
            field.on_change()
        now = {name: chosen.get(name, field.value) for name, field in fields.items()}
        needed = {name: value for name, value in model.arguments.items() if name not in usual}
        changed = {name: value for name, value in now.items() if value != usual[name]}
        choose(replace(model, arguments=needed | changed))

    with st.form(f"{key}s_form", border=False):
        columns = st.columns(2)
        for i, (name, field) in enumerate(fields.items()):
            with columns[i % len(columns)]:
                _argument(name, usual[name], sample.arguments.choices.get(name, ()), field)
        st.form_submit_button("Use these", icon=":material/check:", on_click=use)


def _argument(name: str, usual: Argument, choices: tuple[str, ...], field: Bound) -> None:
    """Draws an argument. Non-negative numbers stay so, dropout is at most 1; the factory checks the rest."""
    value = field.value
    if choices:
        st.selectbox(name, choices, choices.index(value) if value in choices else 0, key=field.key)
    elif isinstance(usual, bool):
        st.checkbox(name, value, key=field.key)
    elif isinstance(usual, int):
        st.number_input(name, 0 if min(usual, value) >= 0 else None, value=int(value), step=1, key=field.key)
    elif isinstance(usual, float):
        low = 0.0 if min(usual, value) >= 0 else None
        high = 1.0 if "drop" in name and max(usual, value) <= 1 else None
        st.number_input(name, low, high, value=float(value), format="%g", key=field.key)
    else:
        st.text_input(name, field.value, key=field.key)


def _options(draft: Draft, graph: ModelGraph | None, choose: Choose) -> None:
    """Draws the options of the step and of the recompute."""
    spec, change = draft.spec, partial(drafts.set_option, draft, graph)
    run, recompute = st.columns(2, gap="medium")
    with run:
        st.markdown("**The step**")
        _weights(spec.model, choose)
        _toggle("predict", draft.predict, lambda on: drafts.set_predict(draft, on=on))
        _card(draft)
        _ranks(draft)
        if not draft.predict:
            _choice("device", spec.device, backend.devices(spec.device), change)
        for name, offered in CHOICES.items():
            _choice(name, getattr(spec, name), offered, change)
        if spec.optimizer == "sgd":
            _number("momentum", spec.momentum, (*limits(RunSpec, "momentum"), 0.1), change)
        for name, (low, high) in NUMBERS.items():
            _number(name, getattr(spec, name), (low, high, 1), change)
    with recompute:
        st.markdown("**Recomputing**")
        _policy_options(spec.policy, change)
        st.markdown("**Not trained**")
        _frozen(spec, graph, change)


def _weights(model: ModelRef, choose: Choose) -> None:
    """Draws the choice of a weights file among the files named at the start of the app."""
    offered = ["", *backend.weights()]
    if len(offered) == 1:
        return
    field = bound("weights", model.weights, lambda file: choose(replace(model, weights=file)))
    select("weights", offered, field, format_func=lambda file: Path(file).name or AS_BUILT, help=glossary.WEIGHTS)


def _card(draft: Draft) -> None:
    """Draws the choice of a card: one by name, or a size that is typed."""
    card = draft.spec.card
    bare = None if card is None else replace(card, options="", cublas="")
    name = "" if bare is None else next((key for key, listed in CARDS.items() if listed == bare), bare.name)
    offered = list(dict.fromkeys(["", *CARDS, name]))
    field = bound("option_card", name, partial(drafts.set_card, draft))
    titles = {"": NO_CARD} | {key: f"{listed.name}, {mib(listed.total_bytes)}" for key, listed in CARDS.items()}
    select(
        "predict for",
        offered,
        field,
        format_func=lambda key: titles.get(key, key),
        accept_new_options=True,
        help=glossary.OPTIONS["card"],
    )
    if card is None:
        return
    chosen = split_options(card.options)
    field = bound("option_allocator", chosen, partial(drafts.set_allocator, draft))
    st.multiselect(
        "allocator",
        list(dict.fromkeys([*OFFERED_OPTIONS, *chosen])),
        field.value,
        accept_new_options=True,
        placeholder="torch's defaults",
        help=glossary.OPTIONS["allocator"],
        **field.wired,
    )


def _ranks(draft: Draft) -> None:
    """Draws the number of ranks, and the way in which they share the step."""
    ranks = draft.spec.ranks or Ranks(n_ranks=1)
    way = next(
        name
        for name, (data, reshard) in SPLITS.items()
        if data == ranks.data and (reshard == ranks.reshard or data != "fsdp")
    )

    def take(**changed: Any) -> None:
        new = replace(ranks, parallelize="", **changed)
        if new.data != "fsdp":
            new = replace(new, n_tensor=new.n_ranks if new.data == "none" else 1)
        drafts.set_ranks(draft, new if new.n_ranks > 1 else None)

    def take_split(name: str) -> None:
        data, reshard = SPLITS[name]
        take(data=data, reshard=reshard)

    number = bound("option_ranks", ranks.n_ranks, lambda n: take(n_ranks=n))
    st.number_input("ranks", *limits(Ranks, "n_ranks"), number.value, 1, help=glossary.OPTIONS["ranks"], **number.wired)
    if draft.spec.ranks is None:
        return
    split = bound("option_split", way, take_split)
    select("shared by", list(SPLITS), split, help=glossary.OPTIONS["split"])
    if ranks.data == "fsdp":
        tensor = bound("option_n_tensor", ranks.n_tensor, lambda n: take(n_tensor=n))
        most = limits(Ranks, "n_tensor")[1]
        st.number_input(
            "tensor-parallel ranks", 1, most, tensor.value, 1, help=glossary.OPTIONS["n_tensor"], **tensor.wired
        )


def _changed_options(draft: Draft) -> list[str]:
    """`dtype float64`: options that differ from the default. Options of the step stay from model to model."""
    spec = draft.spec
    usual = RunSpec(model=spec.model)
    of_model = ["predict on"] if draft.predict else []
    of_model += [f"for {spec.card.name}"] if spec.card is not None else []
    of_model += [f"with {spec.card.options}"] if spec.card is not None and spec.card.options else []
    of_model += [spec.ranks.in_words] if spec.ranks is not None else []
    of_model += [f"weights {Path(spec.model.weights).name}"] if spec.model.weights else []
    of_step = ("device", *CHOICES, *NUMBERS, "momentum", "frozen")
    of_policy = [name for name in Policy.__struct_fields__ if name != "units"]
    return of_model + _differing(spec, usual, of_step) + _differing(spec.policy, usual.policy, of_policy)


def _differing(options: Record, usual: Record, names: Iterable[str]) -> list[str]:
    values = ((name, getattr(options, name)) for name in names)
    return [f"{name} {_in_words(value)}" for name, value in values if value != getattr(usual, name)]


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " and ".join(value) if isinstance(value, tuple) else str(value)


def _choice(name: str, value: Any, offered: tuple[Any, ...], change: Change) -> None:
    field = bound(f"option_{name}", value, partial(change, name))
    select(name, offered, field, help=glossary.OPTIONS[name])


def _number(name: str, value: float, limits: tuple[float, float, float], change: Change) -> None:
    field = bound(f"option_{name}", value, partial(change, name))
    low, high, step = limits
    st.number_input(name, low, high, value, step, help=glossary.OPTIONS[name], **field.wired)


def _toggle(name: str, value: bool, take: Callable[[bool], None]) -> None:
    field = bound(f"option_{name}", value, take)
    st.toggle(name, field.value, help=glossary.OPTIONS[name], **field.wired)


def _frozen(spec: RunSpec, graph: ModelGraph | None, change: Change) -> None:
    blocks = [block.fqn for block in graph.blocks if block.fqn and block.parameter_bytes] if graph else spec.frozen
    frozen = [fqn for fqn in spec.frozen if fqn in blocks]
    field = bound("option_frozen", frozen, lambda fqns: change("frozen", tuple(fqns)))
    st.multiselect("frozen", blocks, field.value, help=glossary.OPTIONS["frozen"], **field.wired)


def _policy_options(policy: Policy, change: Change) -> None:
    """torch.utils.checkpoint's options under torch's names."""
    for name in ("preserve_rng_state", "early_stop", "use_reentrant"):
        _toggle(name, getattr(policy, name), partial(change, name))
    checked = policy.determinism_check == "default"
    _toggle("determinism_check", checked, lambda on: change("determinism_check", "default" if on else "none"))
    _choice("running_stats", policy.running_stats, ("once", "every_forward"), change)
