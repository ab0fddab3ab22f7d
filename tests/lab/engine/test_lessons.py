"""Each lesson under every switch: its outcomes, the same result each time, and restored global state."""

from __future__ import annotations

import re
from functools import cache

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from explorer.engine.bench.step import prepare
from explorer.engine.device.without_data import fake_group
from explorer.engine.model.load import load
from explorer.engine.policy.apply import apply_policy
from explorer.engine.ranks.split import mesh_of, split_model
from explorer.engine.state.global_state import preserve_global_state
from explorer.errors import BadInput
from explorer.lab.engine.kit.rows import DISTANCE
from explorer.lab.engine.lessons import derivatives, gathers
from explorer.lab.engine.lessons.early_stop import BEGUN, ENDED
from explorer.lab.engine.lessons.no_grad_input import MISSING
from explorer.lab.engine.lessons.regions import RegionBlock
from explorer.lab.engine.lessons.segment_memory import PEAK
from explorer.lab.engine.lessons.wrap_in_place import QUESTIONS
from explorer.lab.engine.run import run_lab
from explorer.lab.plan import lesson_called, lessons
from explorer.lab.record import LabOutcome, LabRow
from explorer.lab.view.outcome import recorded_pictures
from explorer.record.base import from_msgpack, to_msgpack
from explorer.record.policy import Policy
from explorer.record.run import Ranks, RunSpec
from tests.engine import trap_nets
from tests.engine.judging import pair
from tests.engine.policy.test_hazards_shown import ONE, keeping, rules


@cache
def run(name: str, **switches: str) -> LabOutcome:
    return run_lab(name, switches)


def outcomes(name: str, **switches: str) -> dict[str, str]:
    return {row.label: row.outcome for row in run(name, **switches).rows}


def row(outcome: LabOutcome, label: str) -> LabRow:
    return {row.label: row for row in outcome.rows}[label]


def value(outcome: LabOutcome, label: str, name: str) -> float:
    number = row(outcome, label).value(name)
    assert isinstance(number, int | float), (label, name, number)
    return float(number)


@pytest.mark.parametrize("p", ["0.1", "0.5"])
def test_masks_and_gradients_need_the_snapshot_and_the_loss_does_not_tell(p: str) -> None:
    wrong, right = run("dropout", preserve_rng_state="off", p=p), run("dropout", preserve_rng_state="on", p=p)
    assert row(wrong, "recomputed").outcome == "different" and row(right, "recomputed").outcome == "bitwise equal"
    assert row(wrong, "recomputed").value("loss") == row(wrong, "kept").value("loss")
    shares = [row.value("mask elements that differ") for row in wrong.rows[2:]]
    # 4 x 512 elements: four standard errors of a share near one half are below 0.05.
    assert sum(shares) / len(shares) == pytest.approx(2 * float(p) * (1 - float(p)), abs=0.05)
    assert all(row.value("mask elements that differ") == 0 for row in right.rows[2:])


def test_a_replay_without_a_snapshot_is_torch_remats_and_wrong_at_an_equal_loss() -> None:
    lesson = run("regions", p="0.1")
    assert [row.outcome for row in lesson.rows] == ["baseline", "different", "bitwise equal", "bitwise equal"]
    assert len({row.value("loss") for row in lesson.rows}) == 1
    assert 0.1 < value(lesson, "replayed", DISTANCE) < 0.5
    remat = pytest.importorskip("torch_remat")
    block, x, gradients = RegionBlock(0.5, "replayed"), torch.ones(4, 16), []
    for forward in (block, remat.checkpoint()(block.body)):
        torch.manual_seed(0)
        gradients += torch.autograd.grad(forward(x).square().sum(), block.up.weight)
    assert torch.equal(*gradients)


