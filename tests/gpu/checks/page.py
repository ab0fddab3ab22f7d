"""The page, driven once by Streamlit's own test driver with the real worker: a run on the device shows its figures."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.gpu.kit import Bench, Skipped

PATIENCE_S = 100.0
APP = Path(__file__).resolve().parents[3] / "app.py"


def check_a_run_from_the_page(bench: Bench) -> None:
    try:
        from streamlit.testing.v1 import AppTest
    except ImportError:
        raise Skipped("streamlit is not installed here") from None
    page = AppTest.from_file(str(APP), default_timeout=60)
    page.query_params["device"] = bench.device
    page.run()
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends and not page.exception and "MiB" not in _peak(page):
        time.sleep(1)
        page.run()
    bench.expect(not page.exception, str([error.value for error in page.exception]))
    bench.expect("MiB" in _peak(page), f"no measured peak came onto the page; it says {_peak(page) or 'nothing'}")


def _peak(page: Any) -> str:
    """The headline figure of the strip."""
    return next((str(figure.value) for figure in page.metric if figure.label == "Step peak"), "")
