"""The row of choices at the top of the pages that run something: model, size and options of the step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import streamlit as st

from explorer.plan.catalogue import Sample, default_size
from explorer.record.base import limits
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from explorer.ui.session import backend
from explorer.ui.session.bound import Bound, bound
from explorer.ui.session.devices import devices
from explorer.ui.session.plain import plain
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.draft import Draft
from explorer.ui.shared.readable import small
from explorer.view.text import explore as glossary

Argument = int | float | str | bool
Choose = Callable[[ModelRef], None]
Change = Callable[[str, Any], None]
"""Takes the name of an option and its new value."""
AS_BUILT = "as built"
SIZE_WIDTH = 110
MANY = 8
"""Count from which the numbers of a model stand in two columns."""
CHOICES: dict[str, tuple[Any, ...]] = {
    "dtype": ("own", "float32", "float64", "bfloat16", "float16"),
    "autocast": ("none", "bfloat16", "float16"),
    "optimizer": ("adamw", "sgd", "none"),
    "mode": ("train", "eval"),
}
NUMBERS = {name: limits(RunSpec, name) for name in ("n_accumulation", "n_repeats", "n_threads", "seed")}


def model_row(draft: Draft, choose: Choose, *, key: str) -> None:
    """Draws model, size, weights, arguments and options of the step. A change takes effect at once; only a new model
    starts a job, its description. `choose` takes another model; `key` differs from page to page.
    """
    spec, samples = draft.spec, backend.samples()
    graph = drafts.graph_of(draft)
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom", key=key):
        _model(spec.model, samples, choose)
        _arguments(spec.model, samples, choose)
        if not spec.model.is_recorded:
            _options(draft, graph, choose)
    if not spec.model.is_recorded:  # nothing can be changed of a step that was recorded elsewhere
        _changed_line(draft)


def _model(model: ModelRef, samples: tuple[Sample, ...], choose: Choose) -> None:
    """Model and size. Another model, or size, starts with the factory's own weights and usual arguments."""
    by_target = {sample.target: sample for sample in samples}
    targets = list(by_target)
    if model.target not in by_target:
        targets = [model.target, *targets]
    titles = {sample.target: sample.title.partition(":")[0] for sample in samples}
    shown = bound("model", model.target, lambda target: choose(_first_of(target, by_target)))
    st.selectbox(
        "Model",
        targets,
        targets.index(shown.value),
        format_func=lambda target: titles.get(target, target),
        help=_lesson(by_target.get(model.target)),
        **shown.wired,
    )
    sizes = _sizes(by_target.get(model.target))
    offered = sizes or [AS_BUILT]
    size = model.size or default_size(dict.fromkeys(offered)) or AS_BUILT
    chosen = bound("size", size, lambda size: choose(ModelRef(target=model.target, size=size)))
    st.selectbox(
        "Size",
        offered,
        offered.index(size) if size in offered else 0,
        disabled=not sizes,
        help=glossary.SIZE,
        width=SIZE_WIDTH,
        **chosen.wired,
    )


def _sizes(sample: Sample | None) -> list[str]:
    return list(sample.sizes) if sample else []


def _first_of(target: str, by_target: dict[str, Sample]) -> ModelRef:
    return ModelRef(target=target, size=next(iter(_sizes(by_target.get(target))), None))


def _lesson(sample: Sample | None) -> str:
    return f"{sample.title}\n\n{sample.lesson}\n\n{glossary.MODEL}" if sample else glossary.MODEL


def _arguments(model: ModelRef, samples: tuple[Sample, ...], choose: Choose) -> None:
    """The numbers that the factory takes, as the size sets them or as a person changed them."""
    sample = next((sample for sample in samples if sample.target == model.target), None)
    usual = sample.usual(model.size) if sample else {}
    chosen: dict[str, Any] = {}
    fields = {
        name: bound(f"argument_{name}", model.arguments.get(name, value), partial(chosen.__setitem__, name))
        for name, value in usual.items()
    }

    def use() -> None:
        for field in fields.values():
            field.on_change()
        now = {name: chosen.get(name, field.value) for name, field in fields.items()}
        changed = {name: value for name, value in now.items() if value != usual[name]}
        choose(msgspec.structs.replace(model, arguments=changed))

    with st.popover("Numbers", disabled=not usual, key="arguments", help="Batch and model numbers"):
        st.caption("Arguments of the model's factory. Using others describes and measures the model again.")
        with st.form("arguments_form", border=False):
            places = st.columns(2 if len(fields) > MANY else 1)
            for i, (name, field) in enumerate(fields.items()):
                with places[i % len(places)]:
                    _argument(name, usual[name], sample.arguments.choices.get(name, ()) if sample else (), field)
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
    with st.popover("Options", key="options", help="How the step is run"):
        run, recompute = st.columns(2, gap="medium")
        with run:
            st.markdown("**The step**")
            _weights(spec.model, choose)
            _predict(draft)
            if not draft.predict:
                _choice("device", spec.device, devices(spec.device), change)
            for name, offered in CHOICES.items():
                own = f"own ({graph.dtype})" if graph and name == "dtype" else "own"
                _choice(name, getattr(spec, name), offered, change, own=own)
            if spec.optimizer == "sgd":
                _number("momentum", spec.momentum, (*limits(RunSpec, "momentum"), 0.1), change)
            for name, (low, high) in NUMBERS.items():
                _number(name, getattr(spec, name), (low, high, 1), change)
        with recompute:
            st.markdown("**Recomputing**")
            _policy_options(spec.policy, change)
            st.markdown("**Not trained**")
            _frozen(spec, graph, change)