def test_one_snapshot_for_the_model_gives_every_block_the_first_mask() -> None:
    own, first = "agrees with its own forward", "agrees with block0's forward"
    model, block = run("one-snapshot", snapshot="model"), run("one-snapshot", snapshot="block")
    assert [row.value(first) for row in model.rows[2:]] == [1, 1, 1, 1]
    assert [row.value(own) == 1 for row in model.rows[2:]] == [True, False, False, False]
    assert [row.value(own) for row in block.rows[2:]] == [1, 1, 1, 1]
    assert row(block, "recomputed").outcome == "bitwise equal"
    assert outcomes("one-snapshot", snapshot="none")["recomputed"] == "different"


EQUAL = {"reentrant": "bitwise equal", "non-reentrant": "bitwise equal"}
WRONG = {"reentrant": "different", "non-reentrant": "different"}
SEEN = {"reentrant": "different", "non-reentrant": "raised"}
STORES = {"one store, added": "bitwise equal", "torch's checkpoint": "bitwise equal"}
OUTCOMES: list[tuple[str, dict[str, str], dict[str, str]]] = [
    *(("own-generators", {"source": source, "restore": "no"}, WRONG) for source in ("generator", "python", "numpy")),
    ("own-generators", {"source": "torch", "restore": "no"}, EQUAL),
    *(("own-generators", {"source": source, "restore": "yes"}, EQUAL) for source in ("generator", "python", "numpy")),
    *(("router-noise", {"preserve_rng_state": "off", "noise": noise}, SEEN) for noise in ("strong", "weak")),
    ("router-noise", {"preserve_rng_state": "on", "noise": "strong"}, EQUAL),
    ("mode-flip", {"layer": "dropout", "flip": "between"}, SEEN),
    ("mode-flip", {"layer": "batchnorm", "flip": "between"},
     SEEN | {"non-reentrant, check off": "crashed, raised, different"}),
    ("mode-flip", {"layer": "dropout", "flip": "never"}, EQUAL | {"non-reentrant, check off": "bitwise equal"}),
    ("nested-skips", {"danger": "tuple"}, EQUAL | {"reentrant": "raised, different, crashed"}),
    ("nested-skips", {"danger": "arguments"}, EQUAL | {"reentrant": "rounding, bitwise equal"}),
    ("gradient-stores", {"net": "recurrent", "segments": "12"},
     STORES | {"one store, overwritten": "different", "stores added up afterwards": "rounding, bitwise equal"}),
    ("gradient-stores", {"net": "chain", "segments": "2"},
     STORES | dict.fromkeys(("one store, overwritten", "stores added up afterwards"), "bitwise equal")),
    *(
        ("microbatching", {"layer": layer, "microbatches": "3"},
         dict.fromkeys(("microbatches", "microbatches, recomputed"), split)
         | {"recomputed against microbatches": "bitwise equal"})
        for layer, split in (
            ("batchnorm", "different"), ("dropout", "different"), ("layernorm", "rounding"), ("plain", "rounding"))
    ),
    *(
        ("pullback-twice", {"retain_graph": retain, "dropout": dropout},
         {f"{engine}, second call": second for engine in ("keep", *EQUAL)})
        for retain, second in (("yes", "bitwise equal"), ("no", "raised")) for dropout in ("yes", "no")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "switches", "expected"), OUTCOMES, ids=[f"{n}, {s}" for n, s, _ in OUTCOMES])
def test_outcomes_by_label(name: str, switches: dict[str, str], expected: dict[str, str]) -> None:
    """Where torch may end in several ways, all of them are listed."""
    rows = outcomes(name, **switches)
    for label, allowed in expected.items():
        assert rows[label] in allowed.split(", "), label


@pytest.mark.parametrize("steps", ["1", "5"])
def test_a_layer_that_asks_counts_right(steps: str) -> None:
    silent, asks = run("asking-layer", asks="no", steps=steps), run("asking-layer", asks="yes", steps=steps)
    assert value(silent, "recomputed, last step", "forwards counted") == 2 * int(steps)
    assert row(silent, "recomputed, first step").outcome == "different"
    assert value(asks, "recomputed, last step", "forwards counted") == int(steps)
    assert row(asks, "recomputed, last step").outcome == "bitwise equal"


