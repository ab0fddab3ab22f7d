"""Every hazard, for real: a tiny model walks into the trap the rule names, and the remedy leads out again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from explorer.engine.bench.step import forward_backward, prepare
from explorer.engine.model.describe import describe
from explorer.engine.model.load import load
from explorer.engine.policy.units import observe_recompute
from explorer.engine.state.global_state import preserve_global_state
from explorer.plan.hazards.hazards import hazards
from explorer.plan.policy.presets import preset
from explorer.record.comparison import Comparison
from explorer.record.graph import Hazard, ModelGraph
from explorer.record.policy import Policy, Unit
from explorer.record.run import RunSpec
from tests.engine.judging import judged, pair

GRAPHS: dict[str, ModelGraph] = {}
"""By the text of the model's reference: each net is described once."""


def fired(spec: RunSpec) -> tuple[Hazard, ...]:
    model = repr(spec.model)
    if model not in GRAPHS:
        GRAPHS[model] = describe(spec.model)
    return hazards(GRAPHS[model], spec.policy, spec=spec)


def rules(spec: RunSpec) -> set[str]:
    return {hazard.rule for hazard in fired(spec)}


def keeping(op: str, block: str = "1") -> dict[str, Any]:
    return {"policy": Policy(units=(Unit(blocks=(block,), action="save_ops", save_ops=(op,)),))}


@dataclass(frozen=True)
class Trap:
    """A net and a policy: what goes wrong, and the net or policy of the remedy."""

    rule: str
    net: str
    into: dict[str, Any]
    out: dict[str, Any]
    cured_net: str = ""
    still_named: bool = False
    """The remedy lies in code that the rule cannot see."""


BOTH, ONE, FREE = {"blocks": ("1", "2")}, {"blocks": ("1",)}, {"blocks": ("1.linear",)}
YES = {"use_reentrant": True}

SILENT = [  # the step ends without an error, and is another step
    Trap("dropout-redrawn", "dropout", {**BOTH, "preserve_rng_state": False}, BOTH),
    Trap("own-generator", "noise source=own", ONE, {**ONE, "restore_rng": ("1.trap.generator",)}),
    Trap("python-rng", "noise source=python", BOTH, {**BOTH, "restore_rng": ("python",)}),
    Trap("numpy-rng", "noise source=numpy", BOTH, {**BOTH, "restore_rng": ("numpy",)}),
    *(
        Trap("own-generator", f"drawing source={source}", ONE, {**ONE, "restore_rng": ("1.trap.generator",)})
        for source in ("python", "old")
    ),
    Trap("own-generator", "drawing source=numpy hidden=True", ONE, FREE),
    Trap("statistics-in-use", "renormalised", ONE, FREE),
    Trap("running-statistics", "batch_norm", {**BOTH, "running_stats": "every_forward"}, BOTH),
    Trap("moved-buffers", "spectral_norm", BOTH, FREE),
    Trap("moved-buffers", "counter", ONE, FREE),
    Trap("moved-attributes", "temperature", ONE, FREE),
    Trap("moved-attributes", "temperature", ONE, ONE, cured_net="temperature ask=True", still_named=True),
    Trap("departs", "global_scale", {"blocks": ("2",)}, {"blocks": ("5",)}),
    Trap("random-last", "rrelu", ONE, {**ONE, "early_stop": False}),
    Trap("selective-random", "two_dropouts", keeping("aten.bernoulli.default"), keeping("aten.addmm.default")),
    Trap("reentrant-no-grad-input", "plain", {"blocks": ("0",), **YES}, {"blocks": ("0",)}),
    Trap("reentrant-frozen", "plain", {**ONE, **YES, "run": {"frozen": ("0",)}}, {**ONE, "run": {"frozen": ("0",)}}),
    Trap("reentrant-nested-outputs", "nested", {"blocks": ("block",), **YES}, {"blocks": ("block",)}),
]
CAUSES = {
    "dropout": "The dropout mask differs in 1.trap, 2.trap",
    "batch_norm": "Running statistics moved twice in 1.trap, 2.trap",
    "spectral_norm": "The recompute changed the buffer _u of 1.trap.parametrizations.weight.0",
    "counter": "The recompute changed the buffer n_forwards of 1.trap a second time (1 → 2)",
    "temperature": "The recompute changed the attribute temperature of 1.trap a second time (2.0 → 3.0)",
    "noise source=python": "The recompute drew from python again",
    "noise source=numpy": "The recompute drew from numpy again",
    "rrelu": "1.1 drew in forward and not again: early stop",
    "nested": "No gradient came for entry.weight",
    "renormalised": "Known before the run: In training 1.trap computes with its running statistics",
}
"""How a cause of the comparison begins, by net of SILENT."""
RAISED = [  # the candidate's step raises
    Trap("kept-cache", "cache", {"blocks": ("attention",)}, {"blocks": ("attention",)}, "cache use_cache=False"),
    Trap("changed-inputs", "in_place", ONE, ONE, cured_net="in_place copy=True"),
    Trap("changed-inputs", "written_later", {"blocks": ("block",)}, {"blocks": ("block",)}, "written_later copy=True"),
    Trap("selective-in-place", "in_place_inside", keeping("aten.mul_.Tensor"), keeping("aten.sin.default")),
    Trap("selective-in-place", "in_place_inside", keeping("aten.addmm.default"), keeping("aten.cos.default")),
    Trap("selective-in-place", "dropout", keeping("aten.empty_like.default"), keeping("aten.mul.Tensor")),
    Trap("selective-random", "dropout", keeping("aten.bernoulli_.float"), keeping("aten.addmm.default")),
    Trap("kept-cache", "dense", {"blocks": ("1.layer0", "1.layer1")}, {"blocks": ("1",)}),
    Trap("kept-cache", "remembering memory=list", {"blocks": ("block",)}, {"blocks": ("",)}),
    Trap("kept-cache", "remembering memory=object", {"blocks": ("block",)}, {"blocks": ("block",)}, "unused_cache"),
    Trap("emptied-store", "skips", {"blocks": ("1.2",)}, {"blocks": ("1",)}),
    Trap("emptied-store", "skips", {"blocks": (("1.1", "1.2"),)}, {"blocks": (("1.0", "1.1", "1.2"),)}),
    Trap("reentrant-nested-inputs", "pairs", {"blocks": ("block",), **YES}, {"blocks": ("block",)}),
]


