"""The verb fit: the step as it is, ranked levers with their price and gradients, and the lines that switch them on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.asked import read, run
from tests.own_loop.test_first_step import Adam

pytestmark = pytest.mark.usefixtures("shared")

MLP = ("fit", "sample_models/mlp.py", "--set", "batch=64", "--set", "n_layers=4")


@pytest.mark.slow
def test_each_lever_has_its_price_its_gradients_and_its_line() -> None:
    printed = run(*MLP, "--budget", "1100KiB").stdout
    assert "which does not fit in 1.1 MiB" in printed
    for line in (
        "optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0)",
        "model = model.to(torch.bfloat16)",
        'with torch.autocast("cpu", dtype=torch.bfloat16): loss = loss_of(model, batch)',
    ):
        assert f"    {line}\n" in printed
    row = next(line for line in printed.splitlines() if "SGD instead of AdamW" in line)
    assert "+0.0 %" in row and "different" in row
    assert "Judged on two real steps of the same model on this CPU" in printed


def test_the_document_has_every_figure_of_the_rows() -> None:
    document = read(*MLP, "--budget", "1100KiB")
    as_is, rows = document["as_is"], document["rows"]
    assert not as_is["fits"] and document["budget_bytes"] == 1100 * 1024
    assert [row["step"]["fits"] for row in rows] == sorted((row["step"]["fits"] for row in rows), reverse=True)
    for row in rows:
        assert row["saved_bytes"] == as_is["step_peak_bytes"] - row["step"]["step_peak_bytes"] > 0
        assert row["flop_ratio"] == row["step"]["total_flops"] / as_is["total_flops"] and row["script"]


def test_what_is_not_bitwise_can_be_hidden_and_nothing_that_fits_is_exit_1() -> None:
    document = read(*MLP, "--budget", "1100KiB", "--bitwise", code=1)
    assert not document["combinations"]
    assert all(row["judgement"]["effect"] == "bitwise" for row in document["rows"])


def test_a_card_adds_what_is_reserved() -> None:
    printed = run(*MLP, "--card", "24GiB").stdout
    assert "reserved, which fits in a card of 24.00 GiB" in printed
    as_is = read(*MLP, "--card", "24GiB", "--steps", "3")["as_is"]
    assert as_is["spec"]["card"]["n_steps"] == 3
    assert 0 < as_is["allocated_bytes"] <= as_is["reserved_bytes"]
    assert "no GPU is named" in run(*MLP, "--steps", "3", code=2).stderr


def test_a_share_is_one_of_the_peak_and_another_budget_is_one_sentence(tiny: str) -> None:
    document = read("fit", tiny, "--budget", "99%")
    assert document["budget_bytes"] == int(0.99 * document["as_is"]["step_peak_bytes"])
    for budget in ("+10% time", "60%, +10% time", "device", "card", "60"):
        said = " ".join(run("fit", tiny, "--budget", budget, code=2).stderr.split())
        assert "Traceback" not in said and ("70%" in said or "60 bytes" in said)
    assert "Traceback" not in run("fit", "no_such_file.py", code=2).stderr


def test_a_step_that_is_fused_already_is_played_as_it_is() -> None:
    document = read(*MLP, "--optimizer-form", "fused")
    assert document["as_is"]["spec"]["optimizer_form"] == document["judged_on"]["optimizer_form"] == "fused"
    offered = {key for row in document["rows"] for key in row["levers"]}
    assert not offered & {"foreach", "fused"}


def test_a_recorded_step_is_answered_from_its_file(tmp_path: Path) -> None:
    file = Adam().recorded().save(tmp_path / "step.explorer")
    document = read("fit", str(file), "--budget", "1KiB", code=1)
    assert document["rows"] and not any(row["step"]["fits"] for row in document["rows"])
    assert "not run again" in run("fit", str(file), "--card", "h100").stdout