@pytest.mark.parametrize(
    ("steps", "blocks", "momentum"),
    [("1", "all", "0.5"), ("1", "half", "0.1"), ("10", "all", "0.1"), ("10", "half", "0.5")],  # every pair of values
)
def test_batchnorm_is_exact_only_if_the_second_forward_is_discarded(steps: str, blocks: str, momentum: str) -> None:
    outcome = run("batchnorm", steps=steps, blocks=blocks, momentum=momentum)
    off = {row.label: row.value("running statistics off by") for row in outcome.rows[1:]}
    counted = {row.label: row.value("batches counted") for row in outcome.rows}
    assert all(row.value("gradients of every step") is True for row in outcome.rows[1:])
    assert off["second forward discarded"] == 0 and counted["second forward discarded"] == counted["kept"] == int(steps)
    assert off["both forwards count"] > 1e-2 and counted["both forwards count"] == 2 * int(steps)
    assert (0 < off["momentum trick"] < 1e-5) if blocks == "all" else off["momentum trick"] > 1e-3
    assert row(outcome, "momentum trick").outcome == "different"


@pytest.mark.parametrize(("last", "runs"), [
    ("linear", {"first": (2, 2), "gelu": (2, 2), "middle": (2, 2), "last": (2, 1)}),
    ("relu", {"first": (2, 2), "gelu": (2, 2), "middle": (2, 2), "last": (2, 1)}),
    ("add", {"first": (2, 2), "gelu": (2, 2), "middle": (2, 1), "last": (1, 1)}),
])  # fmt: skip
def test_a_recompute_ends_where_the_last_saved_tensor_is_back(last: str, runs: dict[str, tuple[int, int]]) -> None:
    stopped, whole = run("early-stop", last=last, early_stop="on"), run("early-stop", last=last, early_stop="off")
    for layer, (begun, ended) in runs.items():
        part = row(stopped, layer)
        assert (part.value(BEGUN), part.value(ENDED)) == (begun, ended), layer
        assert (row(whole, layer).value(BEGUN), row(whole, layer).value(ENDED)) == (2, 2)
    assert row(stopped, "recomputed").outcome == row(whole, "recomputed").outcome == "bitwise equal"


@pytest.mark.parametrize(
    ("blocks", "early_stop", "forwards"),
    [("all", "off", 1.0), ("all", "on", 0.5), ("second", "off", 0.5), ("second", "on", 0.25), ("nested", "off", 2.0)],
)
def test_recompute_is_counted_exactly(blocks: str, early_stop: str, forwards: float) -> None:
    outcome = run("extra-forward", blocks=blocks, early_stop=early_stop)
    assert value(outcome, "recompute", "recompute") == forwards * value(outcome, "keep", "forward")
    assert row(outcome, "recompute").outcome == "bitwise equal"


@pytest.mark.parametrize(("source", "blocks", "reentrant", "n_missing"), [
    ("data", "all", "raised", 6),
    ("data", "first", "missing", 2),
    ("asked", "all", "bitwise equal", 0),
    ("asked", "first", "bitwise equal", 0),
    ("trained", "all", "bitwise equal", 0),
    ("trained", "first", "bitwise equal", 0),
])  # fmt: skip
def test_reentrant_needs_an_input_that_needs_a_gradient(
    source: str, blocks: str, reentrant: str, n_missing: int
) -> None:
    outcome = run("no-grad-input", input=source, blocks=blocks)
    assert row(outcome, "non-reentrant").outcome == "bitwise equal"
    assert row(outcome, "reentrant").outcome == reentrant
    assert value(outcome, "reentrant", MISSING) == n_missing


