"""What a first visitor waits for: wall time and CPU time until words, graph, timeline and all figures stand.

A real Chromium opens the page of a fresh server with an empty store (cold), then another model on the same server
(warm). The sample is the GPT that the page opens by itself. The model of a user's own is a copy of its file, of which
no run is bundled. `busy` runs the same beside one process that never rests. CPU seconds are those of the server and all
its processes since the page was opened, without the browser.

The guided path is walked on a cold server by a program that reads each step as fast as a person.

    python -m benchmarks.first_minute [OTHER CHECKOUT] [quiet|busy]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "browser"), str(ROOT)]

from chromium import find  # noqa: E402
from measured import guided  # noqa: E402
from served import Served, free_port, launch, wait_for  # noqa: E402

LIMIT_S = 150
SAMPLE = "sample_models/gpt.py&size=small"
LOOK_S = 0.1
WORDS_A_SECOND = 200 / 60
"""Speed of a person who reads."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
SIGNS = """() => {
    const hosts = [...document.querySelectorAll("#root *")].filter((e) => e.shadowRoot)
    const text = [document.body.innerText, ...hosts.map((e) => e.shadowRoot.textContent)].join(" ")
    const graph = hosts.some((e) => e.shadowRoot.querySelector('[role="treeitem"]'))
    const plots = [...document.querySelectorAll(".js-plotly-plot .main-svg")]
    const sketches = [...document.querySelectorAll(".sketch > svg")]
    const elsewhere = /another machine/.test(text)
    const metrics = [...document.querySelectorAll('[data-testid="stMetric"]')].map((e) => e.innerText)
    const strip = hosts.map((e) => e.shadowRoot.querySelector('[data-figure="Step time"] .value')?.textContent ?? "")
    const timed = [...metrics, ...strip].some((words) => /\\d ms/.test(words))
    const busy = /[?&]job=/.test(location.search)
    const signs = (stands) => {
        const chart = plots.some(stands), sketch = sketches.some(stands)
        return {
            "first words": document.querySelector("#first-words, .st-key-tour_offer") !== null,
            "what it is": document.querySelector(".st-key-tour_offer, .st-key-tour_begin") !== null,
            "recorded preview": document.querySelector('#preview > [data-part="chart"]') !== null,
            "recorded sketch": sketch && elsewhere,
            "recorded chart": chart && elsewhere,
            "own graph": graph && !elsewhere,
            "own timeline": (sketch || chart) && graph && !elsewhere,
            "own chart": chart && !elsewhere,
            "all figures": chart && timed && !elsewhere,
            "measured": chart && timed && !elsewhere && !busy,
        }
    }
    return [signs((e) => e.closest("[data-stale]")?.dataset.stale !== "true"), signs(() => true)]
}"""
"""What the page shows, without and with figures that wait for their replacement in a rerun."""
WATCH = f"""(() => {{
    const look = {SIGNS}
    const times = (window.signs = {{}}), stands = (window.stands = new Set())
    let changed = true, last = 0
    new MutationObserver(() => (changed = true)).observe(document, {{ subtree: true, childList: true }})
    const frame = () => {{
        const now = (performance.timeOrigin + performance.now()) / 1000
        if (document.body && (changed || now - last > {LOOK_S})) {{
            const [fresh, there] = look()
            for (const sign in there) {{
                if (fresh[sign]) times[sign] ??= now
                if (there[sign] && now - times[sign] > {LOOK_S}) stands.add(sign)
                if (!there[sign] && !stands.has(sign)) delete times[sign]
            }}
            last = now
            changed = false
        }}
        requestAnimationFrame(frame)
    }}
    requestAnimationFrame(frame)
}})()"""
"""Notes in the page when each sign is painted: a browser that runs Plotly answers no question from outside. A later
look confirms a sign. Half of a rerun has old figures beside new words: a sign begins with figures of this rerun."""


