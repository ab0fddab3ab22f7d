"""A forecast and a price are what a run measures: on the textbook chain, by hand, and at a real peak."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer.engine.bench.measure import measure
from explorer.engine.model.describe import describe
from explorer.plan.catalogue import recorded_sample
from explorer.plan.memory.ledger import in_place, ledger
from explorer.plan.predict.calls import RNG_STATE_BYTES
from explorer.plan.predict.changes import Simulation, simulate
from explorer.plan.predict.forecaster import Forecaster, prices, prices_of_keeping
from explorer.plan.predict.replay import Replay
from explorer.record import Calls, Measurement, ModelRef, Policy, RunSpec, Unit
from explorer.record.plan import Forecast
from tests.engine.tiny_nets import ref
from tests.graphs import block as graph_block
from tests.graphs import graph_of
from tests.view.builders import MIB, Book, Chain, chains, measured

UNITS = {"a": 3 * MIB, "b": 5 * MIB, "c": 7 * MIB}


def without_stash(run: Measurement, *units: str | tuple[str, ...]) -> Forecast:
    return Forecaster(run).forecast(Policy.recompute(units, preserve_rng_state=False))


@settings(max_examples=30, deadline=None)
@given(chains, st.data())
def test_any_policy_on_the_textbook_chain_comes_true(chain: Chain, data: st.DataObject) -> None:
    """Up to one block output and one gradient: those live across the moment at which a block's backward begins."""
    chosen = data.draw(st.sets(st.integers(0, chain.n_blocks - 1)))
    foretold = without_stash(measured(chain), *(f"layers.{i}" for i in sorted(chosen)))
    real = measured(chain, chosen)
    assert foretold.step_peak_bytes is not None and real.step_peak_bytes is not None
    assert abs(foretold.step_peak_bytes - real.step_peak_bytes) <= 2 * chain.output + chain.parameters
    assert foretold.saved_after_forward_bytes == real.saved_after_forward_bytes
    assert foretold.flop_ratio == pytest.approx(1 + len(chosen) / (3 * chain.n_blocks))


def test_each_checkpoint_keeps_the_generators_state_on_the_cpu() -> None:
    blocks = [f"layers.{i}" for i in range(6)]
    run = measured(Chain(optimizer=False))
    bare, stashed = (
        Forecaster(run).forecast(Policy.recompute(blocks, preserve_rng_state=kept)).step_peak_bytes
        for kept in (False, True)
    )
    assert bare is not None and stashed is not None
    assert RNG_STATE_BYTES <= stashed - bare <= 6 * RNG_STATE_BYTES
    gpu = msgspec.structs.replace(run, environment=msgspec.structs.replace(run.environment, device="cuda"))
    assert Forecaster(gpu).forecast(Policy.recompute(blocks)).step_peak_bytes == bare


def test_a_run_whose_calls_are_unknown_is_not_forecast_as_if_nothing_changed() -> None:
    run = measured()
    assert run.allocations is not None
    old = msgspec.structs.replace(run, allocations=msgspec.structs.replace(run.allocations, calls=Calls()))
    foretold = without_stash(old, "layers.0")
    assert (foretold.step_peak_bytes, foretold.saved_after_forward_bytes) == (None, None)
    assert foretold.flop_ratio == pytest.approx(1 + 1 / 18)


def test_a_block_that_is_handed_a_cache_has_no_peak_foretold() -> None:
    """Its recompute fills the cache once more, which no replay of the baseline shows."""
    policy = Policy.recompute(["layers.1"])
    known = graph_of(graph_block("layers.1", "B", traits=("keeps_cache",)))
    foretold = Forecaster(measured(), known).forecast(policy)
    assert foretold.step_peak_bytes is None and foretold.flop_ratio is not None
    assert Forecaster(measured(), known).forecast(Policy.recompute(["layers.0"])).step_peak_bytes is not None


