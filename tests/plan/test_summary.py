"""What a summary says of a peak that no policy lowers."""

from __future__ import annotations

import re

import msgspec
import pytest

from explorer.engine.bench.measure import measure_and_describe
from explorer.plan.memory.ledger import PLURAL
from explorer.plan.summary import LOWERED_BY, _changes, _fixed, _next_command, fits_text, summarize
from explorer.record import ModelRef, RunSpec
from explorer.record.measurement import AllocatorPeaks
from tests.view.builders import measured


@pytest.mark.parametrize("role", LOWERED_BY)
def test_the_largest_role_that_no_policy_lowers_is_named_with_what_does(role: str) -> None:
    text = _fixed({role: 700 << 20, "saved activation": 300 << 20, **{r: 1 << 20 for r in LOWERED_BY if r != role}})
    assert f"{PLURAL[role]} (700.0 MiB): {LOWERED_BY[role]}" in text  # type: ignore[index]
    assert "704.0 MiB of the peak" in text


@pytest.mark.parametrize("held", [{}, {"saved activation": 10, "parameter": 9}, {"temporary": 5, "recomputed": 5}])
def test_a_peak_that_a_policy_may_lower_has_no_such_sentence(held: dict[str, int]) -> None:
    assert _fixed(held) == ""


@pytest.mark.parametrize(("name", "verb"), [("m.py", "fit m.py"), ("step2.explorer", "step2.explorer --html")])
def test_levers_are_named_where_a_model_can_be_changed_and_not_of_a_record(name: str, verb: str) -> None:
    run = msgspec.structs.replace(measured(), spec=RunSpec(model=ModelRef(target="m.py")))
    assert _next_command(run, name, ()).startswith(f"checkpoint-explorer {verb}")


@pytest.mark.parametrize(
    ("reserved", "steady", "total", "says"),
    [
        (3 << 30, None, 4 << 30, "yes, 3.00 GiB reserved of 4.00 GiB"),
        (3 << 30, 2 << 30, 4 << 30, "yes, 2.00 GiB reserved of 4.00 GiB"),
        (3 << 30, None, 2 << 30, "no, 3.00 GiB reserved of 2.00 GiB"),
    ],
)
def test_a_step_fits_a_gpu_by_what_the_allocator_reserved(
    reserved: int, steady: int | None, total: int, says: str
) -> None:
    peaks = AllocatorPeaks(reserved_peak_bytes=reserved, steady_reserved_peak_bytes=steady)
    run = measured()
    gpu = msgspec.structs.replace(run.environment, device="cuda", device_name="T4", total_memory_bytes=total)
    summary = summarize(msgspec.structs.replace(run, peaks=peaks, environment=gpu), name="step2.explorer")
    assert fits_text(summary) == f"T4: {says}; --card NAME says it for another GPU"


def test_where_recompute_frees_little_the_least_reachable_peak_is_said() -> None:
    arguments = {"n_layers": 1, "width": 256, "batch": 2}
    spec = RunSpec(model=ModelRef(target="sample_models/mlp.py", size="small", arguments=arguments), n_repeats=0)
    changes, reason = _changes(measure_and_describe(spec))
    assert not changes
    assert re.fullmatch(r"Recompute frees less than 15 % of this peak: the least that .* is [\d.]+ MiB.*\.", reason)
