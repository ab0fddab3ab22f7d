"""A page that answers without a server: its forecast is the forecaster's, to the byte; offline, from disk."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

import explorer
from explorer.plan.catalogue import SAMPLES
from explorer.plan.names import is_within
from explorer.plan.policy.file import load
from explorer.plan.predict.forecaster import Forecaster
from explorer.record import Measurement, ModelGraph, Policy, Unit
from explorer.record.base import from_plain, to_plain
from explorer.view.drawing.units import mib
from explorer.view.graph.labels import Facts, labels
from explorer.view.report.html import PLOTLY_FILE, plotly_js
from explorer.view.report.report import ReportOf, report_text
from tests.browser import forecasts_in_page as both

if TYPE_CHECKING:
    from playwright.sync_api import Page

Open = Callable[..., "Page"]
MIXED = Policy(
    units=(Unit(blocks=("blocks.0", "blocks.1")), Unit(blocks=("blocks.3.mlp",)), Unit(blocks=("blocks.5",)))
)


@pytest.mark.parametrize(("i", "name"), list(enumerate(both.MODELS)), ids=both.MODELS)
def test_a_page_forecasts_as_the_forecaster_does(page: Page, i: int, name: str) -> None:
    """Every second model without the moments that only a recording knows; the benchmark has both for each."""
    chosen = [Policy(), *(policy for kind in both.KINDS for policy in both.policies(name, kind, 4))]
    forecaster = both.open_step(page, name, observed=i % 2 == 0)
    wrong = [fault for policy in chosen for fault in both.faults(page, forecaster, policy)]
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pages of sample models, which share plotly.js."""
    path = tmp_path_factory.mktemp("pages")
    (path / PLOTLY_FILE).write_text(plotly_js())
    return path


@pytest.fixture
def opened(from_disk: Open, folder: Path) -> Open:
    """Opens the page of a sample model from disk."""

    def load(name: str = "gpt", fragment: str = "", graph: ModelGraph | None = None) -> Page:
        file, recorded = folder / (f"{name}.html" if graph is None else "changed.html"), both.bundled(name)
        if graph is not None or not file.exists():
            run = replace(recorded.run, graph=graph) if graph is not None else recorded.run
            plans = recorded.front.plans if graph is None else ()
            file.write_text(report_text(ReportOf(run=run, name=name, plans=plans, share_plotly=True)))
        page = from_disk(file, fragment)
        page.locator(".explorable .nsewdrag").first.wait_for()
        return page

    return load


def units_of(page: Page) -> list[dict[str, Any]]:
    return list(page.evaluate("page.policy"))


def plain(policy: Policy) -> list[dict[str, Any]]:
    return [{"blocks": list(unit.blocks), "save_ops": list(unit.save_ops)} for unit in policy.units]


