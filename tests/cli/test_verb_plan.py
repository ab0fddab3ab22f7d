"""The verb plan: budgets, proofs, runs that confirm them, and the ladder for models that do not fit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from explorer.plan.planners.front import splits_of
from explorer.plan.policy import file as policy_file
from explorer.record.run import Ranks
from tests.cli.asked import read, run

pytestmark = pytest.mark.usefixtures("shared")

UNET = ("plan", "sample_models/unet.py", "--set", "batch=2", "--set", "depth=2", "--repeats", "1")


@pytest.mark.slow
def test_a_plan_is_confirmed_by_a_run_and_written_with_its_evidence(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    document = read(*UNET, "--budget", "70%", "--out", str(path))
    plan, measured = document["plan"], document["measured"]
    assert document["met"] and not document["missed"]
    assert measured["step_peak_bytes"] <= plan["budget_bytes"] < document["first_run"]["step_peak_bytes"]
    assert plan["step_peak_bytes"] == pytest.approx(measured["step_peak_bytes"], rel=2e-3)
    assert plan["certificate"]["bound"] <= plan["extra_cost"] and plan["cost_ratio"] > 1
    file = policy_file.load(str(path))
    assert file.evidence is not None and file.evidence.step_peak_bytes == measured["step_peak_bytes"]
    assert list(file.policy.blocks) == [fqn for unit in plan["policy"]["units"] for fqn in unit["blocks"]]


@pytest.mark.slow
def test_a_plan_of_what_is_only_predicted_says_so_and_has_no_evidence(wide: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    printed = run("plan", wide, "--budget", "70%", "--predict", "--out", str(path)).stdout
    assert "played without data" in printed and "measured" not in printed
    assert "What kernels take for themselves is not in it" in " ".join(printed.split())
    file = policy_file.load(str(path))
    assert file.evidence is None and file.policy.units


REFUSING = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient)
        return x


def build():
    return Net(), torch.randn(2048, 16)
"""


@pytest.mark.slow
def test_a_segment_that_the_model_refuses_is_struck(tmp_path: Path) -> None:
    (tmp_path / "refusing.py").write_text(REFUSING)
    result = run("plan", f"{tmp_path / 'refusing.py'}:build", "--budget", "60%", "--repeats", "1", "--json")
    document = json.loads(result.stdout)
    assert document["met"] and document["refused_segments"][0] == ["blocks.0", "blocks.1"]
    units = document["plan"]["policy"]["units"]
    assert units and not any(
        set(pair) <= set(unit["blocks"]) for unit in units for pair in document["refused_segments"]
    )
    assert "The model refuses blocks.0 and blocks.1 as one segment: planned again without it." in result.stderr


@pytest.mark.slow
def test_a_budget_out_of_reach_is_one_sentence() -> None:
    result = run(*UNET, "--budget", "1MiB", code=2)
    assert "o policy brings this step below 1.0 MiB: the least that can be reached is" in result.stderr
    assert "Traceback" not in result.stderr and not result.stdout


@pytest.mark.slow
def test_the_least_memory_for_some_time() -> None:
    printed = " ".join(run(*UNET, "--time", "+10%").stdout.split())
    assert "predicted from measured times; " in printed and "needs less memory" in printed
    assert "% measured, in turns" in printed


WIDE = """
import torch
from torch import nn


def build():
    blocks = [nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 64)) for _ in range(6)]
    return nn.Sequential(*blocks), torch.randn(8192, 64)
"""
"""Six blocks that keep 34 MiB each; everything kept peaks at 277 MiB."""


@pytest.fixture
def wide(tiny: str) -> str:
    """One file for all tests, so that equal requests are answered once."""
    path = Path(tiny).with_name("wide.py")
    path.write_text(WIDE)
    return f"{path}:build"


@pytest.mark.slow
def test_a_plan_for_a_card_fits_what_its_allocator_can_reserve(wide: str) -> None:
    """Driver and context leave 300 MiB. With everything kept the peak is below them, and the reserved memory above."""
    answer = run("plan", wide, "--predict", "--card", "1100MiB", "--json")
    document = json.loads(answer.stdout)
    card, first = document["card"], document["first_run"]
    assert document["met"] and document["plan"]["policy"]["units"]
    assert card["bounded"] == "reserved_bytes" and card["refused_bytes"] is None and card["refused"] is None
    assert document["plan"]["bounded"] == "reserved"
    assert card["allocated_bytes"] + card["stranded_bytes"] == card["reserved_bytes"] <= card["capacity_bytes"]
    assert first["step_peak_bytes"] < card["capacity_bytes"] == document["plan"]["budget_bytes"] == 300 * 2**20
    assert (
        first["refused_bytes"] == first["refused"]["n_bytes"]
        and document["measured"]["reserved_bytes"] == card["reserved_bytes"]
    )
    assert len(document["missed"]) == 1 and document["missed"][0]["card"]["refused"]
    assert "would reserve 24.0 MiB more than a card of 1.07 GiB has: planned again" in " ".join(answer.stderr.split())


