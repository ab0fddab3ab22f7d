"""Caveats beside a peak, and causes of gradients that differ."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from explorer.plan.memory.reruns import in_words, reruns_outside, self_checkpointing
from explorer.plan.why.caveats import peak_caveats, why_not_predicted
from explorer.plan.why.gradients import causes, patterns
from explorer.record.allocations import ROLES, Allocations
from explorer.record.base import column
from explorer.record.comparison import ForwardDiff, MaskDiff, RngDiff, StateChange
from explorer.record.graph import Hazard
from explorer.record.measurement import MeasuredBlock, Measurement
from explorer.record.plan import Forecast
from explorer.record.policy import Policy, Unit
from explorer.record.run import RunSpec
from tests.graphs import changed, with_costs
from tests.plan.why.test_peak import graph
from tests.record.test_comparison import STEP, compared, gradient
from tests.view.builders import measured


def logged(**changes: object) -> Measurement:
    run = measured()
    assert run.allocations is not None
    return msgspec.structs.replace(run, allocations=msgspec.structs.replace(run.allocations, **changes))


def log() -> Allocations:
    allocations = measured().allocations
    assert allocations is not None
    return allocations


def test_a_plain_chain_needs_no_word() -> None:
    assert peak_caveats(measured()) == ()
    assert peak_caveats(msgspec.structs.replace(measured(), allocations=None)) == ()


def test_a_large_share_that_is_nobodys_is_said_with_its_size() -> None:
    roles = [ROLES.index("unattributed") if ROLES[role] == "optimizer state" else role for role in log().role]
    (sentence,) = peak_caveats(logged(role=column(roles)))
    lost = sum(
        size for size, role, born, died in zip(log().n_bytes, roles, log().born, log().died)
        if ROLES[role] == "unattributed" and born <= log().peak_tick < died
    )  # fmt: skip
    assert sentence.startswith(f"{100 * lost / max(log().held_bytes):.0f} % of the peak is unattributed")


@pytest.mark.parametrize(("capability", "default"), [("8.0", 8519680), ("9.0", 33554432)])
def test_the_peak_with_torchs_own_workspaces_stands_beside_that_of_a_setting(capability: str, default: int) -> None:
    """By pencil: one workspace of 32 MiB is alive throughout, so the peak drops by the difference."""
    n, workspace = log().n_ticks, 32 * 2**20
    more = {
        "n_bytes": workspace,
        "born": 0,
        "died": n + 1,
        "role": ROLES.index("cuBLAS workspace"),
        "block": 0,
        "op": 0,
    }
    run = logged(**{name: column([*getattr(log(), name), value]) for name, value in more.items()})

    def under(setting: str) -> tuple[str, ...]:
        where = {"torch_version": "2.13.0+cu130", "capability": capability, "allocator_settings": setting}
        return peak_caveats(msgspec.structs.replace(run, environment=msgspec.structs.replace(run.environment, **where)))

    assert under("") == ()
    sentences = under("PYTORCH_ALLOC_CONF=x CUBLAS_WORKSPACE_CONFIG=:4096:8")
    peak = max(log().held_bytes) + default
    assert sentences == () if default == workspace else f"peaks at {peak / 2**20:.1f} MiB" in sentences[0]


def test_a_recorded_peak_that_misses_what_cpp_holds_is_the_least() -> None:
    recorded = msgspec.structs.replace(logged(ops=(*log().ops, "aten::convolution")), origin="recorded", graph=graph())
    (of_convolutions,) = peak_caveats(recorded)
    wrapped = msgspec.structs.replace(graph().blocks[0], kind="DistributedDataParallel")
    parallel = msgspec.structs.replace(graph(), blocks=(wrapped, *graph().blocks[1:]))
    (of_buckets,) = peak_caveats(msgspec.structs.replace(recorded, graph=parallel))
    assert "at least" in of_convolutions and "oneDNN" in of_convolutions
    assert "at least" in of_buckets and "buckets in C++" in of_buckets
    assert "67 % more in bfloat16" in peak_caveats(msgspec.structs.replace(recorded, origin="predicted"))[0]
    measured_alone = msgspec.structs.replace(recorded, origin="measured")
    assert peak_caveats(measured_alone) == (), "its processes have no reducer, and torch's allocator is seen"


def test_recurrent_layers_of_onednn_are_named() -> None:
    (sentence,) = peak_caveats(logged(ops=(*log().ops, "aten::mkldnn_rnn_layer")))
    assert "oneDNN" in sentence and "7 %" in sentence


def test_a_peak_of_drawn_layers_is_one_draw() -> None:
    (sentence,) = peak_caveats(with_costs(measured(), "layers.1", "layers.2", n_forward=0))
    assert sentence.startswith("One draw: layers.1, layers.2 did not run in this step.")
    assert peak_caveats(with_costs(measured(), n_forward=0)) == (), "a list that nobody runs is no draw"


def test_why_a_peak_is_not_foretold() -> None:
    caching = changed(graph(), layers__0={"traits": ("keeps_cache",)})
    plain, cached = Policy.recompute(["layers.1"]), Policy.recompute(["layers.0"])
    assert why_not_predicted(plain, caching, Forecast()) == ""
    assert why_not_predicted(cached, caching, Forecast(step_peak_bytes=1)) == "", "somebody did foretell it"
    assert "layers.0 are handed a cache" in why_not_predicted(cached, caching, Forecast())
    reentrant = msgspec.structs.replace(plain, use_reentrant=True)
    assert why_not_predicted(reentrant, graph(), Forecast()) == (
        "The forecast does not cover reentrant checkpointing: press Run."
    )
    views = Policy(units=(Unit(blocks=("layers.1",), action="save_ops", save_ops=("aten.view.default",)),))
    assert "aten.view.default returns memory that another operator made" in why_not_predicted(
        views, graph(), Forecast()
    )


RUN = measured(recompute=[0, 1])
UNORDERED = msgspec.structs.replace(RUN, spec=msgspec.structs.replace(RUN.spec, policy=Policy()))


def cost(fqn: str, n_forward: int, n_recompute: int) -> MeasuredBlock:
    return msgspec.structs.replace(RUN.blocks[0], fqn=fqn, n_forward=n_forward, n_recompute=n_recompute)


def test_what_a_policy_ordered_is_no_news() -> None:
    assert self_checkpointing(RUN) == {"layers": 1.0}, "the list around them was ordered by nobody"
    ordered = msgspec.structs.replace(RUN, spec=msgspec.structs.replace(RUN.spec, policy=Policy.recompute(["layers"])))
    assert self_checkpointing(ordered) == {} and in_words(ordered) == ""


def test_the_outermost_is_named_with_how_often_it_ran_again() -> None:
    costs = [cost("a", 2, 4), cost("a.b", 2, 4), cost("c", 1, 0)]
    assert reruns_outside(costs, ()) == {"a": 2.0}
    assert reruns_outside(costs, ("a",)) == {}
    assert in_words(UNORDERED) == "layers ran again ×1, by the model itself"


def test_a_block_whose_hooks_stayed_silent_ran_again_where_all_inside_did() -> None:
    assert reruns_outside([cost("a", 1, 0), cost("a.b", 1, 1), cost("a.c", 1, 2)], ()) == {"a": 1.0}
    assert reruns_outside([cost("a", 1, 0), cost("a.b", 1, 1), cost("a.c", 1, 0)], ()) == {"a.b": 1.0}


WRONG = gradient("w", bitwise=False, relative_norm=0.5, norm_ratio=1.0, cosine=0.5)


def told(*gradients: Any, policy: Policy = Policy.recompute(["a"]), **evidence: Any) -> tuple[str, ...]:  # noqa: B008
    candidate = replace(STEP, spec=RunSpec(model=STEP.spec.model, policy=policy))
    return causes(replace(compared(*(gradients or (WRONG,)), **evidence), candidate=candidate))


def moved(name: str, kind: str) -> StateChange:
    return StateChange(block="a", name=name, kind=kind, after_forward="1", after_backward="2")


CAUSES = [
    ({"masks": (MaskDiff(block="a", n_elements=10, n_mismatched=4),)}, "The dropout mask differs in a between"),
    ({"rng": (RngDiff(generator="python", equal=False),)}, "The recompute drew from python again"),
    ({"rng": (RngDiff(generator="torch cpu", equal=False),)}, "The generator torch cpu stands elsewhere"),
    ({"state_changes": (moved("running_mean", "buffer"),)}, "Running statistics moved twice in a"),
    ({"state_changes": (moved("n", "attribute"),)}, "The recompute changed the attribute n of a a second time (1 → 2)"),
]


@pytest.mark.parametrize(("evidence", "cause"), CAUSES)
def test_evidence_is_named(evidence: dict[str, Any], cause: str) -> None:
    assert told(**evidence)[0].startswith(cause)


def test_masks_come_before_state() -> None:
    both = {**CAUSES[0][0], **CAUSES[3][0]}
    assert [cause.split()[0] for cause in told(**both)] == ["The", "Running"]


def test_an_option_that_is_off_is_said_with_the_mask() -> None:
    careless = Policy.recompute(["a"], preserve_rng_state=False)
    assert told(policy=careless, **CAUSES[0][0])[0].endswith("preserve_rng_state is off.")


def test_a_gradient_that_never_came_has_a_reason_under_reentrant() -> None:
    gone = gradient("w", presence="baseline only", bitwise=False)
    assert told(gone)[0] == "No gradient came for w."
    assert (
        "reentrant checkpointing passes no gradient"
        in told(gone, policy=Policy.recompute(["a"], use_reentrant=True))[0]
    )


@pytest.mark.parametrize(("ratios", "says"), [((2.0, 2.0), True), ((2.0, 3.0), False), ((1.0, 1.0), False)])
def test_one_factor_for_all_is_a_divisor(ratios: tuple[float, ...], says: bool) -> None:
    wrong = [gradient(str(r), bitwise=False, norm_ratio=r, cosine=1.0, relative_norm=1.0) for r in ratios]
    assert any("2 times the baseline's, in the same direction" in cause for cause in told(*wrong)) == says


def test_nan_of_both_runs_is_said_of_equal_ones() -> None:
    assert told(gradient("w", n_nonfinite=1))[0].startswith("NaN or infinity stands in w of both runs")


def test_without_evidence_it_says_what_was_looked_at_and_what_not() -> None:
    (cause,) = told(rng=(RngDiff(generator="torch cpu", equal=True),))
    assert cause.startswith("Looked at and equal: the positions of 1 generator.")
    assert "what the model remembers was not looked at" in cause


def test_a_hazard_of_a_block_without_tensors_is_a_cause_and_the_last_block_is_named() -> None:
    equal = [gradient("2.w"), gradient("3.w")]
    wrong = compared(gradient("0.w", bitwise=False), gradient("1.w", bitwise=False), *equal)
    wrong = replace(wrong, candidate=replace(wrong.candidate, spec=replace(wrong.candidate.spec, policy=UNITS)))
    hazard = Hazard(rule="moved-attributes", severity="warning", blocks=("queue",), sentence="It moves.", remedy="")
    assert causes(wrong, (hazard,)) == ("Known before the run: It moves.",)
    assert len(causes(wrong, (replace(hazard, blocks=("2",)),))) == 2, "2 has a gradient, and the gradient is equal"
    assert causes(wrong)[1].startswith(
        "Look first at the recompute of 1. In the model's order 1.w is the last gradient that differs; "
        "the 2 gradients after it are equal."
    )


UNITS = Policy.recompute(["0", "1", "queue"])
FORWARD = ForwardDiff(n_calls=(1, 1), n_compared=4, order=("", "a", "b", "c"), same=True)


def pattern_of(wrong: str, *, forward: ForwardDiff | None = FORWARD, **more: Any) -> str:
    gradients = [gradient(f"{block}.w", bitwise=block not in wrong) for block in "abc"]
    return " ".join(patterns(compared(*gradients, forward=forward, **more)))


@pytest.mark.parametrize(("wrong", "says"), [
    ("ab", "backward is the same down to c.w, and 2 of the 2 gradients before it differ, b.w first"),
    ("a", "the gradient of a.w alone differs"),
    ("abc", "3 of 3 gradients differ, that of the last block among them"),
    ("", ""),
])  # fmt: skip
def test_equal_forwards_leave_backward(wrong: str, says: str) -> None:
    assert says in pattern_of(wrong) and bool(pattern_of(wrong)) == bool(wrong)


def test_a_loss_that_is_not_known_to_be_equal_stays_among_the_causes() -> None:
    assert "shifted targets" in pattern_of("ab") and "shifted targets" not in pattern_of("ab", loss_equal=True)
    assert pattern_of("ab", loss_equal=False).startswith("The model returns the same and the loss is another.")


def test_forward_that_differs_by_rounding_alone_is_not_called_the_same() -> None:
    assert pattern_of("ab", forward=replace(FORWARD, same=False)) == ""
    assert pattern_of("ab", forward=None) == ""


def test_a_step_after_the_first_is_distinct_texts() -> None:
    later = (gradient("a.w", bitwise=False),)
    assert pattern_of("", later_gradients=later).startswith(
        "The gradients of the first step are the same and those of a"
    )
    assert "first step" not in pattern_of("a", later_gradients=later)