def test_clicks_are_answered_and_join_fold_and_guess(opened: Open) -> None:
    page, (run, graph) = opened(), both.run_of("gpt")
    page.locator('.blocks [data-id="blocks.1"]').click()
    forecast = Forecaster(run, graph).forecast(Policy.recompute(["blocks.1"]))
    cards = page.locator(".live .card b").all_inner_texts()
    assert forecast.flop_ratio is not None and forecast.time_ratio is not None
    assert cards[0].endswith(f"→ {mib(forecast.step_peak_bytes)}")
    assert cards[1].endswith(f"→ {mib(forecast.saved_after_forward_bytes)}")
    assert cards[2:] == [f"×{forecast.flop_ratio:.2f}", f"≈ ×{forecast.time_ratio:.2f}", "1 of 12", "none known"]
    assert mib(forecast.step_peak_bytes) in page.locator(".answer").inner_text()
    block = page.locator('.blocks [data-id="blocks.1"]')
    assert block.get_attribute("aria-checked") == "true"
    assert "15.0 → ≈ 0.5 MiB" in block.inner_text()
    assert page.locator(".policy-peak").text_content() == f"≈ {mib(forecast.step_peak_bytes)}"
    assert page.locator(".policy path").last.get_attribute("d")
    page.get_by_role("button", name="Undo").click()
    assert units_of(page) == [] and not page.locator(".policy").is_visible()

    # Folding keeps the policy and shows the blocks inside.
    page.evaluate("policy => show(policy)", plain(Policy.recompute(["blocks.2"])))
    page.locator('.blocks [data-id="blocks.2"] [data-act="fold"]').click()
    page.locator('.blocks [data-id="blocks.4.mlp"]').click()
    assert [unit["blocks"] for unit in units_of(page)] == [["blocks.2"], ["blocks.4.mlp"]]
    page.locator('.blocks [data-id="blocks.2"] [data-act="fold"]').first.click()
    page.locator('.blocks [data-id="blocks.4.mlp"]').wait_for(state="detached")
    assert len(units_of(page)) == 2

    # Two neighbours are joined and split again.
    page.evaluate("show([])")
    page.locator('.blocks [data-id="blocks.0"]').click()
    page.locator('.blocks [data-id="blocks.1"]').click()
    page.get_by_role("button", name="Recompute blocks.0 and blocks.1 as one segment").click()
    assert [unit["blocks"] for unit in units_of(page)] == [["blocks.0", "blocks.1"]]
    page.locator('.blocks [data-id="blocks.0"]').click()
    assert [unit["blocks"] for unit in units_of(page)] == [["blocks.1"]]

    # A guess comes before the answer.
    page.get_by_role("button", name="Next").click()
    guesses = page.locator(".guesses button")
    predicted = mib(page.evaluate("forecast(recorded, facts.presets.all).peak"))
    assert predicted in guesses.all_inner_texts() and guesses.count() >= 3
    wrong = next(text for text in guesses.all_inner_texts() if text != predicted)
    guesses.get_by_text(wrong, exact=True).click()
    assert page.locator(".guesses p").inner_text().startswith(f"Not {wrong}.")
    guesses.get_by_text(predicted, exact=True).click()
    assert page.locator(".guesses p").inner_text().startswith("Right.")
    page.get_by_role("button", name="Leave").click()
    assert not page.locator(".path").is_visible()


