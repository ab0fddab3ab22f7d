"""The page, driven once by Streamlit's own test driver with the real worker: a run on the device shows its figures."""

from __future__ import annotations

import time
from pathlib import Path

from tests.gpu.kit import Bench, Skipped

PATIENCE_S = 100.0
APP = Path(__file__).resolve().parents[3] / "app.py"


def check_a_run_from_the_page(bench: Bench) -> None:
    try:
        from streamlit.testing.v1 import AppTest

        from tests.ui.page_driver import figures
    except ImportError:
        raise Skipped("streamlit is not installed here") from None
    page = AppTest.from_file(str(APP), default_timeout=60)
    page.query_params["device"] = bench.device
    page.run()
    ends = time.monotonic() + PATIENCE_S
    peak = ""
    while time.monotonic() < ends and not page.exception and not _is_measured(peak):
        time.sleep(1)
        page.run()
        peak = figures(page).get("Step peak", "")
    bench.expect(not page.exception, str([error.value for error in page.exception]))
    bench.expect(_is_measured(peak), f"no measured peak came onto the page; it says {peak or 'nothing'}")


def _is_measured(peak: str) -> bool:
    """A predicted peak has the sign for about in front."""
    return "MiB" in peak and "≈" not in peak
