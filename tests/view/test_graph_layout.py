"""Layout of the block graph: nesting, lanes, geometry and flow."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer.record import CutPoint, Edge, ModelGraph, ModelRef
from explorer.view.graph.flow import lanes, ranked
from explorer.view.graph.geometry import BlockRow, JoinMark, Layout, layout
from explorer.view.graph.nesting import FEW, RUN, ancestors, default_open, nest
from tests import graphs


def test_a_container_of_equals_is_the_run_and_equals_among_others_get_a_node() -> None:
    graph = graphs.gpt(4)
    nodes = nest(graph)
    toggled = {id for id, node in nodes.items() if node.toggles}
    assert toggled == {block.fqn for block in graph.blocks if block.fqn and block.n_calls}, "not the model itself"
    assert nodes["blocks"].members == tuple(f"blocks.{i}" for i in range(4))
    inner = nest(graphs.gpt(1, n_inner=3))
    runs = [node for id, node in inner.items() if id.startswith(RUN)]
    assert all(node.members == node.children and not node.toggles for node in runs)
    assert not any(node.members for node in nest(graphs.unet()).values()), "no level is as another"


def test_many_equal_children_of_the_model_itself_are_one_row_and_few_stand_side_by_side() -> None:
    def chain(n: int) -> ModelGraph:
        first = graphs.block("0", "Linear")
        others = [graphs.block(str(i), "Linear", repeat_of="0") for i in range(1, n)]
        return ModelGraph(
            model=ModelRef(target="chain"), blocks=(graphs.block("", "Sequential"), first, *others), edges=()
        )

    many, few = layout(chain(FEW + 1)), layout(chain(FEW))
    assert [(row.id, len(row.members)) for row in many.rows] == [(f"{RUN}0", FEW + 1)]
    assert [row.id for row in few.rows] == [str(i) for i in range(FEW)]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).filter(lambda pair: pair[0] != pair[1]), unique=True))
def test_spans_in_one_lane_do_not_touch(spans: list[tuple[int, int]]) -> None:
    lane_of = lanes({span: (min(span), max(span)) for span in spans})
    assert set(lane_of) == set(spans)
    for one, other in itertools.combinations(spans, 2):
        if lane_of[one] == lane_of[other]:
            assert max(one) < min(other) or max(other) < min(one)


def test_skips_of_a_unet_each_have_a_lane() -> None:
    drawing = layout(graphs.unet(4))
    skips = [link for link in drawing.links if link.kind == "skip"]
    # down3 -> up3 passes the bottom only; the four skips enclose each other.
    assert len(skips) == 4
    assert len({link.lane for link in skips}) == 4
    assert all(link.kind != "back" for link in drawing.links)
    neighbours = [link for link in drawing.links if link.kind == "next"]
    assert len(neighbours) == len(drawing.rows) - 1


def everything(graph: ModelGraph) -> list[str]:
    return [node.id for node in nest(graph).values() if node.children]


def rows(drawing: Layout) -> dict[str, BlockRow]:
    return {row.id: row for row in drawing.rows}


@st.composite
def made_graphs(draw: st.DrawFn) -> ModelGraph:
    """Any tree of up to forty blocks, with edges between any two and repeats among siblings."""
    names = [""]
    blocks = [graphs.block("", "Model")]
    for i in range(draw(st.integers(1, 40))):
        parent = draw(st.sampled_from(names))
        siblings = [block for block in blocks if block.fqn and block.parent == parent]
        repeat_of = None
        if siblings and draw(st.booleans()):
            repeat_of = siblings[-1].repeat_of or siblings[-1].fqn
        fqn = f"{parent}.b{i}" if parent else f"b{i}"
        blocks.append(
            graphs.block(fqn, "Block", draw(st.integers(0, 9)), n_calls=draw(st.integers(0, 2)), repeat_of=repeat_of)
        )
        names.append(fqn)
    ends = st.sampled_from(names)
    edges = draw(st.lists(st.builds(Edge, source=ends, target=ends, n_bytes=st.integers(0, 9)), max_size=60))
    order = {block.fqn: i for i, block in enumerate(blocks)}
    pairs = [(a, b) for a, b in itertools.pairwise(names[1:]) if order[a] < order[b]]
    cuts = tuple(CutPoint(after=a, before=b, n_bytes=1, n_tensors=1) for a, b in pairs)
    # Module order: children follow their parent, as in named_modules.
    tree = sorted(
        blocks,
        key=lambda block: (
            [order[".".join(block.fqn.split(".")[: i + 1])] for i in range(block.fqn.count(".") + 1)]
            if block.fqn
            else []
        ),
    )
    return ModelGraph(model=ModelRef(target="made"), blocks=tuple(tree), edges=tuple(edges), cuts=cuts)


@settings(max_examples=25)
@given(made_graphs(), st.data())
def test_boxes_nest_and_never_overlap(graph: ModelGraph, data: st.DataObject) -> None:
    opened = data.draw(st.lists(st.sampled_from([block.fqn for block in graph.blocks]), unique=True))
    opened += [id for id in everything(graph) if id.startswith(RUN)]
    drawing = layout(graph, opened, cuts=data.draw(st.booleans()))
    placed, nodes = rows(drawing), nest(graph)
    assert len(placed) == len(drawing.rows)
    for row in drawing.rows:
        assert row.top >= 0
        assert row.top + row.height <= drawing.height
        parent = nodes[row.id].parent
        if parent:
            box = placed[parent]
            assert box.open
            assert box.top < row.top
            assert row.top + row.height < box.top + box.height
            assert row.left > box.left
            assert row.right > box.right
    for parent in {nodes[row.id].parent for row in drawing.rows}:
        children = sorted((row for row in drawing.rows if nodes[row.id].parent == parent), key=lambda row: row.top)
        for above, below in itertools.pairwise(children):
            assert above.top + above.height < below.top


@settings(max_examples=25)
@given(made_graphs())
def test_every_block_is_somewhere(graph: ModelGraph) -> None:
    nodes = nest(graph)
    assert {id for id in nodes if not id.startswith(RUN)} == {block.fqn for block in graph.blocks}
    assert set(rows(layout(graph, everything(graph)))) == set(nodes) - {""}
    for node in nodes.values():
        assert all(nodes[child].parent == node.id for child in node.children)


@settings(max_examples=25)
@given(made_graphs(), st.data())
def test_unfolding_the_ancestors_brings_a_block_into_view(graph: ModelGraph, data: st.DataObject) -> None:
    fqn = data.draw(st.sampled_from([block.fqn for block in graph.blocks if block.fqn]))
    assert fqn in rows(layout(graph, ancestors(graph, fqn)))


def test_equal_attributes_become_a_node_of_their_own_unless_they_are_few() -> None:
    names = [f"layer{i}" for i in range(4)]
    blocks = [graphs.block("", "M"), graphs.block("stem", "Conv"), graphs.block(names[0], "Layer")]
    blocks += [graphs.block(name, "Layer", repeat_of=names[0]) for name in names[1:]]
    graph = ModelGraph(model=ModelRef(target="made"), blocks=tuple(blocks), edges=())
    assert [row.id for row in layout(graph).rows] == ["stem", "×layer0"]
    assert [row.id for row in layout(graph, ["×layer0"]).rows] == ["stem", "×layer0", *names]
    assert rows(layout(graph))["×layer0"].members == tuple(names)
    assert ancestors(graph, "layer2") == ("×layer0",)
    few = msgspec.structs.replace(graph, blocks=graph.blocks[:-1])
    assert [row.id for row in layout(few).rows] == ["stem", *names[:-1]]


@settings(max_examples=25)
@given(made_graphs(), st.data())
def test_arrows_end_at_what_is_in_view_and_lanes_pass_beside_all_boxes_between(
    graph: ModelGraph, data: st.DataObject
) -> None:
    opened = data.draw(st.lists(st.sampled_from([block.fqn for block in graph.blocks]), unique=True))
    drawing = layout(graph, opened)
    placed: dict[str, BlockRow | JoinMark] = {row.id: row for row in drawing.rows}
    placed |= {mark.id: mark for mark in drawing.joins}
    assert len({(link.source, link.target) for link in drawing.links}) == len(drawing.links)
    for link in drawing.links:
        a, b = placed[link.source], placed[link.target]
        if link.kind == "next":
            assert a.top + a.height <= link.start <= link.end <= b.top
            continue
        assert 0 <= link.lane < min(a.right, b.right)
        assert a.top <= link.start <= a.top + a.height
        assert b.top <= link.end <= b.top + b.height
        low, high = min(link.start, link.end), max(link.start, link.end)
        for row in drawing.rows:
            # Only the boxes around both ends reach further to the right than the lane.
            if low < row.top and row.top + row.height < high:
                assert row.right > link.lane


@pytest.mark.parametrize("opened", [(), ("blocks",)])
def test_cuts_stand_between_neighbours_in_view(opened: tuple[str, ...]) -> None:
    graph = graphs.gpt(3)
    drawing = layout(graph, opened, cuts=True)
    placed = rows(drawing)
    expected = {
        f"{cut.after}>{cut.before}" for cut in graph.cuts if opened or (cut.after + cut.before).count("blocks") != 2
    }
    assert {cut.id for cut in drawing.cuts} == expected
    for cut in drawing.cuts:
        above = placed[after if (after := cut.id.partition(">")[0]) in placed else "blocks"]
        assert above.top < cut.top
    assert layout(graph, opened).cuts == ()
    refused = [cut.refusal for cut in layout(graphs.unet(), cuts=True).cuts if cut.refusal]
    assert refused == ["the skip from down0 crosses"]


def test_at_first_repeats_are_folded_and_a_container_with_most_of_the_bytes_is_open() -> None:
    drawing = layout(graphs.gpt(12), default_open(graphs.gpt(12)))
    assert [row.id for row in drawing.rows] == ["embedding", "dropout", "blocks", "norm", "head"]
    assert rows(drawing)["blocks"].members == tuple(f"blocks.{i}" for i in range(12))
    assert not rows(drawing)["blocks"].toggles, "a ModuleList is never called"
    sizes = {"": ("M", 10), "body": ("Body", 9), "body.a": ("A", 5), "body.b": ("B", 4)}
    blocks = tuple(graphs.block(fqn, kind, size) for fqn, (kind, size) in sizes.items())
    assert default_open(ModelGraph(model=ModelRef(target="made"), blocks=blocks, edges=())) == ("body",)
    graph = graphs.gpt(3)
    assert len({layout(graph, opened).shape for opened in ((), ("blocks",), ("blocks", "blocks.0"))}) == 3
    assert layout(graph, ["head"]).shape == layout(graph).shape, "a leaf has nothing to unfold"


def test_a_thousand_blocks_fold_into_a_few_rows() -> None:
    graph = graphs.gpt(125, n_inner=5)
    assert len(graph.blocks) > 1000
    assert len(layout(graph, default_open(graph)).rows) == 5
    assert len(layout(graph, everything(graph)).rows) == len(nest(graph)) - 1


@given(st.integers(1, 12), st.data())
def test_ranks_follow_the_flow_where_there_is_no_cycle(n: int, data: st.DataObject) -> None:
    ids = [str(i) for i in range(n)]
    shuffled = data.draw(st.permutations(ids))
    pairs = data.draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=30))
    forward = [(str(min(pair)), str(max(pair))) for pair in pairs if pair[0] != pair[1]]
    order = ranked(shuffled, forward)
    assert sorted(order) == sorted(ids)
    assert all(order.index(a) < order.index(b) for a, b in forward)
    cycle = [("a", "b"), ("b", "a"), ("b", "c")]
    assert ranked(["a", "b", "c"], cycle) == ["a", "b", "c"], "a cycle goes on with the first that is left"


def test_residual_additions_are_drawn_where_they_are_in_view() -> None:
    """Into blocks.0 as into one box; inside of it around attention and around the mlp."""
    folded = layout(graphs.gpt(2), ["blocks"])
    assert not folded.joins
    assert [(link.source, link.target, link.n_bytes) for link in folded.links if link.source == "dropout"] == [
        ("dropout", "blocks.0", graphs.MIB // 2)
    ]
    drawing = layout(graphs.gpt(2), ["blocks", "blocks.0"])
    assert [(mark.id, mark.sign) for mark in drawing.joins] == [("blocks.0:add", "+"), ("blocks.0:add.2", "+")]
    name = {"blocks.0:add": "+1", "blocks.0:add.2": "+2"}
    assert {
        (name.get(link.source, link.source), name.get(link.target, link.target), link.kind)
        for link in drawing.links
        if link.source in name or link.target in name or link.source == "dropout"
    } == {
        ("dropout", "blocks.0.attention", "next"),
        ("dropout", "+1", "skip"),
        ("blocks.0.attention", "+1", "next"),
        ("+1", "blocks.0.mlp", "next"),
        ("+1", "+2", "skip"),
        ("blocks.0.mlp", "+2", "next"),
        ("+2", "blocks.1", "next"),
    }


def test_bytes_of_folded_blocks_add_up_on_the_edge() -> None:
    blocks = (
        graphs.block("", "M"),
        graphs.block("a", "A"),
        graphs.block("a.x", "X"),
        graphs.block("a.y", "Y"),
        graphs.block("b", "B"),
    )
    edges = (Edge(source="a.x", target="b", n_bytes=3), Edge(source="a.y", target="b", n_bytes=4))
    graph = ModelGraph(model=ModelRef(target="made"), blocks=blocks, edges=edges)
    assert [(link.source, link.target, link.n_bytes) for link in layout(graph).links] == [("a", "b", 7)]
