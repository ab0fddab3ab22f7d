"""Real Chromium against the real app on a free port of the loopback; where there is no Chromium the tests skip."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from explorer.ui.shared.run_bar import LOOK_EVERY_S
from tests.browser.chromium import NAMES, SHELL, find
from tests.browser.measured import APP
from tests.browser.served import START_S, Served, launch, start
from tests.browser.settled import WATCH_SOCKET

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, Request, ViewportSize

HERE = Path(__file__).resolve().parent
PLAIN = HERE / "plain_models.py"
FACTORIES = re.findall(r"^def (\w+)\(\):", PLAIN.read_text(), re.MULTILINE)
TIMEOUT_MS = 600_000
"""Of every wait: the 44 CPU seconds of a comparison take that long where other work has most of each core."""
LIMIT_S = 1800
"""Of a whole path, for the same reason."""
NO_LOOKS = f"""const every = setInterval
window.setInterval = (call, ms, ...rest) => ms === {1000 * LOOK_EVERY_S:g} ? 0 : every(call, ms, ...rest)"""
"""No page looks at its job by the clock: the job's news have to bring the page on."""
SIZE: ViewportSize = {"width": 1280, "height": 800}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(LIMIT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds what the page said to the report of a failed test."""
    report = yield
    page = getattr(item, "funcargs", {}).get("page")
    if report.when == "call" and report.failed and page is not None and not page.is_closed():
        report.sections.append(("the page", f"{page.url}\n{page.locator('body').inner_text(timeout=10_000)}"))
    return report


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests of this folder. Playwright's event loop runs as long; no other test may have it."""
    from playwright.sync_api import sync_playwright

    path = find((SHELL, *NAMES))
    if path is None:
        pytest.skip("no Chromium or Chrome was found; `make browser` installs one")
    with sync_playwright() as playwright:
        started = launch(playwright, path)
        yield started
        started.close()


@pytest.fixture(scope="package")
def context(browser: Browser) -> Iterator[BrowserContext]:
    """One cache for all tests: eight megabytes of scripts are read once. Animations take a tenth of the time."""
    context = browser.new_context(viewport=SIZE, accept_downloads=True, reduced_motion="reduce")
    context.set_default_timeout(TIMEOUT_MS)
    context.add_init_script(WATCH_SOCKET)
    context.add_init_script(NO_LOOKS)
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """A fresh visit; an error that the page's script throws fails the test.

    All visits share one tab, which is empty between them: a new tab compiles all scripts anew, two seconds of CPU.
    """
    tab = context.pages[0] if context.pages else context.new_page()
    tab.set_viewport_size(SIZE)
    tab.emulate_media(color_scheme="light")
    tab.mouse.move(0, 0)
    errors: list[str] = []
    with listening(tab, "pageerror", lambda error: errors.append(str(error))):
        yield tab
        tab.goto("about:blank")
    for other in context.pages[1:]:
        other.close()
    assert not errors, errors


@pytest.fixture(scope="module")
def offline(browser: Browser) -> Iterator[BrowserContext]:
    """A browser without network."""
    context = browser.new_context(offline=True, accept_downloads=True)
    context.set_default_timeout(TIMEOUT_MS)
    yield context
    context.close()


@pytest.fixture
def from_disk(offline: BrowserContext) -> Iterator[Callable[..., Page]]:
    """Visits a file, with a fragment, in a browser without network.

    A file keeps its tab: a new tab compiles Plotly anew, and Chromium may lose a way out of a file. A word on the
    console (a blocked request, an error) or any request but for files is a fault.
    """
    faults: list[str] = []

    def request(sent: Request) -> None:
        if not sent.url.startswith(("file:", "blob:")):
            faults.append(sent.url)

    def visit(file: Path, fragment: str = "") -> Page:
        tabs = [tab for tab in offline.pages if tab.url.startswith(file.as_uri())]
        tab = tabs[0] if tabs else offline.new_page()
        offline.set_offline(True)
        tab.set_viewport_size(SIZE)
        tab.emulate_media(color_scheme="light")
        if tab not in visited:
            visited.append(tab)
            listeners.enter_context(listening(tab, "console", lambda message: faults.append(message.text)))
            listeners.enter_context(listening(tab, "pageerror", lambda error: faults.append(str(error))))
            listeners.enter_context(listening(tab, "request", request))
        tab.goto(file.as_uri() + fragment)
        if tabs and fragment:  # a fragment alone is no new visit
            tab.reload()
        return tab

    visited: list[Page] = []
    with ExitStack() as listeners:
        yield visit
    assert not faults, faults


@contextmanager
def listening(tab: Page, event: Any, act: Callable[[Any], object]) -> Iterator[None]:
    tab.on(event, act)
    yield
    tab.remove_listener(event, act)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Reference of a small model of a user's own, outside the project."""
    path = tmp_path_factory.mktemp("model") / "tiny.py"
    shutil.copyfile(HERE / "tiny_model.py", path)
    return f"{path}:build"


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Served]]:
    """Starts apps; the same arguments give the same app for all tests. A worker starts in ten seconds of CPU."""
    running: dict[tuple[str, ...], Served] = {}

    def served(script: Path, *arguments: str) -> Served:
        key = (str(script), *arguments)
        if key not in running:
            running[key] = start(script, *arguments, home=tmp_path_factory.mktemp("home"))
        return running[key]

    yield served
    for app in running.values():
        app.process.terminate()
        app.process.wait(timeout=START_S)


@pytest.fixture(scope="session")
def app(serve: Callable[..., Served], tiny: str) -> Served:
    """The app that most tests visit: the tiny model first, one that fails, one for a card, and the plainest models."""
    others = [tiny.replace(":build", f":{name}") for name in ("broken", "large")]
    plain = [f"{PLAIN}:{name}" for name in FACTORIES]
    return serve(APP, *(f"--model={target}" for target in (tiny, *others, *plain)))