def straight(*, skip: bool = False, outer: bool = False) -> Measurement:
    """Blocks a, b, c save 3, 5 and 7 MiB and hand on 1 MiB each, which the next one saves; then a bare backward.

    With `skip` block a also hands out 2 MiB that it saves itself and that c copies. With `outer` they lie in block o.
    """
    book = Book()
    within = "o." if outer else ""
    book.phase("forward")
    saved: dict[str, list[int]] = {}
    given: tuple[int, ...] = (book.alloc("saved activation", "", MIB),)
    outside: tuple[int, ...] = ()
    began, whole = book.tick, given
    if outer:
        book.free(book.alloc("temporary", "o", 0))
    for name, n_bytes in ((within + name, n_bytes) for name, n_bytes in UNITS.items()):
        first = book.tick
        saved[name] = [book.alloc("saved activation", name, n_bytes)]
        extra = (book.alloc("saved activation", name, 2 * MIB),) if skip and name == "a" else ()
        output = book.alloc("saved activation", name, MIB)
        inputs = (*given, *outside) if name == "c" else given
        book.calls.append((name, first, book.tick, inputs, (output, *extra)))
        given, outside = (output,), outside or extra
        saved[name] += [*extra, output]
    if outer:
        book.calls.append(("o", began, book.tick, whole, given))
    book.phase("backward")
    for name in reversed(saved):
        gradient = book.alloc("temporary", name, MIB)
        for entry in reversed(saved[name]):
            book.free(entry)
        book.free(gradient)
    return msgspec.structs.replace(
        measured(), allocations=book.close(), phases=tuple(book.spans), blocks=(), spec=measured().spec
    )


def test_a_segment_leaves_block_by_block_and_comes_back_at_once() -> None:
    """Pencil: 19 MiB at the end of forward. As one segment b and c leave 12 MiB and the 1 MiB between them."""
    run = straight()
    assert run.step_peak_bytes == (1 + 3 + 5 + 7 + 3 + 1) * MIB
    apart, joined = without_stash(run, "b", "c"), without_stash(run, ("b", "c"))
    assert apart.saved_after_forward_bytes == (1 + 3 + 3) * MIB
    assert joined.saved_after_forward_bytes == (1 + 3 + 2) * MIB
    # b's output lies inside the segment and goes with it; c's is the segment's own.
    assert apart.freed_bytes == {"b": UNITS["b"], "c": UNITS["c"]}
    assert joined.freed_bytes == {"b": UNITS["b"] + MIB, "c": UNITS["c"]}
    # The peak is the first gradient, when backward of c begins: a segment is whole again then, apart b is still away.
    assert joined.step_peak_bytes == run.step_peak_bytes
    assert apart.step_peak_bytes == run.step_peak_bytes - UNITS["b"]


def test_inside_a_recomputed_block_one_block_at_a_time_is_whole() -> None:
    """Pencil: the outer block keeps its 1 MiB of input; run again it keeps 1 MiB each for b and c, then c is whole.

    1 (input) + 2 (given to b and c) + 1 (its output, saved by others) + 1 (gradient) + 7 (c) at the start of backward.
    """
    run = straight(outer=True)
    alone, nested = without_stash(run, "o"), without_stash(run, "o", "o.a", "o.b", "o.c")
    assert alone.saved_after_forward_bytes == nested.saved_after_forward_bytes == (1 + 1) * MIB
    assert alone.step_peak_bytes == run.step_peak_bytes
    assert nested.step_peak_bytes == (1 + 2 + 1 + 1 + 7) * MIB
    assert set(nested.freed_bytes) == {"o", "o.a", "o.b", "o.c"}


def test_what_a_checkpoint_was_given_stays_until_its_backward() -> None:
    """The skip of a is copied by c: without c's checkpoint recomputing a would free it."""
    run = straight(skip=True)
    free, held = without_stash(run, "a"), without_stash(run, "a", "c")
    base = run.saved_after_forward_bytes
    assert base is not None and free.saved_after_forward_bytes is not None
    assert base - free.saved_after_forward_bytes == UNITS["a"]  # its outputs are not its own to free
    assert held.saved_after_forward_bytes == free.saved_after_forward_bytes - UNITS["c"]


def test_an_output_that_nobody_else_saves_leaves_with_the_rest() -> None:
    """As above, and the graph knows that only a saves its skip: it goes once c, which copies it, is through."""
    names = [graph_block(name, "B", outputs_saved_outside=(True, False) if name == "a" else ()) for name in UNITS]
    known = graph_of(*names, chain=tuple(UNITS))
    run = straight(skip=True)

    def saved(*units: str) -> int:
        foretold = Forecaster(run, known).forecast(Policy.recompute(units, preserve_rng_state=False))
        assert sum(foretold.freed_bytes.values()) == run.saved_after_forward_bytes - foretold.saved_after_forward_bytes
        assert foretold.saved_after_forward_bytes is not None and run.saved_after_forward_bytes is not None
        return run.saved_after_forward_bytes - foretold.saved_after_forward_bytes

    assert saved("a") == UNITS["a"] + 2 * MIB
    assert saved("a", "c") == UNITS["a"] + UNITS["c"]  # c's checkpoint keeps what it was given


