"""What every test shares: one CPU thread for torch, a data directory of its own, no state left behind."""

from __future__ import annotations

import gc
import importlib
import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported: with one thread a sum has one order, and two test workers do not fight for two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, when CUDA starts; the worker sets it too

# The test workers and their 150 child processes compile the tree once, also where the environment forbids it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# No test asserts a time, Hypothesis included; where CI runs, examples are the same every time.
settings.register_profile(
    "house",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=int(os.environ.get("EXAMPLES", "30")),  # EXAMPLES=1000 looks longer
)
settings.load_profile("house")

ROOT = Path(__file__).resolve().parent.parent


BROWSER_GROUPS = {
    "app": ("test_plain_models", "test_accessible", "test_files", "test_card", "test_app", "test_pipeline"),
    "other pages": ("test_first_visit", "test_explorable", "test_graph", "test_report"),
}
"""Files of browser tests that one test worker runs in this order; they share its app. A second app and a second tab of
it take 15 s of CPU until their first chart, so all visits of the app are one group."""


def browser_group(path: Path) -> str | None:
    """The group of a file of browser tests. None: another file."""
    if path.parent.name != "browser":
        return None
    return next((group for group, files in BROWSER_GROUPS.items() if path.stem in files), "other pages")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Browser tests come first, then files with slow tests: no worker begins a long one when the others are done."""
    groups, slow = list(BROWSER_GROUPS), {item.path for item in items if item.get_closest_marker("slow")}
    files = [file for group in BROWSER_GROUPS.values() for file in group]

    def place(item: pytest.Item) -> tuple[int, int]:
        group, file = browser_group(item.path), item.path.stem
        if group is None:
            return len(groups), item.path not in slow
        return groups.index(group), files.index(file) if file in files else len(files)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Files stay whole, and so do the groups of browser tests."""
    from xdist.scheduler import LoadFileScheduling

    class ByServer(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = Path(nodeid.split("::")[0])
            return browser_group(file) or str(file)

    return ByServer(config, log)


gc.disable()  # a fifth of the time of importing torch and every test file is a search for garbage that is not there


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Each test keeps its runs in a store of its own."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("CHECKPOINT_EXPLORER_HOME", str(home))
    yield home


@pytest.fixture(autouse=True)
def own_numbers() -> None:
    """Each test draws the same random numbers, whichever tests ran before it in its process."""
    random.seed(0)
    numpy.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(0)  # torch.manual_seed takes 0.6 ms


@pytest.fixture(scope="module", autouse=True)
def nothing_old_is_garbage() -> None:
    """What earlier files left is gone, and the modules they imported are searched no more: a run collects twice."""
    if "torch" in sys.modules:
        importlib.import_module("torch._dynamo")  # as the first checkpoint does: 120,000 objects to search
    gc.collect()
    gc.freeze()


NARROW = re.compile("autocast|narrow|bfloat16|dtype")


@pytest.fixture
def without_onednn(request: pytest.FixtureRequest) -> Iterator[None]:
    """No kernels of oneDNN in a case of narrow types: a CPU with instructions for them (AMX, AVX-512 BF16) takes these
    kernels, whose memory inside an operator no step without data knows of."""
    import torch

    usual = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(usual and not NARROW.search(request.node.name))
    yield
    torch._C._set_mkldnn_enabled(usual)