def main(*arguments: str) -> None:
    checkout = next((Path(word).resolve() for word in arguments if word not in ("quiet", "busy")), ROOT)
    loads = [word for word in arguments if word in ("quiet", "busy")] or ["quiet", "busy"]
    path = find()
    if path is None:
        sys.exit("No Chromium was found; `make browser` installs one.")
    from playwright.sync_api import sync_playwright

    print(f"{'':28} {'sign':16} {'wall s':>7} {'CPU s':>7}   load average")
    with sync_playwright() as playwright:
        browser = launch(playwright, path)
        for load in loads:
            with tempfile.TemporaryDirectory() as folder, _beside(load == "busy"):
                _visits(browser, checkout, Path(folder), load)
                _path(browser, checkout, Path(folder), load)
        browser.close()


def _visits(browser: Any, checkout: Path, folder: Path, load: str) -> None:
    """The sample or a model of a user's own on a cold server, then another model of a user's own on the same server."""
    for kind in ("sample", "own model"):
        home = Path(tempfile.mkdtemp(dir=folder))
        copies = [home / f"net_{i}.py" for i in range(2)]
        for copy in copies:
            shutil.copyfile(checkout / "sample_models" / "gpt.py", copy)
        app = _start(checkout, copies, home)
        try:
            first = SAMPLE if kind == "sample" else f"{copies[0]}&size=small"
            _visit(browser, app, first, f"{kind}, cold, {load}")
            if kind == "own model":
                _visit(browser, app, f"{copies[1]}&size=small", f"{kind}, warm, {load}")
        finally:
            app.process.terminate()
            app.process.wait(timeout=30)


def _visit(browser: Any, app: Served, model: str, name: str) -> None:
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.add_init_script(WATCH)
    began, cpu = time.time(), _cpu_s(app.process.pid)
    page.goto(f"{app.url}/?model={model}", wait_until="commit")
    used: list[tuple[float, float]] = []
    while time.time() - began < LIMIT_S and not page.evaluate("() => window.stands?.has('measured')"):
        used.append((time.time(), _cpu_s(app.process.pid)))
        time.sleep(LOOK_S)
    for sign, at in page.evaluate("() => window.signs").items():
        cpu_s = min(used, key=lambda sample: abs(sample[0] - at))[1] - cpu
        print(f"{name:28} {sign:16} {at - began:7.1f} {cpu_s:7.1f}   {os.getloadavg()[0]:.1f}", flush=True)
    context.close()


def _path(browser: Any, checkout: Path, folder: Path, load: str) -> None:
    """The guided path on a cold server, from the opening of the page to the downloaded policy file."""
    app = _start(checkout, [], Path(tempfile.mkdtemp(dir=folder)))
    context = browser.new_context(viewport={"width": 1440, "height": 900}, accept_downloads=True)
    page = context.new_page()
    page.set_default_timeout(1000 * LIMIT_S)
    began = time.perf_counter()
    try:
        page.goto(app.url)
        for text in guided(page, folder / "policy.yaml"):
            time.sleep(len(text.split()) / WORDS_A_SECOND)
    finally:
        app.process.terminate()
        app.process.wait(timeout=30)
    wall_s = time.perf_counter() - began
    print(f"{f'guided path, {load}':28} {'policy file':16} {wall_s:7.1f} {'':7}   {os.getloadavg()[0]:.1f}", flush=True)
    context.close()


def _start(checkout: Path, models: list[Path], home: Path) -> Served:
    """The app of `checkout`, which offers the sample models and `models`."""
    port = free_port()
    command = [sys.executable, "-m", "streamlit", "run", "app.py", f"--server.port={port}", "--"]
    command += [word for model in models for word in ("--model", str(model))]
    environment = {**os.environ, "CHECKPOINT_EXPLORER_HOME": str(home)}
    silent = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=checkout, env=environment, stdout=silent, stderr=silent)
    return wait_for(process, port)


@contextmanager
def _beside(busy: bool) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def _cpu_s(root: int) -> float:
    """CPU seconds of a process and its descendants, those that ended and were waited for included."""
    seconds, tree = 0.0, [root]
    for pid in tree:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            tasks = list(Path(f"/proc/{pid}/task").glob("*/children"))
            tree += [int(child) for task in tasks for child in task.read_text().split()]
        except OSError:  # it ended meanwhile
            continue
        seconds += sum(map(int, fields[11:15])) * TICK_S
    return seconds


if __name__ == "__main__":
    main(*sys.argv[1:])
