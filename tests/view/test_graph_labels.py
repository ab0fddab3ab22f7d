"""Labels of the block graph, and the picture of autograd."""

from __future__ import annotations

import graphviz
import msgspec
import pytest

from explorer.plan.memory.ledger import ledger
from explorer.record import Hazard, Policy, RunSpec
from explorer.view.graph.browser import themed
from explorer.view.graph.labels import Facts, distances_by_block, labels
from tests import graphs
from tests.graphs import ALL, GRAPH, SPEC, gpt


def test_blocks_of_a_segment_say_that_they_are_recomputed_together() -> None:
    policy = Policy.recompute([("blocks.0", "blocks.1", "blocks.2"), "blocks.4"])
    drawn = labels(Facts(graph=gpt(6), policy=policy))
    assert [drawn[f"blocks.{i}"].note for i in range(3)] == ["1 of 3 together", "2 of 3 together", "3 of 3 together"]
    assert "recomputed as one segment: blocks.0 to blocks.2" in drawn["blocks.1"].title
    for alone in ("blocks.3", "blocks.4"):
        assert "together" not in drawn[alone].note and "segment" not in drawn[alone].title


def test_a_block_says_what_it_keeps_frees_and_how_often_it_ran() -> None:
    base, candidate = graphs.measured(GRAPH, RunSpec(model=GRAPH.model)), graphs.measured(GRAPH, SPEC)
    hazard = Hazard(rule="r", severity="error", blocks=("head",), sentence="It breaks.", remedy="Do not.")
    facts = Facts(graph=GRAPH, policy=SPEC.policy, baseline=base, candidate=candidate, hazards=(hazard,))
    drawn = labels(facts)
    assert drawn["blocks.0"].bytes == "15.0 → 0.5 MiB"
    assert drawn["blocks.0"].note == "ran 2×"
    assert drawn["norm"].bytes == "512.0 KiB"
    assert drawn["head"].badges[0].text == "It breaks. Do not."
    unmeasured = labels(Facts(graph=GRAPH, policy=SPEC.policy))
    assert unmeasured["blocks.0"].bytes.endswith("?")


def test_a_block_around_a_hazard_shows_it_too() -> None:
    """A block folded away would not be seen: what stands around it shows its hazard."""
    hazard = Hazard(rule="r", severity="error", blocks=("blocks.2.mlp",), sentence="Something.", remedy="Do.")
    drawn = labels(Facts(graph=GRAPH, policy=Policy(), hazards=(hazard,)))
    assert drawn["blocks.2"].badges[0].text == "Inside: Something. Do."
    assert drawn["blocks"].badges[0].text == "1 of 6 blocks: Inside: Something. Do."
    assert drawn["blocks.1"].badges[0].sign != "✕"


def test_each_is_said_only_of_members_that_are_alike() -> None:
    """Two of six stay: what one member keeps is not what each keeps."""
    base, both = graphs.measured(GRAPH, RunSpec(model=GRAPH.model)), graphs.compared(GRAPH, SPEC)
    every = Facts(graph=GRAPH, policy=SPEC.policy, baseline=base, candidate=both.candidate)
    assert labels(every)["blocks"].bytes == "15.0 → 0.5 MiB each"
    costs = tuple(
        msgspec.structs.replace(cost, saved_after_forward_bytes=2 * graphs.MIB) if cost.fqn == ALL[2] else cost
        for cost in both.candidate.blocks
    )
    segment = msgspec.structs.replace(both.candidate, blocks=costs)
    drawn = labels(msgspec.structs.replace(every, candidate=segment))["blocks"].bytes
    assert drawn == "90.0 → 4.5 MiB in all"
    some = Facts(graph=GRAPH, policy=Policy.recompute(ALL[:4]), baseline=base)
    freed = dict.fromkeys(ALL[:4], 14 * graphs.MIB)
    assert labels(msgspec.structs.replace(some, freed_bytes=freed))["blocks"].bytes == "90.0 → ≈ 34.0 MiB in all"
    assert labels(some)["blocks"].bytes == "90.0 MiB → ? in all"
    assert labels(Facts(graph=GRAPH, policy=Policy(), baseline=base))["blocks"].bytes == "15.0 MiB each"


