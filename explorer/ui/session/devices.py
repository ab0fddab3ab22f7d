"""Devices that can run a step, found without torch: a machine with a GPU driver has a GPU."""

from __future__ import annotations

import shutil
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from explorer.record.run import Device

_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
"""Device files of the driver on Linux, and on Linux within Windows."""


def devices(drawn: Device) -> tuple[Device, ...]:
    """Devices on offer, always including `drawn`: a link or a run may come from another machine."""
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