def named(trap: Trap) -> str:
    return f"{trap.rule}, {trap.net}"


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("trap", SILENT, ids=named)
def test_silently_another_step(trap: Trap) -> None:
    assert trap.rule in rules(pair(trap.net, **trap.into)[1])
    comparison = judged(trap.net, **trap.into)
    assert comparison.failure is None
    assert comparison.verdict == ("state moved" if trap.net in ("batch_norm", "counter") else "different")
    assert any(cause.startswith(CAUSES.get(trap.net, "")) for cause in comparison.causes)
    _cured(trap)


@pytest.mark.parametrize("trap", RAISED, ids=named)
def test_refused_by_torch(trap: Trap) -> None:
    assert trap.rule in rules(pair(trap.net, **trap.into)[1])
    assert judged(trap.net, full=False, **trap.into).failure is not None
    _cured(trap, full=False)


def _cured(trap: Trap, *, full: bool = True) -> None:
    net = trap.cured_net or trap.net
    comparison: Comparison = judged(net, full=full, **trap.out)
    assert (comparison.failure, comparison.verdict, comparison.state_changes) == (None, "bitwise equal", ())
    assert (comparison.reproducible, comparison.causes) == (full or None, ())
    assert (trap.rule in rules(pair(net, **trap.out)[1])) == trap.still_named


@pytest.mark.parametrize(("net", "block", "cause"), [
    ("carried", "2.1", "The recompute of 2.1 reads memory.state"),
    ("queue", "2.1", "The recompute of 2.1 reads results"),
    ("global_scale", "2", "The recompute of 2 reads SCALE[0]"),
])  # fmt: skip
def test_a_block_that_reads_what_blocks_share_is_named_among_the_causes(net: str, block: str, cause: str) -> None:
    comparison = judged(net, (block,))
    assert comparison.verdict == "different" and comparison.causes[-2].startswith(cause)
    assert comparison.causes[-1].startswith("The recompute first departs"), "evidence of where, behind the reason why"