def test_only_the_in_place_way_keeps_everything() -> None:
    outcome = run("wrap-in-place", printed="wrapper")
    kept = {row.label: [row.value(question) for question in QUESTIONS] for row in outcome.rows[1:]}
    assert kept["forward replaced in place"] == [1, 1, 1, 1]
    assert kept["wrapper module"] == [0, 0, 0, 1]
    assert kept["closure over forward"] == [1, 1, 1, 0]
    assert "inner" in outcome.printed and {row.outcome for row in outcome.rows[1:]} == {"bitwise equal"}


def test_segments_save_memory_and_a_list_of_stores_costs_it() -> None:
    large, small = (
        run("segment-memory", length="16", batch="large"),
        run("segment-memory", length="16", batch="small"),
    )
    assert value(large, "one store", PEAK) < value(large, "plain", PEAK)
    lines = {series.name: series.y for series in small.chart.series}
    assert lines["list of stores"][-1] > 2 * lines["one store"][-1]
    for name in ("one store", "torch's checkpoint"):
        assert lines[name] == pytest.approx(lines["one store"], rel=0.02)


@pytest.mark.parametrize(("optimizer", "same"), [("sgd", True), ("momentum", False), ("adam", False), ("decay", False)])
def test_only_sgd_may_step_store_by_store(optimizer: str, same: bool) -> None:
    one, four = (run("stepping", optimizer=optimizer, segments=segments) for segments in ("1", "4"))
    off = value(four, "one step for each store, after batch 10", DISTANCE)
    assert (off < 1e-12) == same, off
    assert value(one, "one step for each store, after batch 10", DISTANCE) == 0


def test_each_pullback_of_a_recomputed_block_runs_it_again() -> None:
    outcome = run("pullback-twice", retain_graph="yes", dropout="yes")
    runs = {series.name: series.y for series in outcome.chart.series}
    assert runs == {"keep": (1, 1, 1), "non-reentrant": (1, 2, 3), "reentrant": (1, 2, 3)}


def test_the_pipelines_checkpoint_breaks_second_order_only() -> None:
    rows = outcomes("second-order", checkpoint="pipeline", microbatches="4", mode="train")
    right = {"rounding", "bitwise equal"}
    assert {rows[f"{mode}: gradient"] for mode in ("always", "except_last", "never")} <= right
    assert rows["always: Hessian-vector product"] == "raised"
    assert rows["except_last: Hessian-vector product"] == "different"
    assert rows["never: Hessian-vector product"] in right


@pytest.mark.parametrize("checkpoint", ["pipeline", "torch"])
@pytest.mark.parametrize("microbatches", ["1", "4"])
def test_eval_mode_and_torchs_checkpoint_are_right_in_both_orders(checkpoint: str, microbatches: str) -> None:
    mode = "eval" if checkpoint == "pipeline" else "train"
    outcome = run("second-order", checkpoint=checkpoint, microbatches=microbatches, mode=mode)
    assert {row.outcome for row in outcome.rows[1:]} <= {"rounding", "bitwise equal"}
    n_checkpointed = value(outcome, "always: gradient", "microbatches checkpointed")
    assert n_checkpointed == (0 if mode == "eval" else int(microbatches))


APART = ("nested-skips", "mode-flip")
"""These start processes: a second each, so they are run once a setting and not in the sweep."""
ONCE = ("derivatives", "gathers")


def combinations() -> list[tuple[str, dict[str, str]]]:
    """Each lesson with its defaults, and with the next value of every switch: the tests above have the pairs."""
    settings = []
    for lesson in (each for each in lessons() if each.name not in APART):
        for n in (0, 1)[: 1 if lesson.name in ONCE else 2]:
            settings.append((lesson.name, {switch.name: switch.values[n] for switch in lesson.switches}))
    return settings


