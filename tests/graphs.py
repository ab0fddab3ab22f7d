"""Hand-made block graphs and runs: what a page or a drawing needs, without running a model."""

from __future__ import annotations

import platform
from functools import cache

import msgspec

from explorer.record.allocations import ROLES, Allocations, Calls, PhaseSpan
from explorer.record.base import column, to_json
from explorer.record.comparison import Comparison, GradientDiff
from explorer.record.graph import Block, CutPoint, Edge, Join, ModelGraph, ModelRef
from explorer.record.measurement import Environment, MeasuredBlock, Measurement, Samples, Times
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import RunSpec

MIB = 2**20


def block(fqn: str, kind: str, saved_mib: float = 1.0, **fields: object) -> Block:
    figures = {
        "n_calls": 1,
        "parameter_bytes": MIB,
        "buffer_bytes": 0,
        "output_bytes": MIB // 2,
        "saved_bytes": int(saved_mib * MIB),
        "forward_flops": 1_000_000,
        "rerun_flops": 1_000_000,
    }
    return Block(fqn=fqn, kind=kind, **{**figures, **fields})  # type: ignore[arg-type]


def graph_of(*blocks: Block, chain: tuple[str, ...] = ()) -> ModelGraph:
    """A graph of these blocks, without edges."""
    return ModelGraph(model=ModelRef(target="tests:chain"), blocks=blocks, edges=(), chain=chain)


def changed(graph: ModelGraph, **of: dict[str, object]) -> ModelGraph:
    """Blocks of the graph with other fields; `__` stands for a dot."""
    more = {fqn.replace("__", "."): fields for fqn, fields in of.items()}
    blocks = tuple(msgspec.structs.replace(block, **more.get(block.fqn, {})) for block in graph.blocks)
    return msgspec.structs.replace(graph, blocks=blocks)


def with_costs(run: Measurement, *fqns: str, **fields: object) -> Measurement:
    """The run with other figures of the blocks `fqns`, of all blocks if none is named."""
    costs = (
        msgspec.structs.replace(cost, **fields) if cost.fqn in (fqns or run.by_fqn) else cost for cost in run.blocks
    )
    return msgspec.structs.replace(run, blocks=tuple(costs))