def _predict(draft: Draft) -> None:
    now = bound("option_predict", draft.predict, lambda on: drafts.set_predict(draft, on=on))
    st.toggle("predict", now.value, help=glossary.OPTIONS["predict"], **now.wired)


def _weights(model: ModelRef, choose: Choose) -> None:
    """Draws the choice of a weights file among the files named at the start of the app."""
    offered = ["", *backend.weights()]
    if len(offered) == 1:
        return
    now = bound("weights", model.weights, lambda file: choose(msgspec.structs.replace(model, weights=file)))
    st.selectbox(
        "weights",
        offered,
        offered.index(now.value) if now.value in offered else 0,
        format_func=lambda file: Path(file).name if file else AS_BUILT,
        help=glossary.WEIGHTS,
        **now.wired,
    )


def _changed_options(draft: Draft) -> tuple[str, ...]:
    """`dtype float64`: options that differ from the default. Options of the step stay from model to model."""
    spec = draft.spec
    usual = RunSpec(model=spec.model)
    of_model = ["predict on"] if draft.predict else []
    of_model += [f"weights {Path(spec.model.weights).name}"] if spec.model.weights else []
    names = ("device", *CHOICES, *NUMBERS, "momentum", "frozen")
    of_step = [
        f"{name} {_in_words(getattr(spec, name))}" for name in names if getattr(spec, name) != getattr(usual, name)
    ]
    options = [name for name in Policy.__struct_fields__ if name != "units"]
    return (
        *of_model,
        *of_step,
        *(
            f"{name} {_in_words(getattr(spec.policy, name))}"
            for name in options
            if getattr(spec.policy, name) != getattr(usual.policy, name)
        ),
    )


def _changed_line(draft: Draft) -> None:
    """Names the changed options, beside the closed popover that holds them."""
    if changed := _changed_options(draft):
        small(f":orange-badge[:material/tune: changed options] {plain(', '.join(changed))}")


def _in_words(value: Any) -> str:
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else _joined(value)


def _joined(value: Any) -> str:
    return " and ".join(value) if isinstance(value, tuple) else str(value)


def _choice(name: str, value: Any, offered: tuple[Any, ...], change: Change, *, own: str = "own") -> None:
    """`own`: how the choice of that name reads, the model's own number format."""
    shown = bound(f"option_{name}", value, partial(change, name))
    st.selectbox(
        name,
        offered,
        offered.index(value),
        format_func=lambda choice: own if choice == "own" else choice,
        help=glossary.OPTIONS[name],
        **shown.wired,
    )


def _number(name: str, value: float, limits: tuple[float, float, float], change: Change) -> None:
    shown = bound(f"option_{name}", value, partial(change, name))
    low, high, step = limits
    st.number_input(
        name,
        low,
        high,
        value,
        step,
        help=glossary.OPTIONS[name],
        **shown.wired,
    )


def _frozen(spec: RunSpec, graph: ModelGraph | None, change: Change) -> None:
    known = [block.fqn for block in graph.blocks if block.fqn and block.parameter_bytes] if graph else spec.frozen
    shown = bound(
        "option_frozen", [fqn for fqn in spec.frozen if fqn in known], lambda fqns: change("frozen", tuple(fqns))
    )
    st.multiselect(
        "frozen",
        known,
        shown.value,
        help=glossary.OPTIONS["frozen"],
        **shown.wired,
    )


def _policy_options(policy: Policy, change: Change) -> None:
    """torch.utils.checkpoint's options under torch's names."""

    def switch(name: str, value: bool, take: Callable[[bool], None]) -> None:
        shown = bound(f"option_{name}", value, take)
        st.toggle(name, shown.value, help=glossary.OPTIONS[name], **shown.wired)

    for name in ("preserve_rng_state", "early_stop", "use_reentrant"):
        switch(name, getattr(policy, name), partial(change, name))
    checked = policy.determinism_check == "default"
    switch("determinism_check", checked, lambda on: change("determinism_check", "default" if on else "none"))
    _choice("running_stats", policy.running_stats, ("once", "every_forward"), change)