def test_no_preset_names_a_block_that_cannot_run_again() -> None:
    baseline, _ = pair("skips")
    fired(baseline)
    for name in ("all", "sqrt"):
        policy = preset(name, GRAPHS[repr(baseline.model)])
        assert not hazards(GRAPHS[repr(baseline.model)], policy) and judged("skips", policy=policy).failure is None


HARMLESS = [  # what looks like a trap, and is none
    ("unused_cache", {"blocks": ("block",)}),
    ("skips last=empty", {"blocks": ("1.2",)}),
    *((f"seeded source={source}", ONE) for source in ("own", "made", "python", "numpy")),
    ("seeded source=torch", {**ONE, "preserve_rng_state": False}),
    ("renormalised update=only", ONE),
    ("pairs trains=False", {"blocks": ("block",), **YES}),
    ("keyword", {"blocks": ("block",), **YES}),
]


@pytest.mark.parametrize(("net", "into"), HARMLESS, ids=[f"{net}, {into}" for net, into in HARMLESS])
def test_no_false_alarm(net: str, into: dict[str, Any]) -> None:
    _, candidate = pair(net, **into)
    severities = {hazard.severity for hazard in fired(candidate)}
    assert severities <= {"warning", "note"}, fired(candidate)
    assert judged(net, full=False, **into).verdict == "bitwise equal"


def test_reentrant_keywords_are_said() -> None:
    """torch itself refuses them."""
    assert "reentrant-keywords" in rules(pair("keyword", ("block",), use_reentrant=True)[1])
    assert "reentrant-keywords" not in rules(pair("dropout", use_reentrant=True)[1])
    with pytest.raises(ValueError, match="keyword arguments"):
        torch.utils.checkpoint.checkpoint(torch.nn.Linear(1, 1), input=torch.ones(1), use_reentrant=True)


def test_a_hidden_norm_moves_twice() -> None:
    def batches_seen(net: str) -> int:
        _, candidate = pair(net, ("1",))
        with preserve_global_state():
            trainee = prepare(candidate, load(candidate.model))
            forward_backward(trainee)
        return int(trainee.model.get_submodule("1").norms[0].num_batches_tracked)

    assert "hidden-state" in rules(pair("hidden_norm", ("1",))[1])
    assert "hidden-state" not in rules(pair("hidden_norm registered=True", ("1",))[1])
    assert (batches_seen("hidden_norm"), batches_seen("hidden_norm registered=True")) == (2, 1)


def test_a_generator_that_no_way_leads_to() -> None:
    """It is shared by every copy of the model, so that no comparison would call two runs of it equal."""
    assert "own-generator" in rules(pair("from_nowhere", ("1",))[1])

    def gradient(spec: RunSpec) -> torch.Tensor | None:
        trainee = prepare(spec, load(spec.model))
        type(trainee.model.get_submodule("1.trap")).forward.__globals__["HIDDEN"].manual_seed(1)
        forward_backward(trainee)
        return trainee.model.get_parameter("1.linear.weight").grad

    baseline, candidate = pair("from_nowhere", ("1",))
    with preserve_global_state():
        first, again, recomputed = map(gradient, (baseline, baseline, candidate))
    assert torch.equal(first, again) and not torch.equal(first, recomputed)


def test_a_list_that_collects_gets_everything_twice() -> None:
    lengths: list[int] = []
    assert "filled-inputs" in rules(pair("remembering memory=losses", ("block",))[1])
    assert "filled-inputs" not in rules(pair("unused_cache", ("block",))[1])
    _, candidate = pair("remembering memory=losses", ("block",))
    with preserve_global_state():
        trainee = prepare(candidate, load(candidate.model))
        trainee.model.get_submodule("block").register_forward_pre_hook(lambda _, args: held.append(args[2]))
        held: list[Any] = []
        forward_backward(trainee, lambda phase: lengths.extend(map(len, held)))
        lengths.extend(map(len, held))
    assert lengths == [1, 2]


def test_a_counter_that_nothing_reads_still_counts_twice() -> None:
    assert "moved-attributes" in rules(pair("plain_counter", ("1",))[1])
    assert [change.name for change in judged("plain_counter", ("1",)).state_changes] == ["n_forwards"]
    assert judged("plain_counter ask=True", ("1",)).state_changes == ()