@cache
def gpt(n_layers: int = 12, *, n_inner: int = 0, names: str = "blocks") -> ModelGraph:
    """embedding, dropout, n equal layers with residual attention and mlp, norm, head. `n_inner`: leaves in each mlp."""
    blocks = [
        block("", "GPT", 15.0 * n_layers + 3, n_calls=1),
        block("embedding", "Embedding", 1.0),
        block("dropout", "Dropout", 0.5, traits=("uses_rng",)),
        block(names, "ModuleList", 15.0 * n_layers, n_calls=0),
    ]
    edges = [Edge(source="embedding", target="dropout", n_bytes=MIB // 2)]
    joins: list[Join] = []
    last = "dropout"
    for i in range(n_layers):
        layer = f"{names}.{i}"
        repeat = f"{names}.0" if i else None
        blocks += [
            block(layer, "Block", 15.0, repeat_of=repeat, traits=("uses_rng",)),
            block(f"{layer}.attention", "Attention", 9.0, repeat_of=f"{names}.0.attention" if i else None),
            block(f"{layer}.mlp", "MLP", 6.0, traits=("uses_rng",)),
        ]
        blocks += [block(f"{layer}.mlp.{k}", "Linear", 1.0) for k in range(n_inner)]
        one, two = (Join(id=f"{layer}:{op}", block=layer, op="add") for op in ("add", "add.2"))
        joins += [one, two]
        for source, targets in (
            (last, (f"{layer}.attention", one.id)),
            (f"{layer}.attention", (one.id,)),
            (one.id, (f"{layer}.mlp", two.id)),
            (f"{layer}.mlp", (two.id,)),
        ):
            tensor = len(edges)
            edges += [Edge(source=source, target=target, n_bytes=MIB // 2, data=tensor) for target in targets]
        last = two.id
    blocks += [block("norm", "LayerNorm", 0.5), block("head", "Linear", 1.5)]
    edges += [Edge(source=last, target="norm", n_bytes=MIB // 2), Edge(source="norm", target="head", n_bytes=MIB // 2)]
    chain = ("embedding", "dropout", *(f"{names}.{i}" for i in range(n_layers)), "norm", "head")
    cuts = tuple(CutPoint(after=a, before=b, n_bytes=MIB // 2, n_tensors=1) for a, b in zip(chain, chain[1:]))
    return ModelGraph(
        model=ModelRef(target="sample_models/gpt.py"),
        blocks=tuple(blocks),
        edges=tuple(edges),
        joins=tuple(joins),
        cuts=cuts,
        chain=chain,
    )


def single_operations(n_blocks: int) -> ModelGraph:
    """Layers that each keep their input and nothing else: no preset recomputes one. Without blocks the model is one."""
    names = [f"layer{i}" for i in range(n_blocks)]
    blocks = [block("", "Net", 1.0 * max(n_blocks, 1)), *(block(name, "Linear") for name in names)]
    edges = [Edge(source=before, target=after, n_bytes=MIB // 2) for before, after in zip(names, names[1:])]
    edges += [Edge(source="", target=name, n_bytes=MIB // 2) for name in names[:1]]
    return ModelGraph(
        model=ModelRef(target="sample_models/gpt.py"), blocks=tuple(blocks), edges=tuple(edges), chain=tuple(names)
    )


def unet(n_levels: int = 4) -> ModelGraph:
    """Down path, bottom, up path; each level skips across. Every block is of its own width, so nothing repeats."""
    down = [f"down{i}" for i in range(n_levels)]
    up = [f"up{i}" for i in reversed(range(n_levels))]
    order = [*down, "bottom", *up, "head"]
    blocks = [block("", "UNet", 30.0), *(block(name, "Level", 8.0 / (i + 1)) for i, name in enumerate(order))]
    edges = [Edge(source=a, target=b, n_bytes=MIB) for a, b in zip(order, order[1:])]
    edges += [Edge(source=f"down{i}", target=f"up{i}", n_bytes=2 * MIB) for i in range(n_levels)]
    cuts = tuple(
        CutPoint(after=a, before=b, n_bytes=MIB, n_tensors=2, refusal=None if i else "the skip from down0 crosses")
        for i, (a, b) in enumerate(zip(order, order[1:]))
    )
    return ModelGraph(
        model=ModelRef(target="sample_models/unet.py"),
        blocks=tuple(blocks),
        edges=tuple(edges),
        cuts=cuts,
        chain=tuple(order),
    )


def hostile() -> ModelGraph:
    """Module names that would run script if anything pasted them into HTML."""
    bad = "<img src=x onerror=pwned=1>"
    blocks = (
        block("", "</div><script>pwned=1</script>", 9.0),
        block(bad, bad, 4.0),
        block("a:material/home: **b** $x$", "Linear", 4.0),
        block("tail", "Linear", 1.0),
    )
    edges = (Edge(source=bad, target="tail", n_bytes=MIB),)
    return ModelGraph(model=ModelRef(target="sample_models/<b>.py"), blocks=blocks, edges=edges, chain=(bad, "tail"))


_RUNS: dict[bytes, Measurement] = {}


def measured(graph: ModelGraph, spec: RunSpec) -> Measurement:
    """A step of `graph`; equal arguments give the same record, so that charts of it are made once."""
    key = to_json((graph, spec))
    if key not in _RUNS:
        _RUNS[key] = _measured(graph, spec)
    return _RUNS[key]


def _measured(graph: ModelGraph, spec: RunSpec) -> Measurement:
    """A step of `graph`: parameters from the start, saved activations born in forward, gradients in backward.

    Recomputed blocks save nothing in forward and run again in backward. The numbers are made up; the record is whole.
    """
    on = set(spec.policy.blocks)
    leaves = [block for block in graph.blocks if block.fqn in graph.chain] or list(graph.blocks[1:] or graph.blocks)
    names = tuple(block.fqn for block in graph.blocks)
    tick = 0
    rows: list[list[int]] = []

    def alloc(n_bytes: int, role: str, fqn: str) -> list[int]:
        nonlocal tick
        tick += 1
        rows.append([n_bytes, tick, 0, ROLES.index(role), names.index(fqn), 1])  # type: ignore[arg-type]
        return rows[-1]

    def free(row: list[int]) -> None:
        nonlocal tick
        tick += 1
        row[2] = tick

    for block in leaves:
        rows.append([block.parameter_bytes, 0, -1, 0, names.index(block.fqn), 0])
    phases, kept = [], {}
    calls: list[tuple[int, int, int, int]] = []
    for block in leaves:
        before = tick
        output = min(MIB // 2, block.saved_bytes)
        inner = [] if block.fqn in on else [alloc(block.saved_bytes - output, "saved activation", block.fqn)]
        kept[block.fqn] = [*inner, alloc(output, "saved activation", block.fqn)]
        calls.append((names.index(block.fqn), before, tick, len(rows) - 1))
    phases.append(PhaseSpan(phase="forward", block="", first_tick=0, end_tick=tick + 1))
    for block in reversed(leaves):
        again = []
        if block.fqn in on:
            first = tick + 1
            again = [alloc(block.saved_bytes - MIB // 2, "recomputed", block.fqn)]
            phases.append(PhaseSpan(phase="recompute", block=block.fqn, first_tick=first, end_tick=tick + 1))
        first = tick + 1
        alloc(block.parameter_bytes, "gradient", block.fqn)[2] = -1
        for row in (*again, *kept[block.fqn]):
            free(row)
        phases.append(PhaseSpan(phase="backward", block="", first_tick=first, end_tick=tick + 1))
    first = tick + 1
    state = alloc(MIB, "optimizer state", leaves[0].fqn)
    state[2] = -1
    phases.append(PhaseSpan(phase="optimizer", block="", first_tick=first, end_tick=tick + 1))
    columns = [column(tick + 1 if value == -1 else value for value in values) for values in zip(*rows)]
    log = Allocations(
        n_ticks=tick,
        n_bytes=columns[0],
        born=columns[1],
        died=columns[2],
        role=columns[3],
        block=columns[4],
        op=columns[5],
        blocks=names,
        ops=("", "aten.mm.default"),
        time_ns=column(range(0, 1000 * (tick + 1), 1000)),
        calls=Calls(
            block=column(block for block, *_ in calls),
            first_tick=column(first for _, first, *_ in calls),
            end_tick=column(end for *_, end, _ in calls),
            n_inputs=column([0] * len(calls)),
            n_outputs=column([1] * len(calls)),
            entries=column(output for *_, output in calls),
        ),
    )
    costs = [
        MeasuredBlock(
            fqn=block.fqn,
            n_forward=block.n_calls,
            n_recompute=int(block.fqn in on),
            saved_after_forward_bytes=MIB // 2 if block.fqn in on else block.saved_bytes,
            at_peak_bytes=block.saved_bytes,
            forward_flops=block.forward_flops * (len(leaves) if not block.fqn else 1),
            recompute_flops=block.forward_flops * (int(block.fqn in on) if block.fqn else len(on)),
            backward_flops=2 * block.forward_flops * (len(leaves) if not block.fqn else 1),
            forward=Samples(ms=(0.9 * block.saved_bytes / MIB,)) if block.n_calls else Samples(),
        )
        for block in graph.blocks
    ]
    step = Samples(ms=tuple(100.0 + i + 5 * len(on) for i in range(5)))
    return Measurement(
        spec=spec,
        environment=Environment(
            device="cpu",
            device_name="a CPU",
            torch_version="2.13.0",
            python_version="3.11",
            platform=platform.platform(terse=True),
            n_threads=1,
        ),
        allocations=log,
        phases=tuple(phases),
        blocks=tuple(costs),
        times=Times(clock="process CPU time", step=step, forward=step, backward=step, optimizer=step),
        loss=1.0,
    )


def compared(graph: ModelGraph, spec: RunSpec, *, equal: bool = True) -> Comparison:
    """Baseline and candidate of `spec`; with `equal` false one gradient differs."""
    baseline = measured(graph, msgspec.structs.replace(spec, policy=KEEP_ALL))
    gradients = tuple(
        GradientDiff(
            name=f"{block.fqn}.weight",
            shape=(4, 4),
            dtype="float32",
            presence="both",
            bitwise=equal or block.fqn != graph.chain[-1],
            max_abs=0.0 if equal else 0.1,
            relative_norm=0.0 if equal else 0.01,
        )
        for block in graph.blocks
        if block.fqn in graph.chain
    )
    return Comparison(
        baseline=baseline, candidate=measured(graph, spec), gradients=gradients, reproducible=True, loss_equal=True
    )


GRAPH = gpt(6)
"""A GPT of six layers, and the run that recomputes them all."""
ALL = [f"blocks.{i}" for i in range(6)]
SPEC = RunSpec(model=GRAPH.model, policy=Policy.recompute(ALL))


def alive_at(log: Allocations, tick: int) -> list[int]:
    """Indices of the entries alive at `tick`, read entry by entry beside what the product does with arrays."""
    return [i for i, (born, died) in enumerate(zip(log.born, log.died)) if born <= tick < died]