def test_a_block_whose_blocks_are_recomputed_does_not_say_that_it_keeps_their_bytes() -> None:
    base = graphs.measured(GRAPH, RunSpec(model=GRAPH.model))
    policy = Policy.recompute(["blocks.0.attention", "blocks.0.mlp", "blocks.1"])
    facts = Facts(graph=GRAPH, policy=policy, baseline=base)
    assert labels(facts)["blocks.0"].bytes == "15.0 MiB → ?"
    freed = {fqn: 5 * graphs.MIB for fqn in policy.blocks}
    drawn = labels(msgspec.structs.replace(facts, freed_bytes=freed))
    assert drawn["blocks.0"].bytes == "15.0 → ≈ 5.0 MiB" and drawn["blocks.2"].bytes == "15.0 MiB"
    assert drawn["blocks"].bytes == "90.0 → ≈ 75.0 MiB in all"
    costs = tuple(
        msgspec.structs.replace(cost, saved_after_forward_bytes=4 * graphs.MIB) if cost.fqn == "blocks.0" else cost
        for cost in base.blocks
    )
    ran = msgspec.structs.replace(facts, candidate=msgspec.structs.replace(base, blocks=costs))
    assert labels(ran)["blocks.0"].bytes == "15.0 → 4.0 MiB"
    whole = Facts(graph=GRAPH, policy=SPEC.policy, baseline=base)
    assert labels(whole)["blocks.0.mlp"].bytes == "6.0 MiB with blocks.0", "its bytes are not kept"
    after = labels(msgspec.structs.replace(whole, candidate=graphs.measured(GRAPH, SPEC)))
    assert after["blocks.0.mlp"].bytes.startswith("6.0 → ")


def test_what_a_block_keeps_is_one_figure_in_every_state_of_the_page() -> None:
    pinned = graphs.measured(GRAPH, SPEC)
    kept = {"": None, "measured": graphs.measured(GRAPH, RunSpec(model=GRAPH.model)), "pinned": pinned}
    drawn = {state: labels(Facts(graph=GRAPH, policy=Policy(), baseline=base)) for state, base in kept.items()}
    assert drawn[""] and any(label.bytes for label in drawn[""].values())
    for id in drawn[""]:
        assert len({labels[id].bytes for labels in drawn.values()}) == 1, id


def test_bars_show_how_far_the_gradients_of_each_block_are() -> None:
    last, spec = GRAPH.chain[-1], RunSpec(model=GRAPH.model, policy=Policy.recompute(["blocks.0"]))
    pair = graphs.compared(GRAPH, spec, equal=False)
    nearer = msgspec.structs.replace(pair.gradients[-1], name=f"{GRAPH.chain[0]}.weight", relative_norm=0.002)
    distances = distances_by_block(msgspec.structs.replace(pair, gradients=(*pair.gradients, nearer)))
    assert distances == {last: 0.01, GRAPH.chain[0]: 0.002, "": 0.01}
    facts = Facts(graph=GRAPH, policy=Policy(), distances={last: 0.01, "blocks.3": 0.005, "blocks": 0.005})
    drawn = labels(facts)
    assert {id: label.heat for id, label in drawn.items() if label.heat} == {last: 1, "blocks.3": 0.5, "blocks": 0.5}
    assert drawn["blocks"].bar == "gradients off by 0.005 (measured)" and drawn["blocks"].bar in drawn["blocks"].title
    assert drawn["blocks.1"].bar == "" and "gradients" not in drawn["blocks.1"].title
    moment = labels(msgspec.structs.replace(facts, alive=ledger(graphs.measured(GRAPH, spec), 3)))
    assert not any(label.bar for label in moment.values()) and any(label.heat for label in moment.values())
    assert distances_by_block(graphs.compared(GRAPH, spec)) == distances_by_block(None) == {}


DOT = """digraph {
\tgraph [size="12,12"]
\tnode [align=left fontname=monospace fontsize=10 height=0.2 ranksep=0.1 shape=box style=filled]
\t1 [label="out\\n (4)" fillcolor=darkolivegreen1]
\t2 [label=AddmmBackward0]
\t3 [label="weight\\n (4, 4)" fillcolor=lightblue]
\t4 [label="saved orange" fillcolor=orange]
\t1 -> 2
}
"""


@pytest.mark.parametrize("dark", [True, False])
def test_fills_and_lines_follow_the_page(dark: bool) -> None:
    picture = themed(DOT, dark=dark)
    for fill in ("darkolivegreen1", "lightblue"):
        assert fill not in picture
    assert 'bgcolor="transparent"' in picture
    assert picture.count('fillcolor="#') == 4
    assert 'label="saved orange"' in picture
    assert picture.count("1 -> 2") == 1
    hostile = graphviz.Digraph()
    hostile.node("1", '"] ; evil [label="<img src=x onerror=alert(1)>', fillcolor="lightblue")
    before, after = hostile.source, themed(hostile.source, dark=dark)
    assert after.count("evil") == before.count("evil"), "names stay inside their quotes"
    assert after.splitlines()[-2].split("fillcolor")[0] == before.splitlines()[-2].split("fillcolor")[0]
