"""What all recordings of steps share."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def objects_of_this_file() -> Iterator[None]:
    """A recording looks at every object for tensors: those of other test files are put aside."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_garbage(objects_of_this_file: None) -> None:
    """Tensors that earlier tests left alive count as inputs, until a collection between two recordings frees them."""
    gc.collect()


@pytest.fixture(autouse=True)
def torchs_own_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Memory block of unknown size.*")
        yield