@pytest.mark.parametrize("name", ["gpt", "moe"])
def test_labels_budgets_and_a_narrow_window(opened: Open, name: str) -> None:
    page, (run, graph) = opened(name), both.run_of(name)
    forecaster = Forecaster(run, graph)
    for policy in [policy for kind in both.KINDS[:4] for policy in both.policies(name, kind, 4)]:
        facts = Facts(graph=graph, policy=policy, baseline=run, freed_bytes=forecaster.forecast(policy).freed_bytes)
        shown = page.evaluate("policy => { show(policy); return labelsOf(page.policy) }", plain(policy))
        expected = {id: [label.bytes, label.note] for id, label in labels(facts).items()}
        assert {id: label[:2] for id, label in shown.items()} == expected, policy

    # A budget takes the cheapest proven plan within it.
    plans = both.bundled(name).front.plans
    for share in (0.0, 0.3, 0.6, 1.0):
        page.evaluate("share => takeBudget(share)", share)
        budget, peak = page.evaluate("[page.budget, page.answer.peak]")
        best = min((plan for plan in plans if plan.step_peak_bytes <= budget), key=lambda plan: plan.extra_cost)
        assert peak == best.step_peak_bytes and units_of(page) == page.evaluate(
            "units => sorted(units)", plain(best.policy)
        )
        assert "roven" in page.locator(".proof").inner_text() or best.certificate.gap >= 1

    page.evaluate("show(facts.presets.all)")
    page.set_viewport_size({"width": 700, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") == 700
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 400


PROTOTYPE = {"embedding": "constructor", "blocks": "__proto__", "norm": "toString", "head": "hasOwnProperty"}
"""Names of the sample's outer blocks, and names that every plain object of JavaScript has already."""


def renamed(value: Any) -> Any:
    """Plain values with the outer blocks under their other names, in keys and in texts. `blocks` is a field too."""
    if isinstance(value, dict):
        return {key if key == "blocks" else renamed(key): renamed(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [renamed(part) for part in value]
    if not isinstance(value, str):
        return value
    return re.sub(r"^(embedding|blocks|norm|head)(?=[.:]|$)", lambda match: PROTOTYPE[match[1]], value)


def test_blocks_may_be_called_as_what_every_object_has(from_disk: Open, tmp_path: Path) -> None:
    run = from_plain(renamed(to_plain(both.bundled("gpt").run)), Measurement)
    graph = run.graph
    assert graph is not None and set(PROTOTYPE.values()) <= set(graph.by_fqn)
    forecaster = Forecaster(run, graph)
    file = tmp_path / "renamed.html"
    file.write_text(report_text(ReportOf(run=run, name="gpt")))
    page = from_disk(file, "#preset=constructor")
    page.locator(".explorable .nsewdrag").first.wait_for()
    for blocks in (["constructor"], ["__proto__.0"], ["__proto__.1", "toString"], ["__proto__.2.mlp", "constructor"]):
        policy = Policy.recompute(blocks)
        forecast = forecaster.forecast(policy)
        shown = page.evaluate("policy => { show(policy); return labelsOf(page.policy) }", plain(policy))
        facts = Facts(graph=graph, policy=policy, baseline=run, freed_bytes=forecast.freed_bytes)
        expected = {id: [label.bytes, label.note] for id, label in labels(facts).items()}
        assert {id: shown[id][:2] for id in expected if id != "__proto__"} == {
            id: label for id, label in expected.items() if id != "__proto__"
        }, blocks
        assert page.evaluate("page.answer.peak") == forecast.step_peak_bytes
    page.evaluate("show([])")
    page.locator('.blocks [data-id="constructor"]').first.click()
    assert [unit["blocks"] for unit in units_of(page)] == [["constructor"]]
    page.locator('.blocks [data-id="toString"]').first.click()
    assert on_page(page) == {"constructor", "toString"}


def on_page(page: Page) -> set[str]:
    return {block for unit in units_of(page) for block in unit["blocks"]}


def test_a_policy_leaves_as_a_file_that_is_applied_and_as_a_link_that_opens(opened: Open, tmp_path: Path) -> None:
    page = opened()
    page.evaluate("policy => show(policy)", plain(MIXED))
    with page.expect_download() as download:
        page.get_by_role("button", name="Policy file").click()
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    file = load(path)
    assert path.name == "gpt-policy.yaml" and file.policy == MIXED
    assert file.fingerprint == both.run_of("gpt")[1].fingerprint
    namespace: dict[str, Any] = {}
    exec(compile((SAMPLES / "gpt.py").read_text(), "gpt.py", "exec"), namespace)
    small = {"n_layers": 12, "width": 16, "n_heads": 2, "length": 8, "batch": 1, "vocabulary": 32, "dropout": 0.1}
    model, (text, targets), loss = namespace["build"](**small)
    explorer.apply_policy(model, explorer.load_policy(path))
    calls: Counter[str] = Counter()
    for fqn, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, fqn=fqn: calls.update([fqn]))
    loss(model(text), targets).backward()
    units = ("blocks.0", "blocks.1", "blocks.3.mlp", "blocks.5")
    again = {fqn for fqn, n_calls in calls.items() if n_calls > 1}
    assert {next((unit for unit in units if is_within(fqn, unit)), fqn) for fqn in again} == set(units)

    page.wait_for_function("() => location.hash === hash()")
    second = opened(fragment=page.evaluate("location.hash"))
    assert units_of(second) == plain(MIXED)
    second.evaluate("location.hash = '#preset=all'")
    second.wait_for_function("() => page.policy.length === facts.presets.all.length")
    second.evaluate("location.hash = '#policy=layer.9'")
    second.get_by_text("The link names layer.9, which this page cannot recompute").wait_for()
    odd = [{"blocks": ["a;b", "c+d:e"], "save_ops": ["x,y", "<b>&%'()"]}]
    assert second.evaluate("policy => read(written(policy))", odd) == odd


def test_a_hazard_of_a_chosen_block_is_said_before_any_run(opened: Open) -> None:
    graph = both.run_of("gpt")[1]
    blocks = tuple(replace(one, traits=("python_rng",)) if one.fqn == "blocks.1" else one for one in graph.blocks)
    page = opened(graph=replace(graph, blocks=blocks))
    hazards = page.locator(".live .card").last
    page.locator('.blocks [data-id="blocks.0"]').click()
    assert "none known" in hazards.inner_text()
    page.locator('.blocks [data-id="blocks.1"]').click()
    assert "unsafe" in hazards.inner_text() and "random" in hazards.inner_text()
    assert page.locator('.blocks [data-id="blocks.1"] .badge.error').count() == 1
