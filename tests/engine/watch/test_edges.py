"""Edges follow the data: of sample models by hand, of random nets by construction, at any folding."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor, nn

from explorer.engine.model.describe import describe, describe_step
from explorer.engine.watch.collectives import payload_bytes
from explorer.engine.watch.edges import ELSEWHERE, Datum
from explorer.record.graph import INPUT, ModelGraph, ModelRef
from explorer.view.graph.flow import folded
from explorer.view.graph.nesting import nest
from tests.engine.graphs import ROW, B, W, graph, graph_of


def sample(name: str, **arguments: int | float) -> ModelGraph:
    return describe(ModelRef(target=f"sample_models/{name}.py", arguments=arguments))


def arrows(graph: ModelGraph) -> set[str]:
    return {f"{edge.source} > {edge.target}" for edge in graph.edges}


def chain(*places: str) -> set[str]:
    return {f"{a} > {b}" for a, b in zip(places, places[1:])}


def within(block: str, *arrows: str) -> set[str]:
    """Arrows whose ends are written without the path of `block`."""
    ends = (arrow.split(" > ") for arrow in arrows)
    return {" > ".join(f"{block}{end}" if end[0] in ".:" else end for end in pair) for pair in ends}


def test_unet_and_its_three_skips() -> None:
    graph = sample("unet", width=4, depth=3, side=16, batch=1)
    inner = ("conv1", "norm1", "conv2", "norm2")
    in_order = [f"down.{i}.block.{name}" for i in range(3) for name in inner] + [f"middle.{name}" for name in inner]
    for i in range(3):
        in_order += [f"up.{i}.grow", f"up.{i}:cat", *(f"up.{i}.block.{name}" for name in inner)]
    skips = {f"down.{i}.block.norm2 > up.{2 - i}:cat" for i in range(3)}
    assert arrows(graph) == chain(":input", *in_order, "head") | skips
    flow = folded(graph, nest(graph), {""})
    assert {(a.source, a.target): (a.n_tensors, a.n_bytes) for a in flow.arrows} == {
        (":input", "down"): (1, 3 * 16**2 * 4),
        ("down", "middle"): (1, 16 * 2 * 2 * 4),
        ("down", "up"): (3, (4 * 16**2 + 8 * 8**2 + 16 * 4**2) * 4),
        ("middle", "up"): (1, 32 * 2 * 2 * 4),
        ("up", "head"): (1, 4 * 16**2 * 4),
    }


def test_recurrent_carries_its_state_to_the_next_call() -> None:
    graph = sample("recurrent", length=3, width=8, expansion=2, batch=2, vocabulary=8)
    inside = (":cat > .up", ".up > .gate", ".up > .value", ".gate > :add", ".value > :add", ":add > :cat")
    assert arrows(graph) == {":input > embedding"} | within("cell", "embedding > :cat", *inside, ":add > head")
    assert [f"{edge.source} > {edge.target}" for edge in graph.edges if edge.back] == ["cell:add > cell:cat"]
    carried = {f"{edge.source} > {edge.target}": (edge.n_tensors, edge.n_bytes) for edge in graph.edges}
    state = 2 * 8 * 4
    assert carried["cell:add > cell:cat"] == (2, 2 * state), "the last state goes to the head alone"
    assert carried["cell:add > head"] == carried["embedding > cell:cat"] == (1, 3 * state)
    assert carried["cell.up > cell.value"] == (3, 3 * 2 * state)


def test_moe_routes_the_norm_to_every_expert() -> None:
    graph = sample("moe", n_layers=1, width=8, n_experts=3, length=4, batch=2, vocabulary=8)
    inside = ["embedding > .norm", "embedding > :add", ".norm > .router.score", ".norm > :index"]
    inside += [".router.score > :index", ".router.score > :add"]
    for i in range(3):
        inside += [f":index > .experts.{i}.up", f".experts.{i}.up > .experts.{i}.down", f".experts.{i}.down > :add"]
    assert arrows(graph) == {":input > embedding"} | within("blocks.0", *inside) | chain("blocks.0:add", "norm", "head")


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.document = nn.Linear(W, W), nn.Linear(W, W)
        self.head = nn.Linear(W, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.query(x)) * self.document(x))


def test_both_towers_lead_to_the_head() -> None:
    graph = graph_of(TwoTowers(), torch.randn(B, W))
    assert arrows(graph) == {":input > query", ":input > document", "query > :mul", "document > :mul", ":mul > head"}
    assert [(join.id, join.block, join.op) for join in graph.joins] == [(":mul", "", "mul")]


def test_attention_whose_children_are_never_called_is_one_box() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(W)
            self.attention = nn.MultiheadAttention(W, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            return x + self.attention(x, x, x)[0]

    drawn = arrows(graph_of(Attends(), torch.randn(B, 3, W)))
    assert drawn == {":input > norm", "norm > attention", "norm > :add", "attention > :add"}


class Residual(nn.Module):
    """x + f(x), where x is what the model was given, made ready first; and a table and a constant of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.inner, self.place = nn.Identity(), nn.Linear(W, W), nn.Embedding(B, W)
        self.table = torch.ones(W)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        x = self.start(x.float() / 255)
        x = x + self.inner(x) * self.table * torch.tensor(2.0)
        return (x + self.place(torch.arange(x.shape[0]))) * mask