def reruns(net: str, *blocks: str) -> list[str]:
    """Which units run again in one step."""
    seen: list[str] = []
    _, candidate = pair(net, blocks)
    with preserve_global_state(), observe_recompute(lambda fqn, entering: seen.append(fqn) if entering else None):
        forward_backward(prepare(candidate, load(candidate.model)))
    return seen


def test_a_block_that_is_never_called_never_runs_again() -> None:
    assert "never-called" in rules(pair("unused", ("bypassed",))[1])
    assert reruns("unused", "bypassed") == []
    assert "never-called" not in rules(pair("unused", ("called",))[1])
    assert reruns("unused", "called") == ["called"]


@pytest.mark.parametrize("check", ["none", "default"])
def test_an_unchecked_recompute_takes_the_other_branch_silently(check: str) -> None:
    """The branch saves other shapes the second time: only the determinism check notices."""
    _, candidate = pair("branches", ("1",), determinism_check=check)
    assert ("unchecked-recompute" in rules(candidate)) == (check == "none")
    comparison = judged("branches", ("1",), full=False, determinism_check=check)
    if check == "none":
        assert comparison.failure is None and comparison.verdict == "different"
    else:
        assert comparison.failure is not None and "made another tensor than forward" in comparison.failure.sentence


@pytest.mark.parametrize(("reentrant", "notices"), [(True, False), (False, True)])
def test_eval_between_forward_and_backward(reentrant: bool, notices: bool) -> None:
    baseline, candidate = pair("dropout", use_reentrant=reentrant)
    assert ("mode-flips" in rules(candidate)) == reentrant

    def flipped(spec: RunSpec) -> dict[str, Any]:
        trainee = prepare(spec, load(spec.model))
        forward_backward(trainee, lambda phase: trainee.model.train(phase == "forward") and None)
        return {name: parameter.grad for name, parameter in trainee.model.named_parameters()}

    with preserve_global_state():
        expected = flipped(baseline)
        if notices:
            with pytest.raises(torch.utils.checkpoint.CheckpointError):
                flipped(candidate)
        else:
            gradients = flipped(candidate)
            assert any(not torch.equal(expected[name], gradients[name]) for name in expected)


def test_a_weight_used_by_several_reentrant_regions_calls_its_hooks_several_times() -> None:
    def calls(**options: Any) -> int:
        _, candidate = pair("shared", ("cell",), **options)
        heard: Counter[str] = Counter()
        with preserve_global_state():
            trainee = prepare(candidate, load(candidate.model))
            weight = trainee.model.get_parameter("cell.linear.weight")
            weight.register_post_accumulate_grad_hook(lambda parameter: heard.update(["called"]))
            forward_backward(trainee)
        return heard["called"]

    assert "reentrant-shared" in rules(pair("shared", ("cell",), use_reentrant=True)[1])
    assert "reentrant-shared" not in rules(pair("shared", ("cell",))[1])
    assert (calls(use_reentrant=True), calls(), calls(policy=Policy())) == (3, 1, 1)


def test_reentrant_under_autocast_rounds_where_non_reentrant_is_exact() -> None:
    """A weight that is cast inside a forward without gradients is cast again, and accumulates in other steps."""
    run = {"autocast": "bfloat16"}
    into = {"blocks": ("cell",), "run": run, "use_reentrant": True}
    assert "reentrant-autocast" in rules(pair("shared", **into)[1])
    assert judged("shared", **into).verdict in ("rounding", "different")
    assert judged("shared", ("cell",), run=run).verdict == "bitwise equal"
    assert "reentrant-autocast" not in rules(pair("shared", ("cell",), run=run)[1])


def test_offload_on_the_cpu_moves_nothing() -> None:
    offload = {"policy": Policy(units=(Unit(blocks=("1",), action="offload"),))}
    assert "offload-without-device" in rules(pair("dropout", **offload)[1])
    comparison = judged("dropout", **offload)
    assert comparison.verdict == "bitwise equal" and comparison.masks == ()
    assert "offload-without-device" not in rules(pair("dropout", ("1",))[1])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_dropout_behind_keyword_tensors_is_drawn_again(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch stashes the CPU's generator always, a GPU's by tensor")
    assert judged("keyword", ("block",), run={"device": device}).verdict == "bitwise equal"
