"""Sentences about a peak are those of its runs, and name the blocks that a reader can switch."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer.engine.bench.measure import measure
from explorer.engine.model.describe import describe
from explorer.plan.memory.ledger import ledger
from explorer.plan.names import some
from explorer.plan.why.caveats import peak_caveats
from explorer.plan.why.peak import PeakCase, explain, explain_one, frees_nothing, toggled_block
from explorer.record import Block, Comparison, Failure, ModelGraph, ModelRef, Policy, RunSpec
from explorer.view.text.plan import in_words
from tests import graphs
from tests.engine.tiny_nets import ref
from tests.graphs import GRAPH, SPEC, changed, with_costs
from tests.plan.planners.samples import graph_and_run
from tests.view.builders import MIB, Chain, chains, compared, measured


def graph(n_blocks: int = 6) -> ModelGraph:
    names = ["", "layers", *(f"layers.{i}" for i in range(n_blocks)), "head"]
    blocks = tuple(
        Block(
            fqn=fqn, kind="Layer", n_calls=1, parameter_bytes=1, buffer_bytes=0, output_bytes=1, saved_bytes=1,
            forward_flops=1, rerun_flops=1,
            repeat_of="layers.0" if fqn.startswith("layers.") and fqn != "layers.0" else None,
        )
        for fqn in names
    )  # fmt: skip
    chain = tuple(fqn for fqn in names if fqn.startswith("layers."))
    return ModelGraph(model=ModelRef(target="tests:chain"), blocks=blocks, edges=(), chain=chain)


def explained(comparison: Comparison) -> str:
    return "\n".join(explain(comparison, graph(6)))


def test_a_policy_that_helped() -> None:
    first, second, *_ = explain(compared(recompute=[0, 2, 4]), graph())
    assert first == "The policy lowered the peak from 149.0 to 110.0 MiB (\N{MINUS SIGN}26 %)."
    assert second == (
        "The peak moved from the end of forward in layers.5 to the recompute of layers.4; most of it is optimizer "
        "state (36.0 MiB), then saved activations (33.0 MiB)."
    )


def test_the_segments_own_recompute_is_the_peak() -> None:
    assert "18.0 MiB of the peak are activations of layers.4 that were just recomputed." in explained(compared())
    assert "just recomputed" not in explained(compared(recompute=[]))
    assert "Smaller blocks, recomputed one after another, would lower it." in explained(compared())
    pair = compared()
    policy = Policy.recompute(["layers.0", "layers.2", ("layers.4", "layers.5")])
    spec = msgspec.structs.replace(pair.candidate.spec, policy=policy)
    pair = msgspec.structs.replace(pair, candidate=msgspec.structs.replace(pair.candidate, spec=spec))
    assert "Shorter segments would lower it: this one recomputes 2 blocks at once." in explained(pair)


def test_a_block_that_is_no_repeated_one_may_be_the_next_best() -> None:
    """Of the blocks only the first two are repeated; layers.5 stands between them, as the middle of a U-Net does."""
    known = changed(graph(), **{f"layers__{i}": {"kind": f"Odd{i}"} for i in (1, 3, 5)})
    assert known.repeats == ("layers.0", "layers.2", "layers.4")
    assert "Next, layers.1 recomputed" in " ".join(explain(compared(recompute=[0, 2, 4]), known))


def test_the_optimizer_is_the_peak() -> None:
    text = explained(compared(Chain(parameters=60 * MIB), range(6)))
    assert text.startswith("The policy did not move the peak: 1.47 GiB without it, 1.47 GiB with it.")
    assert "The peak lies in the optimizer step" in text and "hold 1.41 GiB of 1.47 GiB" in text
    assert "without a higher peak" not in text


def test_gradients_hold_the_peak_at_the_end_of_backward() -> None:
    text = explained(compared(Chain(parameters=12 * MIB, optimizer=False), range(6)))
    assert "133.0 MiB of the peak (87 %) are" in text
    assert "60.0 MiB of them gradients that backward has made so far" in text


def test_the_last_block_buys_nothing() -> None:
    text = explained(compared(recompute=range(6)))
    assert "layers.5 could be kept without a higher peak (predicted), for 3.3 % fewer FLOPs." in text
    assert "layers.5 is the last of them" in text
    assert "could be kept" not in explained(compared(recompute=range(5)))


def test_a_policy_without_effect_is_named() -> None:
    pair = compared(recompute=[1, 2])
    pair = msgspec.structs.replace(pair, candidate=with_costs(pair.candidate, n_recompute=0))
    assert "The policy had no effect: none of its blocks ran forward again." in explained(pair)
    pair = msgspec.structs.replace(pair, candidate=with_costs(pair.candidate, n_forward=0))
    assert "layers.1, layers.2 never ran at all." in explained(pair)
    assert "no effect" not in explained(compared(recompute=[1, 2]))


def test_a_block_that_saves_little() -> None:
    pair = compared(recompute=[0])
    pair = msgspec.structs.replace(pair, baseline=with_costs(pair.baseline, "layers.0", saved_after_forward_bytes=MIB))
    assert "layers.0 saves little to begin with: 1.0 MiB of 91.0 MiB." in explained(pair)
    assert "saves little" not in explained(compared(recompute=[0]))


def test_the_first_blocks_input_is_the_models() -> None:
    chain = Chain(saved=4, output=MIB, n_parts=1)
    pair = compared(chain, [0])
    pair = msgspec.structs.replace(pair, baseline=with_costs(pair.baseline, "layers.0", saved_after_forward_bytes=4))
    assert "layers.0 reads the model's own input (1.0 MiB)" in explained(pair)
    assert "own input" not in explained(compared(recompute=[0]))


def test_the_next_best_block_is_a_prediction() -> None:
    text = explained(compared(recompute=[0, 2, 4]))
    assert "Next, layers.1 recomputed would lower the peak to 96.0 MiB (predicted) for 4.9 % more FLOPs." in text
    assert "Next," not in explained(compared(recompute=range(6)))


def test_kept_activations_are_counted_by_block() -> None:
    assert "30.0 MiB of the peak are saved activations of 2 kept blocks, most in layers.1 (15.0 MiB)" in explained(
        compared()
    )


@settings(max_examples=30, deadline=None)
@given(chains, st.data())
def test_every_policy_gets_a_first_sentence_and_whole_sentences(chain: Chain, data: st.DataObject) -> None:
    pair = compared(chain, data.draw(st.sets(st.integers(0, chain.n_blocks - 1))))
    sentences = explain(pair, graph(chain.n_blocks))
    assert len(sentences) >= 2
    for sentence in sentences:
        assert sentence.endswith(".") and sentence[0] == sentence[0].upper() or sentence.startswith(("layers", "head"))
        assert "  " not in sentence and "None" not in sentence


def test_without_a_timeline_nothing_is_explained_and_without_a_graph_something_is() -> None:
    pair = compared()
    for blind in ("baseline", "candidate"):
        run = msgspec.structs.replace(getattr(pair, blind), allocations=None)
        assert explain(msgspec.structs.replace(pair, **{blind: run}), graph()) == ()
    assert explain(pair)[0].startswith("The policy lowered the peak")


def test_one_run_says_where_its_peak_lies_what_it_is_made_of_and_what_would_lower_it() -> None:
    plain = explain_one(measured(), graph())
    assert plain[0] == (
        "The peak of 149.0 MiB lies at the end of forward in layers.5; it is made of saved activations (90.0 MiB), "
        "optimizer state (36.0 MiB), parameters (18.0 MiB), temporaries (4.0 MiB)."
    )
    assert "First, layers.0 recomputed would lower the peak to 135.0 MiB (predicted)" in plain[-1]
    assert any("saved activations of 6 kept blocks, most in layers.0 (15.0 MiB)" in line for line in plain)
    with_policy = "\n".join(explain_one(measured(recompute=[0, 2, 4]), graph()))
    assert "Next, layers.1 recomputed would lower the peak" in with_policy


def test_one_run_names_what_a_single_block_takes_and_what_its_model_runs_again_by_itself() -> None:
    head = explain_one(measured(Chain(scratch=400 * MIB, saved=MIB)))
    assert "400.0 MiB of it are temporaries of layers.5, the largest made by aten::softmax." in head
    own = measured(recompute=[0, 1])
    own = msgspec.structs.replace(own, spec=msgspec.structs.replace(own.spec, policy=Policy()))
    again = "layers ran again ×1, by the model itself: what these blocks keep was gone without any policy."
    assert again in explain_one(own)


def test_one_run_that_was_cut_short_has_no_peak() -> None:
    refused = Failure(kind="out of memory", sentence="Refused.")
    first, *rest = explain_one(msgspec.structs.replace(measured(), failure=refused), graph())
    assert first.startswith("The step held at least 149.0 MiB, at the end of forward in layers.5;") and not rest
    unseen = explain_one(msgspec.structs.replace(measured(), failure=refused, phases=()))
    assert unseen[0].startswith("149.0 MiB were known to be held when the step failed;") and len(unseen) == 1
    assert explain_one(msgspec.structs.replace(measured(), allocations=None)) == ()


def case(graph: ModelGraph | None = GRAPH) -> PeakCase:
    pair = graphs.compared(GRAPH, SPEC)
    runs = {"baseline": pair.baseline, "candidate": pair.candidate}
    return PeakCase(**runs, old=ledger(pair.baseline), new=ledger(pair.candidate), graph=graph)


@pytest.mark.parametrize(("graph", "toggle"), [(GRAPH, "blocks.3"), (None, "blocks.3")])
def test_what_a_person_toggles_to_reach_a_block(graph: ModelGraph | None, toggle: str) -> None:
    assert toggled_block("blocks.3.mlp", graph) == toggle and toggled_block("head", graph) == "head"


@pytest.mark.parametrize("blocks", [["blocks.0.norm1"], ["blocks.0.norm1", "blocks.1"], ["blocks.0"], []])
def test_who_keeps_the_output_of_a_block_that_frees_nothing(blocks: list[str]) -> None:
    graph, run = graph_and_run("gpt")
    policy = Policy.recompute(blocks)
    why = frees_nothing(run, policy, graph)
    assert why.startswith("blocks.0.norm1 frees almost nothing: ") == ("blocks.0.norm1" in blocks) == bool(why)
    assert not why or "behind it blocks.0.attention.qkv keeps its outputs" in why
    both = Comparison(baseline=run, candidate=measure(msgspec.structs.replace(run.spec, policy=policy, n_repeats=0)))
    assert not why or why in explain(both, graph)


def told_of(net: str, policy: Policy) -> tuple[str, Comparison]:
    """The reasons, of two runs of a net of `tests.engine.tiny_nets`."""
    spec = RunSpec(model=ref(net), n_repeats=0, seed=1)
    graph = describe(spec.model)
    runs = [measure(msgspec.structs.replace(spec, policy=side)) for side in (Policy(), policy)]
    both = Comparison(baseline=runs[0], candidate=runs[1])
    return "\n".join(explain(both, graph)), both


@pytest.mark.parametrize("preserve_rng_state", [True, False])
def test_the_state_of_the_generator_is_named_where_it_is_much_and_the_cure_frees_it(preserve_rng_state: bool) -> None:
    policy = Policy.recompute(["0", "1", "2"])
    policy = msgspec.structs.replace(policy, preserve_rng_state=preserve_rng_state)
    text, both = told_of("chain", policy)
    kept = (both.candidate.saved_after_forward_bytes or 0) - (both.baseline.saved_after_forward_bytes or 0)
    assert (kept > 3 * len(torch.get_rng_state()) * 0.8) == preserve_rng_state
    assert ("3 states of the random generator: each checkpoint keeps 4.9 KiB" in text) == preserve_rng_state


def test_the_model_itself_has_a_name() -> None:
    text, both = told_of("whole", Policy.recompute([""]))
    assert both.candidate.spec.policy.blocks == ("",) and "activations of the model that were just" in text
    assert "  " not in text and "A policy recomputes modules" not in text
    assert in_words(both.candidate.spec.policy) == "recompute 1 block: the model"


def test_a_block_that_only_the_observed_forward_left_out_is_not_said_to_free_nothing() -> None:
    text, both = told_of("dropped_branches", Policy.recompute([str(i) for i in range(8)]))
    saved = {cost.fqn: cost.saved_after_forward_bytes or 0 for cost in both.baseline.blocks}
    for cost in both.candidate.blocks:
        assert not (cost.fqn.isdigit() and saved[cost.fqn]) or (cost.saved_after_forward_bytes or 0) < saved[cost.fqn]
    assert "almost nothing" not in text
    (caveat,) = peak_caveats(both.candidate)
    idle_branches = [cost.fqn for cost in both.candidate.blocks if not cost.n_forward and cost.fqn.endswith(".branch")]
    assert idle_branches and caveat.startswith(f"One draw: {some(idle_branches)} did not run in this step.")