def test_what_the_model_is_given_flows_too() -> None:
    graph = graph_of(Residual(), {"x": torch.zeros(B, W, dtype=torch.uint8), "mask": torch.ones(B, W)})
    feeding = {f"{source} > :mul" for source in (":input", "start", "inner", "place")}
    why = "the mask and x; no arrow from a table, a constant, or positions that the model makes"
    assert arrows(graph) == {":input > start", "start > inner"} | feeding, why
    flow = folded(graph, nest(graph), {""})
    assert [join.id for join in flow.joins[""]] == [":input", ":mul"]


def test_a_residual_around_the_whole_model_leaves_its_input() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(W, W)

        def forward(self, batch: dict[str, list[Tensor]]) -> Tensor:
            x = batch["x"][0]
            return x + self.inner(x)

    graph = graph_of(Around(), ({"x": [torch.randn(B, W)]},))
    assert arrows(graph) == {":input > inner", ":input > :add", "inner > :add"}
    assert {edge.n_bytes for edge in graph.edges} == {ROW} and not any(edge.back for edge in graph.edges)


def test_an_own_step_is_given_a_batch_as_well() -> None:
    model, x = TwoTowers(), torch.randn(B, W)
    graph = describe_step(model, lambda: model(x).sum().backward(), "<step>")
    assert {":input > query", ":input > document"} <= arrows(graph)


def test_in_place_operators_become_the_writer() -> None:
    flow = {
        (edge.source, edge.target)
        for edge in graph(nn.Sequential(nn.Linear(W, W), nn.ReLU(inplace=True), nn.Linear(W, W))).edges
    }
    assert flow == {(INPUT, "0"), ("0", "1"), ("1", "2")}


@pytest.mark.parametrize("quiet", [nn.Identity(), nn.Flatten(), nn.Dropout(0.5).eval()], ids=lambda m: type(m).__name__)
def test_a_leaf_without_operators_of_its_own_still_stands_in_the_flow(quiet: nn.Module) -> None:
    described = graph(nn.Sequential(nn.Linear(W, W), quiet, nn.Linear(W, W)))
    flow = {(edge.source, edge.target): edge.n_bytes for edge in described.edges}
    assert flow == {(INPUT, "0"): ROW, ("0", "1"): ROW, ("1", "2"): ROW}
    assert [(cut.n_tensors, cut.n_bytes) for cut in described.cuts] == [(1, ROW), (1, ROW)]
    first = graph(nn.Sequential(quiet, nn.Linear(W, W)))
    assert {(edge.source, edge.target): edge.n_bytes for edge in first.edges} == {(INPUT, "0"): ROW, ("0", "1"): ROW}
    assert [(cut.n_tensors, cut.n_bytes) for cut in first.cuts] == [(1, ROW)]


# ---- random nets: what is true is known from how they were made

Item = tuple[str, object, tuple[int, ...]]
"""leaf, glue or box; the box's own items; which earlier values it reads."""


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(W, W) / W)

    def forward(self, *xs: Tensor) -> Tensor:
        return sum(xs[1:], xs[0]) @ self.weight


NAMES = [f"{letter}lock" for letter in "abcdefghijklmnopqrstuvwxyz"]
"""Without numbers: equal members with numbers fold."""


class Box(nn.Module):
    """Runs its items in order; value 0 is what it was given, value i what item i made."""

    def __init__(self, items: tuple[Item, ...]) -> None:
        super().__init__()
        self.items = items
        for i, (what, inner, _) in enumerate(items, 1):
            if what != "glue":
                self.add_module(NAMES[i], Leaf() if what == "leaf" else Box(inner))  # type: ignore[arg-type]

    def forward(self, *given: Tensor) -> Tensor:
        values = [sum(given[1:], given[0]) if len(given) > 1 else given[0]]
        for i, (what, _, reads) in enumerate(self.items, 1):
            xs = [values[k] for k in reads]
            glue = torch.tanh(xs[0]) if len(xs) == 1 else sum(xs[1:], xs[0])
            values.append(glue if what == "glue" else self._modules[NAMES[i]](*xs))  # type: ignore[misc]
        return values[-1]


def items(random: Random, depth: int = 2) -> tuple[Item, ...]:
    """Up to five steps; each reads one to three earlier values, the latest more often than others."""
    steps: list[Item] = []
    for i in range(random.randint(1, 5)):
        what = random.choice(["leaf", "glue", "box"] if depth else ["leaf", "glue"])
        reads = tuple({random.choice([i, random.randint(0, i)]) for _ in range(random.randint(1, 3))})
        steps.append((what, items(random, depth - 1) if what == "box" else None, reads))
    return tuple(steps)


