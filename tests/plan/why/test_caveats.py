"""What a reader should know beside a figure, and what a model ran again by itself."""

from __future__ import annotations

import msgspec

from explorer.plan.why.caveats import beside_peak, in_words, not_foretold, own_reruns, reruns_beside
from explorer.record.allocations import ROLES, Allocations
from explorer.record.base import column
from explorer.record.graph import ModelGraph
from explorer.record.measurement import MeasuredBlock, Measurement
from explorer.record.plan import Forecast
from explorer.record.policy import Policy, Unit
from tests.plan.why.test_peak import graph
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
    assert beside_peak(measured()) == ()
    assert beside_peak(msgspec.structs.replace(measured(), allocations=None)) == ()


def test_a_large_share_that_is_nobodys_is_said_with_its_size() -> None:
    roles = [ROLES.index("unattributed") if ROLES[role] == "optimizer state" else role for role in log().role]
    (sentence,) = beside_peak(logged(role=column(roles)))
    lost = sum(
        size for size, role, born, died in zip(log().n_bytes, roles, log().born, log().died)
        if ROLES[role] == "unattributed" and born <= log().peak_tick < died
    )  # fmt: skip
    assert sentence.startswith(f"{100 * lost / max(log().held_bytes):.0f} % of the peak is unattributed")


def test_a_recorded_peak_that_misses_what_cpp_holds_is_the_least() -> None:
    recorded = msgspec.structs.replace(logged(ops=(*log().ops, "aten::convolution")), origin="recorded", graph=graph())
    (of_convolutions,) = beside_peak(recorded)
    wrapped = msgspec.structs.replace(graph().blocks[0], kind="DistributedDataParallel")
    parallel = msgspec.structs.replace(graph(), blocks=(wrapped, *graph().blocks[1:]))
    (of_buckets,) = beside_peak(msgspec.structs.replace(recorded, graph=parallel))
    assert "at least" in of_convolutions and "oneDNN" in of_convolutions
    assert "at least" in of_buckets and "buckets in C++" in of_buckets
    measured_alone = msgspec.structs.replace(recorded, origin="measured")
    assert beside_peak(measured_alone) == (), "its processes have no reducer, and torch's allocator is seen"


def test_recurrent_layers_of_onednn_are_named() -> None:
    (sentence,) = beside_peak(logged(ops=(*log().ops, "aten::mkldnn_rnn_layer")))
    assert "oneDNN" in sentence and "7 %" in sentence


def test_a_peak_of_drawn_layers_is_one_draw() -> None:
    run = measured()
    idle = tuple(
        msgspec.structs.replace(block, n_forward=0) if block.fqn in ("layers.1", "layers.2") else block
        for block in run.blocks
    )
    (sentence,) = beside_peak(msgspec.structs.replace(run, blocks=idle))
    assert sentence.startswith("One draw: layers.1, layers.2 did not run in this step.")
    none = tuple(msgspec.structs.replace(block, n_forward=0) for block in run.blocks)
    assert beside_peak(msgspec.structs.replace(run, blocks=none)) == (), "a list that nobody runs is no draw"


def caching() -> ModelGraph:
    blocks = tuple(
        msgspec.structs.replace(block, traits=("keeps_cache",)) if block.fqn == "layers.0" else block
        for block in graph().blocks
    )
    return msgspec.structs.replace(graph(), blocks=blocks)


def test_why_a_peak_is_not_foretold() -> None:
    plain, cached = Policy.recompute(["layers.1"]), Policy.recompute(["layers.0"])
    assert not_foretold(plain, caching(), Forecast()) == ""
    assert not_foretold(cached, caching(), Forecast(step_peak_bytes=1)) == "", "somebody did foretell it"
    assert "layers.0 are handed a cache" in not_foretold(cached, caching(), Forecast())
    reentrant = msgspec.structs.replace(plain, use_reentrant=True)
    assert not_foretold(reentrant, graph(), Forecast()) == (
        "The forecast does not cover reentrant checkpointing: press Run."
    )
    views = Policy(units=(Unit(blocks=("layers.1",), action="save_ops", save_ops=("aten.view.default",)),))
    assert "aten.view.default returns memory that another operator made" in not_foretold(views, graph(), Forecast())


RUN = measured(recompute=[0, 1])
UNORDERED = msgspec.structs.replace(RUN, spec=msgspec.structs.replace(RUN.spec, policy=Policy()))


def cost(fqn: str, n_forward: int, n_recompute: int) -> MeasuredBlock:
    return msgspec.structs.replace(RUN.blocks[0], fqn=fqn, n_forward=n_forward, n_recompute=n_recompute)


def test_what_a_policy_ordered_is_no_news() -> None:
    assert own_reruns(RUN) == {"layers": 1.0}, "the list around them was ordered by nobody"
    ordered = msgspec.structs.replace(RUN, spec=msgspec.structs.replace(RUN.spec, policy=Policy.recompute(["layers"])))
    assert own_reruns(ordered) == {} and in_words(ordered) == ""


def test_the_outermost_is_named_with_how_often_it_ran_again() -> None:
    costs = [cost("a", 2, 4), cost("a.b", 2, 4), cost("c", 1, 0)]
    assert reruns_beside(costs, ()) == {"a": 2.0}
    assert reruns_beside(costs, ("a",)) == {}


def test_a_block_whose_hooks_stayed_silent_ran_again_where_all_inside_did() -> None:
    assert reruns_beside([cost("a", 1, 0), cost("a.b", 1, 1), cost("a.c", 1, 2)], ()) == {"a": 1.0}
    assert reruns_beside([cost("a", 1, 0), cost("a.b", 1, 1), cost("a.c", 1, 0)], ()) == {"a.b": 1.0}


def test_it_is_said_in_one_clause() -> None:
    assert in_words(UNORDERED) == "layers ran again ×1, by the model itself"