@pytest.mark.slow
def test_a_plan_for_a_card_says_what_was_bounded(wide: str) -> None:
    asked = ("--predict", "--card", "1100MiB", "--allocator", "expandable_segments:True", "--budget", "50%")
    printed = " ".join(run("plan", wide, *asked).stdout.split())
    assert "300.0 MiB for the reserved memory on a card of 1.07 GiB, " in printed
    assert re.search(r" for the peak, [\d.]+ MiB to spare, kept", printed)
    assert "Bounded: reserved bytes." in printed
    assert "of it stranded" in printed and "Not checked expandable_segments:True" in printed


def test_a_card_that_no_policy_fits_is_the_planners_sentence(wide: str) -> None:
    result = run("plan", wide, "--predict", "--card", "830MiB", code=2)
    assert not result.stdout
    said = " ".join(result.stderr.split())
    assert re.search("o policy (was found that )?brings this step below 30.0 MiB: the least that", said), said


@pytest.mark.parametrize(("arguments", "sentence"), [
    ([], "needs one of --budget and --time"),
    (["--budget", "+10 % time", "--time", "+5%"], "both limit the time"),
    (["--budget", "card"], "none is named"),
    (["--budget", "1000000"], "1000000 has no unit"),
    (["--budget", ">60 MiB"], "the most that may be used"),
    (["--budget", "60XX"], "'60XX' is not a size"),
    (["--time", "10"], "'10' is not a share"),
    (["--card", "b200"], "this run does not predict for one"),
    (["--predict", "--card", "b201"], "neither a card that is listed here nor a size"),
    (["--predict", "--card", "700MiB"], "driver and context may take 800.0 MiB of it"),
])  # fmt: skip
def test_what_is_asked_for_must_be_one_thing(arguments: list[str], sentence: str) -> None:
    assert sentence in run(*UNET, *arguments, code=2).stderr


UNEVEN = """
import torch
from torch import nn


def build():
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 257), nn.Tanh(), nn.Linear(257, 64)) for _ in range(3))), (
        torch.randn(128, 64)
    )
"""
"""The shards of two ranks differ: 257 rows."""


def test_a_plan_for_ranks_is_played_and_chooses_whether_to_reshard(tmp_path: Path) -> None:
    """With room for everything a rank gathers once. With less room it frees, and recomputes fewer FLOPs for that.

    The policy file carries the choice, and a prediction under it takes the choice. `--fsdp 2` is two ranks.
    """
    (tmp_path / "uneven.py").write_text(UNEVEN)
    options = (f"{tmp_path / 'uneven.py'}:build", "--optimizer", "sgd", "--predict", "--fsdp", "2")
    model = ("plan", *options)
    file = tmp_path / "policy.yaml"
    roomy = read(*model, "--budget", "6MiB", "--out", str(file))
    tight = read(*model, "--budget", "1.2MiB")
    assert policy_file.load(file).ranks == Ranks(n_ranks=2, reshard=False)
    assert not roomy["ranks"]["reshard"] and roomy["plan"]["extra_cost"] == 0
    for told, reshard in (((), False), (("--reshard",), True)):
        under_it = read("measure", *options, "--policy", str(file), *told)
        assert {run["spec"]["ranks"]["reshard"] for run in under_it["ranks"]} == {reshard}
    assert tight["ranks"]["reshard"] and tight["plan"]["policy"]["units"]
    assert tight["gathered_bytes"] == 2 * roomy["gathered_bytes"]
    (instead,) = tight["instead"]
    assert not instead["ranks"]["reshard"] and instead["plan"]["extra_cost"] > tight["plan"]["extra_cost"]
    played = tight["measured"]["step_peak_bytes"]
    assert tight["met"] and played <= tight["plan"]["budget_bytes"] and tight["plan"]["proven"]
    assert tight["plan"]["step_peak_bytes"] - played <= 2**14, "the states of generators"
    kept = Ranks(n_ranks=2, data="fsdp", reshard=False)
    assert splits_of(kept, False) == (kept,), "--no-reshard leaves no choice"
