"""The page, driven once by Streamlit's own test driver with the real worker: a run on the device shows its figures."""

from __future__ import annotations

import time

from tests.gpu.kit import Bench, Skipped

PATIENCE_S = 100.0


def check_a_run_from_the_page(bench: Bench) -> None:
    try:
        from streamlit.testing.v1 import AppTest
    except ImportError:
        raise Skipped("streamlit is not installed here") from None
    page = AppTest.from_file("app.py", default_timeout=60)
    page.query_params["device"] = bench.device
    page.run()
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends and not page.exception and not any("measured" in m.value for m in page.markdown):
        time.sleep(1)
        page.run()
    bench.expect(not page.exception, str([error.value for error in page.exception]))
    bench.expect(any("measured" in m.value for m in page.markdown), "no measured figure came onto the page")