class Truth:
    """Every operation of the net, the block that ran it, and whose results it read."""

    def __init__(self, items: tuple[Item, ...]) -> None:
        self.block: list[str] = []
        self.leaf: list[bool] = []
        self.reads: list[set[int]] = []
        self._run(items, "", [self._op(INPUT, set(), leaf=True)])

    def _op(self, block: str, reads: set[int], *, leaf: bool) -> set[int]:
        self.block.append(block)
        self.leaf.append(leaf)
        self.reads.append(reads)
        return {len(self.block) - 1}

    def _run(self, items: tuple[Item, ...], path: str, given: list[set[int]]) -> set[int]:
        values = [self._op(path, set().union(*given), leaf=False) if len(given) > 1 else given[0]]
        for i, (what, inner, reads) in enumerate(items, 1):
            xs = [values[k] for k in reads]
            name = f"{path}.{NAMES[i]}".lstrip(".")
            if what == "box":
                values.append(self._run(inner, name, xs))  # type: ignore[arg-type]
            else:
                leaf = what == "leaf"
                values.append(self._op(name if leaf else path, set().union(*xs), leaf=leaf))
        return values[-1]

    def boxes(self, opened: set[str]) -> list[str | None]:
        """What each operation lies in, when `opened` are unfolded; None: it is an open block's own."""
        operating = set(self.block)
        boxes: list[str | None] = []
        for block, leaf in zip(self.block, self.leaf):
            if block == INPUT:
                boxes.append(INPUT)
                continue
            parts = block.split(".") if block else []
            path = ["", *(".".join(parts[: n + 1]) for n in range(len(parts)))]
            closed = next((step for step in path if step not in opened), None)
            alone = not any(other.startswith(f"{block}.".lstrip(".")) for other in operating - {block})
            boxes.append(closed if closed is not None else block if leaf or alone else None)
        return boxes

    def pairs(self, opened: set[str]) -> set[tuple[str, str]]:
        boxes = self.boxes(opened)
        behind: list[set[str]] = []
        pairs = set()
        for box, reads in zip(boxes, self.reads):
            fed_by = set().union(*(behind[op] for op in reads))
            behind.append(fed_by if box is None else {box})
            pairs |= {(source, box) for source in fed_by if box not in (None, source)}
        return pairs  # type: ignore[return-value]


def drawn_pairs(graph: ModelGraph, opened: set[str]) -> set[tuple[str, str]]:
    """Boxes that feed each other, directly or through joins alone."""
    flow = folded(graph, nest(graph), opened)
    joins = {join.id for drawn in flow.joins.values() for join in drawn} - {INPUT}
    after: dict[str, set[str]] = {}
    for arrow in flow.arrows:
        assert arrow.n_bytes == ROW * arrow.n_tensors
        after.setdefault(arrow.source, set()).add(arrow.target)
    for join in joins:
        assert sum(join in targets for targets in after.values()) > 1, "a join joins"
    pairs = set()
    for source in after.keys() - joins:
        left = list(after[source])
        seen = set(left)
        while left:
            at = left.pop()
            if at in joins:
                left += after.get(at, set()) - seen
                seen |= after.get(at, set())
            elif at != source:
                pairs.add((source, at))
    return pairs


@pytest.mark.parametrize("seed", range(6))
def test_random_nets_at_any_folding(seed: int) -> None:
    random = Random(seed)
    made = items(random)
    truth, graph = Truth(made), graph_of(Box(made), torch.randn(B, W))
    holders = [fqn for fqn, blocks in graph.children.items() if blocks and fqn]
    for folding in ([], holders, *(random.sample(holders, random.randint(0, len(holders))) for _ in range(6))):
        opened = {"", *folding}
        assert drawn_pairs(graph, opened) == truth.pairs(opened)


class ManyAdditions(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.start = nn.Linear(W, W)
        self.steps = nn.ModuleList(nn.Linear(W, W) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for step in self.steps:
            x = x + step(x)
        return x


def test_a_loop_with_many_joins_of_one_operator_has_one_join_of_it() -> None:
    few, many = (graph_of(ManyAdditions(n), torch.randn(B, W)) for n in (16, 17))
    assert [join.op for join in few.joins] == ["add"] * 16
    assert [(join.id, join.block, join.op) for join in many.joins] == [(":add", "", "add")]
    steps = [f"steps.{i}" for i in range(17)]
    out = {f"{step} > :add" for step in steps}
    into = {f":add > {step}" for step in steps[1:]}
    begin = chain(":input", "start", ":add") | {"start > steps.0"}
    assert arrows(many) == begin | out | into, "no arrow is lost, none leads elsewhere"
    assert {edge.n_bytes for edge in many.edges} == {ROW}


def test_a_reader_reads_at_most_the_storage() -> None:
    datum = Datum(ELSEWHERE, 0, 10, readers={ELSEWHERE: {(0, 8): 8, (2, 8): 8}})
    assert datum.bytes_read(ELSEWHERE) == 10


def test_the_payload_of_a_collective_is_the_largest_of_its_lists() -> None:
    assert payload_bytes([[torch.ones(2), torch.ones(3)], torch.ones(4), "sum"], torch.ones(1)) == 4 * (2 + 3)