@pytest.mark.parametrize(
    ("name", "switches"), combinations(), ids=lambda part: "-".join(part.values()) if isinstance(part, dict) else part
)
def test_an_outcome_is_complete_and_crosses_the_pipe(name: str, switches: dict[str, str]) -> None:
    outcome = run(name, **switches)
    assert outcome.switches == switches and outcome.experiment == name
    assert outcome.findings and all(sentence.endswith(".") for sentence in outcome.findings)
    assert outcome.rows[0].outcome == "baseline"
    assert outcome.chart.title.rstrip(")").endswith(("?", "chance", "raised"))
    assert all(len(series.y) == len(outcome.chart.x) for series in outcome.chart.series)
    assert from_msgpack(to_msgpack(outcome), LabOutcome) == outcome
    if switches == {switch.name: switch.default for switch in lesson_called(name).switches}:
        picture = recorded_pictures()[name]
        recorded = picture.chart
        assert without_digits(picture.answer) == without_digits(outcome.findings[-1])
        assert (recorded.kind, recorded.title, recorded.x) == (outcome.chart.kind, outcome.chart.title, outcome.chart.x)
        assert [series.name for series in recorded.series] == [series.name for series in outcome.chart.series]


def without_digits(sentence: str) -> str:
    """What another machine or another build of torch may round otherwise is left out."""
    return re.sub(r"[0-9][0-9.e,-]*", "", sentence)


def test_the_world_is_left_as_found() -> None:
    torch.manual_seed(11)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    run_lab("dropout", {})
    assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == threads


def test_equal_switches_give_equal_figures() -> None:
    first, second = run_lab("dropout", {}), run_lab("dropout", {})
    assert first.rows == second.rows and first.chart == second.chart


def test_unknown_names_are_told_with_what_there_is() -> None:
    with pytest.raises(BadInput, match=r"no experiment 'dropuot'.*dropout"):
        run_lab("dropuot", {})
    with pytest.raises(BadInput, match=r"p cannot be '9'.*no switch 'q'|no switch 'q'.*p cannot be '9'"):
        run_lab("dropout", {"p": "9", "q": "1"})


