"""The page, driven by Streamlit's own test driver with the real worker: a visit, a press of Run, and what it shows."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from explorer.record import Policy
from tests.gpu.kit import Bench, Skipped

if TYPE_CHECKING:
    from streamlit.testing.v1 import AppTest

PATIENCE_S = 100.0
APP = Path(__file__).resolve().parents[3] / "app.py"


def check_a_run_from_the_page(bench: Bench) -> None:
    try:
        from streamlit.testing.v1 import AppTest

        from explorer.ui.session.address import to_query
        from tests.ui.page_driver import strip_cells, texts
    except ImportError:
        raise Skipped("streamlit is not installed here") from None
    os.environ["CHECKPOINT_EXPLORER_HOME"] = tempfile.mkdtemp()  # else an earlier run is shown
    page = AppTest.from_file(str(APP), default_timeout=60)
    for name, value in to_query(bench.spec("gpt", policy=Policy.recompute(["blocks.0"]))).items():
        page.query_params[name] = value
    _wait(page)
    visit = {cell["label"]: cell["value"] for cell in strip_cells(page)}
    bench.expect("≈" in visit.get("Step peak", ""), f"the visit shows no measured baseline: {visit}")
    next(button for button in page.button if button.key == "run").click()
    _wait(page)
    bench.expect(not page.exception, str([error.value for error in page.exception]))
    cells = {cell["label"]: cell for cell in strip_cells(page)}
    peak, verdict = cells["Step peak"], cells["Gradients"]["value"]
    bench.figure("step peak", peak["value"])
    bench.expect("iB" in peak["value"] and "≈" not in peak["value"], f"the page shows no measured peak: {peak}")
    words = texts(page)
    bench.expect("not safe" not in words, "the page calls a policy unsafe that is safe")
    bench.expect(("imaginary" in words) == bench.is_imaginary, "the page does not name its card")
    if bench.is_imaginary:
        origins = {name: cells[name]["below"] for name in ("Step peak", "Saved after forward")}
        bench.expect(set(origins.values()) == {"imaginary card"}, f"origins are {origins}")
        bench.expect(cells["Step time"]["value"] == "not measured", f"a time is shown: {cells['Step time']}")
        bench.expect(verdict == "not comparable", f"gradients without values are {verdict}")
    else:
        bench.expect(peak["below"] == "measured", f"the peak is {peak['below']}")
        bench.expect(verdict == "bitwise equal", f"gradients are {verdict}")


def _wait(page: AppTest) -> None:
    """Runs the page, as its timer does, until no job is under way."""
    page.run()
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends and not page.exception and page.session_state["explore"].job.id is not None:
        time.sleep(1)
        page.run()
