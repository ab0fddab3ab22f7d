"""Which model, how large, and how it is run: a RunSpec in, a RunSpec out."""

from __future__ import annotations

from typing import Any

import msgspec
import streamlit as st

from explorer.plan.catalogue import Sample
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from explorer.ui import glossary
from explorer.ui.bound import show

Argument = int | float | str | bool
AS_BUILT = "as built"
SIZE_WIDTH = 110
CHOICES: dict[str, tuple[Any, ...]] = {
    "device": ("cpu", "cuda"),
    "dtype": ("float32", "float64", "bfloat16", "float16"),
    "autocast": ("none", "bfloat16", "float16"),
    "optimizer": ("adamw", "sgd", "none"),
    "mode": ("train", "eval"),
}
NUMBERS = {"n_accumulation": (1, 64), "n_repeats": (1, 50), "n_threads": (1, 64), "seed": (0, 2**31 - 1)}


def model_panel(spec: RunSpec, samples: tuple[Sample, ...]) -> ModelRef:
    """Model and size. Another model starts with its first size and the factory's usual arguments."""
    by_target = {sample.target: sample for sample in samples}
    targets = list(by_target)
    if spec.model.target not in by_target:
        targets = [spec.model.target, *targets]
    target = st.selectbox(
        "Model",
        targets,
        key=show("model", spec.model.target),
        format_func=lambda target: by_target[target].title.partition(":")[0] if target in by_target else target,
        help=_lesson(by_target.get(spec.model.target)),
    )
    sizes = list(by_target[target].sizes) if target in by_target else []
    if target != spec.model.target:
        return ModelRef(target=target, size=sizes[0] if sizes else None)
    size = st.selectbox(
        "Size",
        sizes or [AS_BUILT],
        key=show("size", spec.model.size or (sizes[0] if sizes else AS_BUILT)),
        disabled=not sizes,
        help=glossary.SIZE,
        width=SIZE_WIDTH,
    )
    if not sizes or size == (spec.model.size or sizes[0]):
        return spec.model
    return ModelRef(target=target, size=size)


def _lesson(sample: Sample | None) -> str:
    return f"{sample.title}\n\n{sample.lesson}\n\n{glossary.MODEL}" if sample else glossary.MODEL


def arguments_panel(model: ModelRef, samples: tuple[Sample, ...]) -> ModelRef:
    """The numbers that the factory takes, as the size sets them or as a person changed them."""
    sample = next((sample for sample in samples if sample.target == model.target), None)
    usual = dict(sample.sizes.get(model.size or "", {})) if sample else {}
    with st.popover("", icon=":material/tune:", disabled=not usual, key="arguments", help="Batch and model numbers"):
        st.caption("Arguments of the model's factory. Using others describes and measures the model again.")
        with st.form("arguments_form", border=False):
            chosen = {name: _argument(name, value, model.arguments.get(name, value)) for name, value in usual.items()}
            if not st.form_submit_button("Use these", icon=":material/check:"):
                return model
    return msgspec.structs.replace(
        model, arguments={name: value for name, value in chosen.items() if value != usual[name]}
    )


def _argument(name: str, usual: Argument, now: Argument) -> Argument:
    key = show(f"argument_{name}", now)
    if isinstance(usual, bool):
        return st.checkbox(name, key=key)
    if isinstance(usual, int):
        return int(st.number_input(name, min_value=0, step=1, key=key))
    if isinstance(usual, float):
        return float(st.number_input(name, min_value=0.0, key=key))
    return st.text_input(name, key=key)


def options_panel(spec: RunSpec, graph: ModelGraph | None) -> RunSpec:
    """How the step is run and how blocks are recomputed."""
    with st.popover("", icon=":material/settings:", key="options", help="Options: how the step is run"):
        run, recompute = st.columns(2, gap="medium")
        with run:
            st.markdown("**The step**")
            fields = {name: _choice(spec, name) for name in CHOICES}
            if fields["optimizer"] == "sgd":
                fields["momentum"] = st.number_input(
                    "momentum",
                    0.0,
                    0.999,
                    step=0.1,
                    key=show("option_momentum", spec.momentum),
                    help=glossary.OPTIONS["momentum"],
                )
            for name, (low, high) in NUMBERS.items():
                fields[name] = int(
                    st.number_input(
                        name, low, high, key=show(f"option_{name}", getattr(spec, name)), help=glossary.OPTIONS[name]
                    )
                )
        with recompute:
            st.markdown("**Recomputing**")
            policy = _policy_options(spec.policy)
            st.markdown("**Not trained**")
            known = (
                [block.fqn for block in graph.blocks if block.fqn and block.parameter_bytes]
                if graph
                else list(spec.frozen)
            )
            fields["frozen"] = tuple(
                st.multiselect(
                    "frozen",
                    known,
                    key=show("option_frozen", [fqn for fqn in spec.frozen if fqn in known]),
                    help=glossary.OPTIONS["frozen"],
                )
            )
    return msgspec.structs.replace(spec, policy=policy, **fields)


def _choice(spec: RunSpec, name: str) -> Any:
    value = getattr(spec, name)
    return st.selectbox(name, CHOICES[name], key=show(f"option_{name}", value), help=glossary.OPTIONS[name])


def _policy_options(policy: Policy) -> Policy:
    """torch.utils.checkpoint's options under torch's names."""

    def switch(name: str, value: bool) -> bool:
        return st.toggle(name, key=show(f"option_{name}", value), help=glossary.OPTIONS[name])

    return msgspec.structs.replace(
        policy,
        preserve_rng_state=switch("preserve_rng_state", policy.preserve_rng_state),
        early_stop=switch("early_stop", policy.early_stop),
        use_reentrant=switch("use_reentrant", policy.use_reentrant),
        determinism_check="default" if switch("determinism_check", policy.determinism_check == "default") else "none",
        running_stats=st.selectbox(
            "running_stats",
            ("once", "every_forward"),
            key=show("option_running_stats", policy.running_stats),
            help=glossary.OPTIONS["running_stats"],
        ),
    )
