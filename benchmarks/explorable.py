"""Pages that answer without a server: equal forecasts in two languages, the time of a click, and the size of the files.

For each sample model, random policies of five kinds are forecast by the forecaster and by the page's script in a
Chromium: peak, the whole curve, saved bytes, FLOPs and freed bytes have to be equal to the byte. Half of the policies
see the step without the moments that only a recording knows. Then the page itself is opened from disk without network.
A click is timed from the event to the end of layout: figures, sentence, graph and timeline are then in the document.
The same clicks are repeated from the start, and each counts with its least time: a machine that does other work, or
that collects garbage, interrupts another click each time.

    python -m benchmarks.explorable [policies a model] [clicks a model] [repeats]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from explorer.view.report.html import PLOTLY_FILE, plotly_js  # noqa: E402
from explorer.view.report.report import ReportOf, report_text  # noqa: E402
from tests.browser import forecasts_in_page as both  # noqa: E402
from tests.browser.chromium import find  # noqa: E402
from tests.browser.served import launch  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import Page

BUDGET_MS, LARGEST_MIB = 16, 3
CLICKS = """n => {
    show([])
    const times = [], rows = () => [...host.querySelectorAll(".row.toggles .chip")]
    for (let i = 0; i < n; i++) {
        const chips = rows(), chip = chips[(7 * i) % chips.length]
        const began = performance.now()
        chip.click()
        document.body.offsetHeight
        times.push(performance.now() - began)
    }
    return times
}"""
REPLAYS = """n => {
    const times = []
    for (let i = 0; i < n; i++) {
        const began = performance.now()
        forecast(recorded, facts.presets.all)
        times.push(performance.now() - began)
    }
    return times
}"""


def main(n_policies: str = "200", n_clicks: str = "100", n_repeats: str = "5") -> None:
    path = find()
    if path is None:
        sys.exit("No Chromium was found; `make browser` installs one.")
    from playwright.sync_api import sync_playwright

    print(f"{'model':10} {'policies':>8} {'unequal':>8} {'MiB':>6} {'click ms':>9} {'slowest':>8} {'replay ms':>9}")
    n_all, wrong = 0, []
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = launch(playwright, path)
        (Path(folder) / PLOTLY_FILE).write_text(plotly_js())
        for name in both.MODELS:
            page = browser.new_page()
            n, faults = _compare(page, name, int(n_policies))
            page.close()
            n_all, wrong = n_all + n, wrong + faults
            file = Path(folder) / f"{name}.html"
            recorded = both.bundled(name)
            file.write_text(
                report_text(ReportOf(run=recorded.run, name=name, plans=recorded.front.plans, share_plotly=True))
            )
            context = browser.new_context(viewport={"width": 1440, "height": 900}, offline=True)
            clicks, replays = _timed(context.new_page(), file, int(n_clicks), int(n_repeats))
            context.close()
            print(
                f"{name:10} {n:8} {len(faults):8} {file.stat().st_size / 2**20:6.2f} {statistics.median(clicks):9.1f} "
                f"{max(clicks):8.1f} {statistics.median(replays):9.2f}",
                flush=True,
            )
        browser.close()
    print(f"{n_all} policies, {len(wrong)} figures differ; a click has {BUDGET_MS} ms, a file {LARGEST_MIB} MiB")
    sys.exit("\n".join(wrong[:20]) or 0)


def _compare(page: Page, name: str, n: int) -> tuple[int, list[str]]:
    """The number of different policies, and what differs; kinds of which a model has few leave room for the others."""
    by_kind = [both.policies(name, kind, n) for kind in both.KINDS]
    policies = list(dict.fromkeys(policy for row in zip_longest(*by_kind) for policy in row if policy is not None))[:n]
    faults: list[str] = []
    for observed in (True, False):
        forecaster = both.open_step(page, name, observed=observed)
        for policy in policies[observed::2]:
            faults += both.faults(page, forecaster, policy)
    return len(policies), faults


def _timed(page: Page, file: Path, n: int, n_repeats: int) -> tuple[list[float], list[float]]:
    page.goto(file.as_uri())
    page.locator(".explorable .nsewdrag").first.wait_for()
    time.sleep(1.0)  # the charts below are drawn meanwhile
    page.evaluate(CLICKS, 20)
    clicks = [page.evaluate(CLICKS, n) for _ in range(n_repeats)]
    return [min(times) for times in zip(*clicks)], page.evaluate(REPLAYS, n)


if __name__ == "__main__":
    main(*sys.argv[1:])
