"""`--results`: what is typed may not deny the plan that ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from explorer.cli.results import spec_of_results
from explorer.errors import InvalidPlan, UnreadableFile
from explorer.plan.export.torchrun import run_key
from explorer.record import KEEP_ALL, ModelRef, PipelinePlan, Policy, RunSpec
from explorer.record.base import to_json

RAN = RunSpec(
    model=ModelRef(target="net.py:build"),
    plan=PipelinePlan(stages=(("a",), ("b",)), n_microbatches=4, schedule="1F1B"),
    policy=Policy.recompute(["a"]),
)


def opened(folder: Path, *typed: str, **changed: Any) -> RunSpec:
    """What `--results` makes of options that differ from what ran in `changed`."""
    (folder / "run_spec.json").write_bytes(to_json(RAN))
    of_plan = {name: changed.pop(name) for name in ("schedule", "n_microbatches") if name in changed}
    plan = msgspec.structs.replace(RAN.plan, **of_plan)
    asked = msgspec.structs.replace(RAN, model=ModelRef(target="elsewhere/net.py:build"), plan=plan, policy=KEEP_ALL)
    asked = msgspec.structs.replace(asked, **changed)
    return spec_of_results(folder / "results", asked, lambda: KEEP_ALL, typed.__contains__)


def test_results_come_with_the_plan_that_ran(tmp_path: Path) -> None:
    spec = opened(tmp_path)
    assert (spec.plan, spec.policy) == (RAN.plan, RAN.policy)
    assert spec.model.target == "elsewhere/net.py:build"
    assert run_key(spec) == run_key(RAN)


@pytest.mark.parametrize(
    ("option", "changed", "sentence"),
    [
        ("schedule", {"schedule": "GPipe"}, "its schedule was 1F1B, not GPipe"),
        ("microbatches", {"n_microbatches": 8}, "4 microbatches, not 8"),
        ("seed", {"seed": 1}, "seed was 0, not 1"),
        ("policy", {}, "recomputes other blocks"),
        ("model", {"model": ModelRef(target="other.py:build")}, "its model was net.py:build"),
    ],
)
def test_what_is_typed_may_not_deny_what_ran(tmp_path: Path, option: str, changed: dict, sentence: str) -> None:
    with pytest.raises(InvalidPlan, match=sentence):
        opened(tmp_path, option, **changed)


def test_results_without_their_spec_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile, match="what ran there is not known"):
        spec_of_results(tmp_path / "results", RAN, lambda: KEEP_ALL, {"seed"}.__contains__)
