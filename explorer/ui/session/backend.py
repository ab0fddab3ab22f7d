"""What one server shares: the worker, the store, and the models, weights and devices on offer.

Streamlit runs a page again and again; objects that outlive a run live here. No import here loads torch.
"""

from __future__ import annotations

import shutil
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import streamlit as st
from msgspec.structs import replace

from explorer.errors import BadInput, ExplorerError
from explorer.jobs.client import Worker
from explorer.jobs.protocol import FindPlans
from explorer.jobs.store import Store
from explorer.plan.catalogue import Sample, catalogue, default_size, own_samples
from explorer.record.graph import ModelRef
from explorer.record.plan import Wish
from explorer.record.run import Device, RunSpec
from explorer.ui.session.address import SAME_USER

MOST_RECENT = 8
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
"""Device files of a GPU's driver on Linux, and on Linux within Windows."""


@st.cache_resource(show_spinner=False)
def worker() -> Worker:
    """The warm child process."""
    return Worker()


@st.cache_resource(show_spinner=False)
def store() -> Store:
    """Every finished run."""
    return Store()


def free_worker() -> None:
    """Cancels searches for fronts, which no person requested, so that the worker is free for a request."""
    for job in worker().open_jobs():
        if isinstance(job.request, FindPlans) and job.request.wish == Wish():
            job.cancel()


@st.cache_resource(show_spinner=False)
def _started_with() -> tuple[Sample, ...]:
    """The sample models, and models named on the command line after `--model`."""
    shipped = catalogue()
    targets = {sample.target for sample in shipped}
    others = (target for target in flag_values("--model", sys.argv[1:]) if target not in targets)
    return (*own_samples(others), *shipped)


@st.cache_resource(show_spinner=False)
def opened() -> list[ModelRef]:
    """Models that a person at this machine has opened on the page since the app was started, the newest first."""
    return []


def samples() -> tuple[Sample, ...]:
    """Models on offer: those with which the app was started, and those that a person has opened on the page.

    Links and run files pick from this list. Only `may_open` visitors add to the list.
    """
    started = _started_with()
    targets = {sample.target for sample in started}
    others = tuple(dict.fromkeys(model.target for model in opened() if model.target not in targets))
    files = (Path(target.partition(":")[0]) for target in others)
    return (*_opened_on_page(others, tuple(file.stat().st_mtime if file.is_file() else 0 for file in files)), *started)


def sample_of(model: ModelRef) -> Sample | None:
    """The offered model that `model` is, in some size."""
    return next((sample for sample in samples() if sample.target == model.target), None)


@st.cache_resource(show_spinner=False, max_entries=8)
def _opened_on_page(targets: tuple[str, ...], dates: tuple[float, ...]) -> tuple[Sample, ...]:
    """Read again when one of the files has another date."""
    return own_samples(targets, "Opened on this page.")


def may_open() -> bool:
    """Whether the visitor is the person who started the app: opening a model runs its code with that person's rights.

    server.py writes the header into each request; a browser cannot.
    """
    return st.context.headers.get(SAME_USER, "yes") == "yes"


def recent_models() -> tuple[str, ...]:
    """References of models that ran on this machine and are not on offer now, the newest first."""
    offered = {sample.target for sample in samples()}
    try:
        rows = sorted(store().list(), key=lambda row: -row.created)
    except ExplorerError:  # the Runs page says why the store cannot be read
        return ()
    models = [row.spec.model for row in rows if row.spec is not None and not row.imported]
    targets = dict.fromkeys(model.target for model in models if not model.is_recorded)
    return tuple(target for target in targets if target not in offered)[:MOST_RECENT]


def weights() -> tuple[str, ...]:
    """Files with weights that a model may start from: named on the command line after `--weights`, or on the page."""
    files = (*flag_values("--weights", sys.argv[1:]), *(model.weights for model in opened() if model.weights))
    return tuple(dict.fromkeys(str(Path(file).resolve()) for file in files))


def predicts() -> bool:
    """Whether a visit begins without allocating its model: the app was started with `--predict`."""
    return "--predict" in sys.argv[1:]


def flag_values(flag: str, arguments: list[str]) -> tuple[str, ...]:
    """The values of every `--model REF` and `--model=REF`, for the flag `--model`; an empty one says nothing."""
    values = [following for word, following in zip(arguments, arguments[1:]) if word == flag]
    values += [word.removeprefix(f"{flag}=") for word in arguments if word.startswith(f"{flag}=")]
    return tuple(filter(None, values))


def devices(drawn: Device) -> tuple[Device, ...]:
    """Devices on offer, always including `drawn`: a link or a run may come from another machine."""
    return ("cpu", "cuda") if _has_gpu() or drawn == "cuda" else ("cpu",)


@cache
def _has_gpu() -> bool:
    """Found without torch: a machine with a GPU's driver has a GPU."""
    driver = any(Path(path).exists() for path in _DRIVERS) or shutil.which("nvidia-smi") is not None
    return driver and not _is_built_for_cpu()


def _is_built_for_cpu() -> bool:
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


def in_default_size(model: ModelRef) -> ModelRef:
    """`model` with its size named, so that a link without a size finds the runs of the same model."""
    if model.size:
        return model
    sample = sample_of(model)
    return replace(model, size=default_size({} if sample is None else sample.sizes))


def check_offered(model: ModelRef) -> None:
    """Raises BadInput unless `model` and its weights are on the lists: links and run files must not make this machine
    load others."""
    if model.is_recorded:
        raise BadInput(
            f"{model.target} is a step that was recorded in a script: its model is not here to run.",
            hint="Policies are forecast from the record; apply the policy file in that script and record again.",
        )
    sample = sample_of(model)
    if sample is None:
        raise BadInput(
            f"The model {model.target} is not offered here.",
            hint=f"If you trust it, type {model.target} under Open a model of yours.",
        )
    if model.weights and model.weights not in weights():
        raise BadInput(
            f"The weights {model.weights} are not offered here.",
            hint=f"Start the app with `-- --weights {model.weights}` if you trust them.",
        )
    if model.size is not None and model.size not in sample.sizes:
        raise BadInput(f"{sample.name} has no size {model.size}.", hint=f"It has {', '.join(sample.sizes) or 'none'}.")
    usual = sample.usual(model.size)
    typed = [each.arguments for each in opened() if each.target == model.target]
    wrong = [
        name
        for name, value in model.arguments.items()
        if type(value) is not type(usual.get(name)) and not any(arguments.get(name) == value for arguments in typed)
    ]
    if wrong:
        raise BadInput(f"{sample.name} takes no argument {', '.join(wrong)} of that type.")


def check_split(spec: RunSpec) -> None:
    """Raises BadInput if `spec` names a function that splits its model: a link must not make this machine load one."""
    if spec.ranks is not None and spec.ranks.parallelize:
        raise BadInput(
            f"The ranks are split by {spec.ranks.parallelize}, which the page does not load.",
            hint="Predict them on the command line: measure --predict --parallelize; its run file opens here.",
        )
