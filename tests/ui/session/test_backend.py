"""What all sessions of a server share: models of the command line, and devices."""

from __future__ import annotations

import pytest

from explorer.ui.session import backend


def test_models_come_from_the_command_line() -> None:
    assert backend.flag_values("--model", ["--model", "a.py:f", "--model=b.py", "x"]) == ("a.py:f", "b.py")
    assert backend.flag_values("--model", ["--weights", "a.pt"]) == ()


@pytest.mark.parametrize("driver", [True, False])
@pytest.mark.parametrize("build", ["2.13.0", "2.13.0+cpu"])
def test_cuda_is_offered_with_a_driver_and_a_torch_that_knows_it(
    monkeypatch: pytest.MonkeyPatch, driver: bool, build: str
) -> None:
    monkeypatch.setattr(backend, "_has_gpu", backend._has_gpu.__wrapped__)
    monkeypatch.setattr(backend, "_DRIVERS", ("/dev/null",) if driver else ())
    monkeypatch.setattr(backend.shutil, "which", lambda name: None)
    monkeypatch.setattr(backend, "version", lambda name: build)
    assert ("cuda" in backend.devices("cpu")) is (driver and not build.endswith("+cpu"))
    assert backend.devices("cuda") == ("cpu", "cuda"), "what a link names is shown all the same"