class Cube(nn.Module):
    """w³ summed: gradient 3w², Hessian 6w."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w**3 * (1.0 if self.training else 2.0)


W = torch.tensor([1.0, 2.0])
FIRST = 3 * W**2
DIRECTION = torch.randn(2, generator=torch.Generator().manual_seed(0))
EXPECTED = {
    "backward": FIRST,
    "autograd.grad": FIRST,
    "backward twice": 2 * FIRST,
    "create_graph": FIRST,
    "Hessian-vector product": 6 * W * DIRECTION,
    "gradient penalty": FIRST + 2 * FIRST * 6 * W,
    "eval mode": 2 * FIRST,
}


@pytest.mark.parametrize("name", derivatives.DERIVATIVES)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_each_derivative_of_a_cube(name: str) -> None:
    trainee = prepare(RunSpec(model=trap_nets.ref("plain")))
    trainee.model, trainee.inputs, trainee.targets = Cube(), torch.ones(1), None
    trainee.loss_function = lambda output, targets: output.sum()
    derived = derivatives.DERIVATIVES[name](trainee)["w"]
    assert derived is not None and not derived.requires_grad
    torch.testing.assert_close(derived, EXPECTED[name])


FIRST_ORDER = ("backward", "backward twice", "create_graph", "eval mode")


@pytest.mark.slow
def test_recompute_survives_everything_and_reentrant_does_not_survive_second_order() -> None:
    rows = outcomes("derivatives")
    assert {rows[f"{name}: non-reentrant"] for name in derivatives.DERIVATIVES} == {"bitwise equal"}
    assert {rows[f"{name}: reentrant"] for name in FIRST_ORDER} == {"bitwise equal"}
    assert {rows[f"{name}: reentrant"] for name in ("autograd.grad", "gradient penalty")} == {"raised"}
    assert rows["Hessian-vector product: reentrant"] in ("raised", "different", "missing")
    assert rows["backward: selective"] == "bitwise equal"
    assert {rows[f"{name}: selective"] for name in ("backward twice", "gradient penalty")} == {"raised"}
    assert [finding.partition(":")[0] for finding in run("derivatives").findings] == [
        "Non-reentrant", "Reentrant", "Selective",
    ]  # fmt: skip


def test_only_a_lesson_that_takes_a_model_is_given_one() -> None:
    with pytest.raises(BadInput, match="brings its own nets"):
        run_lab("dropout", {}, model=trap_nets.ref("plain"))


@pytest.mark.slow
def test_a_model_of_a_persons_own_that_has_no_second_order() -> None:
    rows = {row.label: row.outcome for row in run_lab("derivatives", {}, model=trap_nets.ref("no_second_order")).rows}
    assert rows["Hessian-vector product: keep"] == "raised"
    assert rows["Hessian-vector product: non-reentrant"] == "shown"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_ranks_gather_each_parameter_twice_or_hold_it() -> None:
    """The bytes follow from the parameters, and torch counts as many gathers itself."""
    lesson = run("gathers", rerun="layers")
    parameters = sum(p.nbytes for p in gathers.build()[0].parameters())
    assert [sum(sizes) for sizes in zip(*(series.y for series in lesson.chart.series))] == [2 * parameters, parameters]
    freed, held = (value(lesson, label, "sent by a rank") for label in (gathers.FREED, gathers.HELD))
    assert freed - held == parameters / gathers.N_RANKS
    assert value(lesson, gathers.HELD, "peak") > value(lesson, gathers.FREED, "peak")
    for label, reshard in ((gathers.FREED, True), (gathers.HELD, False)):
        model, inputs = gathers.build()
        with fake_group(0, gathers.N_RANKS), apply_policy(model, gathers.POLICIES["layers"]):
            split_model(model, ranks := Ranks(n_ranks=gathers.N_RANKS, reshard=reshard), mesh_of(ranks, "cpu"))
            for counts in (CommDebugMode(), CommDebugMode()):
                with counts:
                    model(inputs).square().mean().backward()
        n = sum(n for operator, n in counts.get_comm_counts().items() if "gather" in str(operator))
        assert n == sum(value(lesson, label, f"gathers in {phase}") for phase in gathers.PHASES)


@pytest.mark.slow
def test_a_segment_of_units_gathers_in_its_rerun() -> None:
    inside = row(run("gathers", rerun="layers"), gathers.FREED)
    around = row(run("gathers", rerun="pairs", units="parts"), gathers.FREED)
    assert around.value("gathers in forward") == 2 * inside.value("gathers in forward") == 2 * gathers.N_LAYERS
    assert inside.value("gathers in recompute") == 0 < around.value("gathers in recompute")


def test_second_order_through_reentrant_and_selective() -> None:
    _, reentrant = pair("dropout", ("1",), use_reentrant=True)
    assert "reentrant-second-order" in rules(reentrant)
    assert "selective-once" in rules(pair("dropout", **keeping("aten.addmm.default"))[1])

    def outcome(derivative: str, spec: RunSpec) -> str:
        loaded = load(spec.model)
        bare = derivatives.derive(msgspec.structs.replace(spec, policy=Policy()), loaded, derivative)
        return derivatives.judged(spec, loaded, "", derivative, bare).outcome

    plain, selective = (pair("dropout", **options)[1] for options in (ONE, keeping("aten.addmm.default")))
    with preserve_global_state():
        assert outcome("gradient penalty", reentrant) == "raised"
        assert outcome("Hessian-vector product", reentrant) == "different"
        assert outcome("backward twice", selective) == "raised"
        assert {outcome(derivative, plain) for derivative in derivatives.DERIVATIVES} == {"bitwise equal"}
    assert not {"reentrant-second-order", "selective-once"} & rules(pair("dropout", ("1",))[1])
