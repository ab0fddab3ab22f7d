"""A device is offered where its driver is; what a link names is shown all the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from explorer.ui.session import devices as module
from explorer.ui.session.devices import devices


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    module._has_gpu.cache_clear()
    yield
    module._has_gpu.cache_clear()


@pytest.mark.parametrize("driver", [True, False])
@pytest.mark.parametrize("build", ["2.13.0", "2.13.0+cpu"])
def test_cuda_is_offered_with_a_driver_and_a_torch_that_knows_it(
    monkeypatch: pytest.MonkeyPatch, driver: bool, build: str
) -> None:
    monkeypatch.setattr(module, "_DRIVERS", ("/dev/null",) if driver else ())
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.setattr(module, "version", lambda name: build)
    assert ("cuda" in devices("cpu")) is (driver and not build.endswith("+cpu"))
    assert devices("cuda") == ("cpu", "cuda")