@settings(max_examples=30, deadline=None)
@given(st.builds(Chain, n_blocks=st.integers(1, 5), scratch=st.integers(0, 2**22)), st.sets(st.integers(0, 4)))
def test_the_cells_add_up_to_the_foreseen_peak(chain: Chain, taken: set[int]) -> None:
    forecaster = Forecaster(measured(chain))
    policy = Policy.recompute([f"layers.{i}" for i in sorted(taken) if i < chain.n_blocks])
    at = forecaster.at_peak(policy)
    assert at is not None and at.total_bytes == forecaster.forecast(policy).step_peak_bytes
    assert at.phase != "recompute" or at.phase_block in policy.blocks


def test_a_run_holds_its_peak_where_it_was_foreseen() -> None:
    kept = measure(RunSpec(model=ref("gpt", depth=2, batch=16), n_repeats=0))
    policy = Policy.recompute(["blocks.0", "blocks.1"])
    at = Forecaster(kept).at_peak(policy)
    real = ledger(measure(msgspec.structs.replace(kept.spec, policy=policy)))
    assert at is not None and in_place(at) == in_place(real)
    fixed = ("parameter", "optimizer state", "gradient", "input")
    assert {role: at.by_role[role] for role in fixed} == {role: real.by_role[role] for role in fixed}


def drawing_nothing(run: Measurement) -> Measurement:
    """The run under a policy that keeps no generator state: the chains of the builders hold none."""
    policy = msgspec.structs.replace(run.spec.policy, preserve_rng_state=False)
    return msgspec.structs.replace(run, spec=msgspec.structs.replace(run.spec, policy=policy))


@settings(max_examples=30, deadline=None)
@given(chains, st.data())
def test_the_predicted_peak_is_that_of_the_toggled_run(chain: Chain, data: st.DataObject) -> None:
    """Up to one block output and one gradient: those live across the moment at which a block's backward begins."""
    chosen = data.draw(st.sets(st.integers(0, chain.n_blocks - 1)))
    run = drawing_nothing(measured(chain, chosen))
    for price in (*prices(run, [f"layers.{i}" for i in range(chain.n_blocks)]), *prices_of_keeping(run)):
        i = int(price.blocks[0].removeprefix("layers."))
        real = measured(chain, chosen ^ {i}).step_peak_bytes
        assert price.toggle == ("keep" if i in chosen else "recompute")
        assert abs(price.peak_bytes - real) <= 2 * chain.output + chain.parameters
        assert price.peak_change_bytes == price.peak_bytes - run.step_peak_bytes


@settings(max_examples=30, deadline=None)
@given(chains)
def test_a_price_is_the_peak_of_a_forecast(chain: Chain) -> None:
    """Prices look at a unit's own entries alone, a forecast at all of them."""
    for run in (measured(chain), drawing_nothing(measured(chain))):
        forecaster, options = Forecaster(run), run.spec.policy
        for price in prices(run):
            policy = msgspec.structs.replace(options, units=(Unit(blocks=price.blocks),))
            assert price.peak_bytes == forecaster.peak_bytes(policy)


@pytest.mark.parametrize("sample", ["gpt", "mlp", "moe", "recurrent", "resnet", "tied_lm", "unet", "vit"])
def test_the_price_of_each_block_of_a_sample_is_the_peak_of_its_forecast(sample: str) -> None:
    """Generator states and copies of running statistics included: the page shows both figures beside each other."""
    recorded = recorded_sample(ModelRef(target=f"sample_models/{sample}.py", size="small"))
    assert recorded is not None
    run, graph = recorded.run, recorded.run.graph
    forecaster = Forecaster(run, graph)
    changes = {price.blocks: price.peak_bytes for price in prices(run, graph=graph)}
    assert changes and changes == {blocks: forecaster.peak_bytes(Policy.recompute(blocks)) for blocks in changes}


