"""Where a step can run, as far as a process without torch can tell: a GPU is there where its driver is."""

from __future__ import annotations

import shutil
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from explorer.record.run import Device

_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
"""What stands there on Linux, and on Linux within Windows."""


def devices(drawn: Device) -> tuple[Device, ...]:
    """What is offered. `drawn` is always among them: a link or a run may come from another machine."""
    return ("cpu", "cuda") if _has_gpu() or drawn == "cuda" else ("cpu",)


@cache
def _has_gpu() -> bool:
    driver = any(Path(path).exists() for path in _DRIVERS) or shutil.which("nvidia-smi") is not None
    return driver and not _is_built_for_cpu()


def _is_built_for_cpu() -> bool:
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False