def test_a_price_is_simulated_on_as_few_entries_in_a_long_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def most_entries(n_blocks: int) -> int:
        sizes: list[int] = []

        def counted(replay: Replay, *args: Any, **options: Any) -> Simulation:
            sizes.append(len(replay.size))
            return simulate(replay, *args, **options)

        monkeypatch.setattr("explorer.plan.predict.forecaster.simulate", counted)
        prices(run := measured(Chain(n_blocks=n_blocks)), [f"layers.{i}" for i in range(n_blocks)])
        assert max(sizes) < len(run.allocations.n_bytes)
        return max(sizes)

    assert most_entries(5) == most_entries(40)


def test_a_block_at_the_peak_frees_its_saved_bytes_exactly() -> None:
    run = drawing_nothing(measured())
    (price,) = prices(run, ["layers.1"])
    assert price.peak_bytes == measured(recompute=[1]).step_peak_bytes
    assert price.peak_change_bytes == -14 * MIB
    assert price.share_of_step_flops == pytest.approx(1 / 18)
    assert price.mib_per_percent == pytest.approx(14 / (100 / 18))


def test_keeping_a_recomputed_block_gives_the_bytes_back() -> None:
    run = drawing_nothing(measured(recompute=range(6)))
    by_block = {price.blocks[0]: price for price in prices_of_keeping(run)}
    for i in range(6):
        assert by_block[f"layers.{i}"].peak_bytes == measured(recompute=set(range(6)) - {i}).step_peak_bytes
    assert by_block["layers.5"].peak_change_bytes == 0


def test_blocks_inside_a_unit_have_no_price_of_their_own() -> None:
    run = measured(recompute=[2])
    priced = {price.blocks[0] for price in prices(run)}
    assert [price.blocks for price in prices_of_keeping(run)] == [("layers.2",)]
    assert priced.isdisjoint({"layers", "layers.2", "layers.2.inner"})
    assert {"layers.1", "layers.1.inner"} <= priced


def test_a_shared_block_is_priced_call_by_call() -> None:
    """Three calls of one block: each call's bytes are away between its own forward and its own backward."""
    run = drawing_nothing(measured(Chain(n_blocks=3)))
    log = run.allocations
    shared = msgspec.structs.replace(log, blocks=tuple(re.sub(r"layers\.\d", "cell", fqn) for fqn in log.blocks))
    cost = msgspec.structs.replace(run.by_fqn["layers.0"], fqn="cell", n_forward=3)
    (price,) = prices(msgspec.structs.replace(run, allocations=shared, blocks=(run.by_fqn[""], cost)))
    all_three = measured(Chain(n_blocks=3), range(3))
    assert abs(price.peak_bytes - all_three.step_peak_bytes) <= MIB
    assert price.peak_change_bytes == -23 * MIB


HOLDING = """
from dataclasses import dataclass
import torch
from torch import nn


@dataclass
class Intermediates:
    weights: torch.Tensor


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Tanh()

    def forward(self, x):
        weights = (x @ x.mT).softmax(-1)
        return self.gate(weights) @ x, Intermediates(weights)


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.attentions = nn.ModuleList(Attention() for _ in range(9))

    def forward(self, x):
        intermediates = []
        for attention in self.attentions:
            x, one = attention(x)
            intermediates.append(one)
        return x, intermediates


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.body = nn.Linear(16, 16), Body()

    def forward(self, x):
        x, intermediates = self.body(self.start(x))
        return x


def build():
    return Net(), (torch.randn(2, 96, 16), torch.zeros(())), lambda output, _: output.square().mean()
"""


def test_what_a_block_returns_inside_an_object_stays_until_the_code_around_returns(tmp_path: Path) -> None:
    """Attention of x-transformers returns its weights so, and the layers around return all of them in a list."""
    (tmp_path / "holding.py").write_text(HOLDING)
    spec = RunSpec(model=ModelRef(target=f"{tmp_path / 'holding.py'}:build"), optimizer="none", n_repeats=1)
    graph, run = describe(spec.model), measure(spec)
    policy = Policy.recompute(graph.repeats)
    real = measure(msgspec.structs.replace(spec, policy=policy)).step_peak_bytes
    assert Forecaster(run, graph).peak_bytes(policy) == pytest.approx(real, rel=1e-3)
