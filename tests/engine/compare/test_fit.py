"""Levers on a step: each is really applied, holds what its play said, and is judged by real steps."""

from __future__ import annotations

from itertools import accumulate, permutations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace

from explorer.engine.bench.measure import measure, measure_without_data
from explorer.engine.compare import fit as player
from explorer.engine.compare import fit_judge
from explorer.engine.compare.fit import Player, fit
from explorer.engine.compare.fit_judge import Judge, SpecBaseline
from explorer.engine.model.load import load_for
from explorer.errors import BadInput, Cancelled, TimedOut
from explorer.plan import levers
from explorer.plan.card.cards import CARDS, capacity_bytes, parse_card
from explorer.record.base import from_msgpack, to_msgpack
from explorer.record.comparison import Comparison
from explorer.record.failure import Failure
from explorer.record.fit import Effect, Fit, Judgement, LeverRow, PlayedStep
from explorer.record.graph import ModelRef
from explorer.record.measurement import Measurement
from explorer.record.plan import Progress, silent
from explorer.record.policy import Policy
from explorer.record.run import OptimizerForm, Ranks, RunSpec
from tests import graphs

MODELS = {
    "gpt": {"n_layers": 2, "width": 32, "n_heads": 2, "length": 16, "batch": 4, "vocabulary": 64},
    "resnet": {"width": 8, "blocks_per_stage": 2, "n_stages": 2, "side": 32, "batch": 16},
    "recurrent": {"length": 8, "width": 64, "expansion": 2, "batch": 8, "vocabulary": 32},
    "mlp": {"n_layers": 4, "width": 256, "batch": 16},
    "tied_lm": {"n_layers": 2, "width": 32, "length": 16, "batch": 4, "vocabulary": 64},
    "vit": {"n_layers": 2, "width": 32, "n_heads": 2, "side": 16, "batch": 4},
}
"""Of `recurrent` and `mlp` the peak lies in the optimizer."""


def spec_of(name: str, **fields: object) -> RunSpec:
    model = ModelRef(target=f"sample_models/{name}.py", size="small", arguments=MODELS[name])
    return RunSpec(model=model, n_repeats=0, n_probes=0, **fields)  # type: ignore[arg-type]


def wide_mlp(**fields: object) -> RunSpec:
    """An MLP with large activations, which recompute lowers."""
    spec = spec_of("mlp", **fields)
    return replace(spec, model=replace(spec.model, arguments={"n_layers": 4, "width": 64, "batch": 512}))


class Answered(NamedTuple):
    """A fit, the steps that it played, and the answers that it reported on the way."""

    fit: Fit
    plays: list[RunSpec]
    parts: list[Fit]


def answered(monkeypatch: pytest.MonkeyPatch, spec: RunSpec, budget: str | None) -> Answered:
    plays: list[RunSpec] = []
    parts: list[Fit] = []

    def play(spec: RunSpec, *arguments: Any, **options: Any) -> Measurement:
        plays.append(spec)
        return measure_without_data(spec, *arguments, **options)

    def note(progress: Progress) -> None:
        if progress.part:
            parts.append(from_msgpack(progress.part, Fit))

    with monkeypatch.context() as patch:
        patch.setattr(player, "measure_without_data", play)
        return Answered(fit(spec, budget, note), plays, parts)


FEW_SETS = (("optimizer_form", "policy"),)
ALL_SETS = (
    *FEW_SETS, ("dtype", "policy"), ("n_accumulation", "policy"), ("optimizer", "policy"), ("dtype", "frozen"),
    ("frozen", "n_accumulation"), ("frozen", "optimizer_form"), ("frozen", "optimizer"),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "card", "sets"),
    [("100%", None, ()), ("55%", None, FEW_SETS), ("30%", None, ALL_SETS), (None, "24GiB", ())],
)
def test_a_fit_plays_the_step_each_lever_the_plan_and_the_sets_once(
    monkeypatch: pytest.MonkeyPatch, budget: str | None, card: str | None, sets: tuple[tuple[str, ...], ...]
) -> None:
    """A play of a large model takes minutes: the count may not grow unnoticed. Settings of an allocator need none."""
    spec = wide_mlp(card=card and parse_card(card, "", ""))
    answer = answered(monkeypatch, spec, budget)
    changed = [step for _, step in levers.levers_for(spec, fit_judge.outline_of(spec)[0])]
    singles = [step for step in changed if step.card == spec.card]
    assert answer.plays[: 1 + len(singles)] == [spec, *singles]
    recompute, *combined = answer.plays[1 + len(singles) :]
    assert replace(recompute, policy=spec.policy) == spec and recompute.policy.units
    fields = [tuple(sorted(name for name in step.__struct_fields__ if getattr(step, name) != getattr(spec, name)))
              for step in combined]  # fmt: skip
    assert tuple(fields) == sets
    assert len({to_msgpack(step) for step in answer.plays}) == len(answer.plays)
    assert len(answer.plays) == len(singles) + 2 + len(sets)


@pytest.mark.slow
def test_each_row_is_reported_as_soon_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit that is cut off has the rows so far, and says what it lacks."""
    answer, _, parts = answered(monkeypatch, wide_mlp(), "30%")
    n_rows = [len(part.rows) + len(part.left_out) for part in parts]
    n_singles = len(answer.rows) + len(answer.left_out)
    assert n_rows[: n_singles + 1] == list(range(n_singles + 1))
    assert all(part.as_is == answer.as_is for part in parts)
    judged = [sum(row.judgement != Judgement() for row in part.rows) for part in parts]
    assert judged == sorted(judged) and (judged[0], judged[-1]) == (0, len(answer.rows))
    end = "combinations not all tried)."
    assert parts[0].missing == f"The fit was cut off (levers not played: 12, {end}"
    assert parts[n_singles - 1].missing == f"The fit was cut off (levers not played: 1, rows not judged: 11, {end}"
    assert parts[-1].missing == f"The fit was cut off ({end}"
    assert not answer.missing and parts[-1].rows == answer.rows and parts[-1].judged_on == answer.judged_on


MOST_TICKS = 12
"""Events between birth and death of what a convolution takes for itself."""


def tensors_peak(run: Measurement) -> int:
    """The peak without what a convolution's kernel takes and returns inside: no step without data knows of it."""
    log = run.allocations
    assert log is not None
    line = [0] * (log.n_ticks + 2)
    for n_bytes, born, died, op in zip(log.n_bytes, log.born, log.died, log.op):
        if "convolution" in log.ops[op] and 0 < died - born < MOST_TICKS:
            continue
        line[born] += n_bytes
        line[died if 0 < died <= log.n_ticks else log.n_ticks + 1] -= n_bytes
    return max(accumulate(line))


BY_TENSORS = ("adamw8bit", "qlora", "offload")
"""Levers whose kernels take memory of their own on a CPU: only their tensors are compared."""
NOT_CHANGED = {("resnet", "lora"), ("resnet", "qlora")}
"""The only Linear of a ResNet is its last layer."""
LEVERS = [lever for lever in levers.LEVERS if lever.key not in ("attention", *levers.ALLOCATOR)]


@pytest.mark.slow
@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("lever", LEVERS, ids=lambda lever: lever.key)
@pytest.mark.parametrize("name", MODELS)
def test_a_lever_holds_what_its_play_said(name: str, lever: levers.Lever) -> None:
    spec = spec_of(name, optimizer_form="foreach")
    changed = lever.change(spec, Player(spec, None, silent).parts)
    if changed is None:
        assert (name, lever.key) in NOT_CHANGED
        return
    played, measured = measure_without_data(changed), measure(changed)
    assert measured.failure is None
    if lever.key in BY_TENSORS:
        assert played.step_peak_bytes == pytest.approx(measured.peaks.tracker_peak_bytes, rel=1e-3)
        return
    assert played.step_peak_bytes == pytest.approx(tensors_peak(measured), rel=1e-3)
    assert name == "resnet" or tensors_peak(measured) == measured.step_peak_bytes
    assert played.total_flops == measured.total_flops


def test_the_form_of_an_optimizer_is_applied() -> None:
    """Of a small model without large activations `foreach` holds the temporaries of all parameters at once."""
    peaks = {
        form: measure(spec_of("mlp", optimizer_form=form)).step_peak_bytes
        for form in ("default", "for-loop", "foreach", "fused")
    }
    assert peaks["default"] == peaks["for-loop"], "torch's default on a CPU"
    assert peaks["fused"] < peaks["for-loop"] < peaks["foreach"]


@pytest.fixture(scope="module")
def over_budget() -> Fit:
    """Dropout is off: then halves of the batch add up to the batch."""
    spec = spec_of("gpt")
    arguments = {**spec.model.arguments, "dropout": 0.0, "batch": 8, "length": 32}
    spec = replace(spec, model=replace(spec.model, arguments=arguments))
    peak_bytes = measure_without_data(spec).step_peak_bytes or 0
    return fit(spec, int(0.55 * peak_bytes))


@pytest.mark.slow
def test_real_steps_decide_what_a_lever_does_to_gradients(over_budget: Fit) -> None:
    effects = {row.levers: row.judgement.effect for row in over_budget.rows}
    assert not over_budget.as_is.fits and over_budget.judged_on is not None
    assert effects["recompute",] == "bitwise"
    assert effects["accumulate",] == effects["chunks",] == "rounding"
    assert all(effects[key,] == "different" for key in ("autocast", "dtype", "lora", "freeze"))


def test_a_set_is_beaten_by_a_row_that_costs_less_than_the_set_can_and_is_as_mild() -> None:
    def row(flops: int, effect: Effect, key: str = "sgd") -> LeverRow:
        step = PlayedStep(spec=spec_of("mlp"), step_peak_bytes=1, total_flops=flops)
        return LeverRow(levers=(key,), step=step, judgement=Judgement(effect=effect))

    as_is = row(100, "bitwise").step
    for fitting, chosen, beaten in (
        ((90, "different"), [(100, "different")], True),
        ((90, "different"), [(100, "rounding")], False),  # the set may be milder
        ((100, "different"), [(100, "different")], False),  # equal price: the set may need less memory
        ((90, "rounding"), [(80, "different")], False),  # the set may be cheaper
        ((90, "rounding"), [(95, "rounding"), (90, "different")], False),  # 0.95 x 0.90 is less
        ((80, "rounding"), [(95, "rounding"), (90, "different")], True),
    ):
        assert levers.is_beaten([row(*each) for each in chosen], [row(*fitting)], as_is) is beaten
    assert not levers.is_beaten([row(100, "different")], [], as_is)


@pytest.mark.slow
def test_every_row_is_a_step_that_was_played_whole(over_budget: Fit) -> None:
    for row in (*over_budget.rows, *over_budget.combinations):
        played = measure_without_data(row.step.spec)
        assert (played.step_peak_bytes, played.total_flops) == (row.step.step_peak_bytes, row.step.total_flops)
        assert row.step.fits == (row.step.step_peak_bytes <= (over_budget.budget_bytes or 0))
        assert row.step.step_peak_bytes < over_budget.as_is.step_peak_bytes


@pytest.mark.slow
def test_a_combination_is_cheaper_or_milder_than_every_lever_that_fits(over_budget: Fit) -> None:
    as_is, fitting = over_budget.as_is, [row for row in over_budget.rows if row.step.fits]
    singles = [row for row in fitting if row.levers != ("offload",)]  # its price is time, and is in no FLOPs
    for row in over_budget.combinations:
        assert row.step.fits and len(row.levers) > 1 and row.judgement.effect != "not judged"
        for single in singles:
            cheaper = levers.price(row.step, as_is) < levers.price(single.step, as_is)
            assert cheaper or levers.severity(row) < levers.severity(single)


@pytest.mark.slow
def test_dropout_and_batch_norm_do_not_survive_halving_the_batch() -> None:
    for name, kind in (("gpt", "Dropout"), ("resnet", "BatchNorm2d")):
        spec = spec_of(name)
        halved = levers.under(spec, ["accumulate"], levers.Parts())
        row = LeverRow(levers=("accumulate",), step=PlayedStep(spec=halved, step_peak_bytes=1))
        row = Judge(spec, silent).judged(row)
        assert row.judgement.effect == "different" and kind in row.judgement.reason


@pytest.mark.slow
def test_the_form_of_the_optimizer_rounds_and_another_optimizer_differs() -> None:
    foreach = spec_of("mlp", optimizer_form="foreach")
    baseline = SpecBaseline(foreach)
    assert baseline.compared(foreach).verdict == "bitwise equal"
    forms = [baseline.compared(replace(foreach, optimizer_form=form)) for form in ("for-loop", "fused")]
    assert {comparison.verdict for comparison in forms} <= {"bitwise equal", "rounding"}
    other = baseline.compared(replace(foreach, optimizer="sgd"))
    assert other.verdict == "different" and all(diff.bitwise for diff in other.gradients)


@pytest.mark.parametrize(("key", "options"), [
    (levers.SEGMENTS, "expandable_segments:True"), (levers.MAX_SPLIT, "max_split_size_mb:128"),
])  # fmt: skip
def test_settings_of_the_allocator_are_played_on_the_same_timeline(key: str, options: str) -> None:
    spec = spec_of("mlp", card=parse_card("24GiB", "", ""))
    player = Player(spec, None, silent)
    changed = levers.under(spec, (key,), player.parts)
    assert changed.card is not None and changed.card.options == options
    fast, whole = player._played(changed), measure_without_data(changed)
    assert fast.card is not None and whole.card is not None and fast.spec == changed
    assert fast.card == replace(whole.card, other_settings=())
    row = LeverRow(levers=(key,), step=levers.played_step(fast, player.limit_bytes))
    assert Judge(spec_of("mlp"), silent).judged(row).judgement.effect == "bitwise"


def test_a_setting_that_makes_the_step_fit_is_offered_though_it_would_reserve_more_without_end() -> None:
    """On the full card, the blocks that the setting left whole return to the driver."""
    arguments = {"width": 512, "length": 512, "batch": 16, "n_layers": 6, "n_heads": 8}
    model = ModelRef(target="sample_models/gpt.py", size="small", arguments=arguments)
    card = replace(CARDS["h100"], total_bytes=3800 << 20, taken_bytes=0)
    player = Player(RunSpec(model=model, card=card), None, silent)
    changed = player._played(levers.under(player.spec, (levers.MAX_SPLIT,), player.parts))
    step = player._step(changed)
    assert step.fits and not player.as_is.fits and step.needed_bytes > player.as_is.needed_bytes
    assert player.saves(LeverRow(levers=(levers.MAX_SPLIT,), step=step))
    assert not player.saves(LeverRow(levers=(levers.MAX_SPLIT,), step=replace(step, fits=False)))


@pytest.mark.slow
def test_a_card_names_what_it_would_reserve_without_end() -> None:
    card, spec = parse_card("860MiB", "", ""), spec_of("mlp")
    wide = replace(spec.model, arguments={**MODELS["mlp"], "width": 1024})
    result = fit(replace(spec, model=wide, card=card))
    as_is, (row,) = result.as_is, [row for row in result.rows if row.levers == ("sgd",)]
    assert not as_is.fits and as_is.reserved_bytes is not None and as_is.reserved_bytes > capacity_bytes(card)
    assert row.step.needed_bytes == row.step.reserved_bytes and row.step.reserved_bytes < as_is.reserved_bytes
    reasons = {row.lever: row.reason for row in result.left_out}
    assert "the allocator reserves no less" in reasons["optimizer with foreach=False"]
    assert result.judged_on is not None and result.judged_on.card is None
    assert result.judged_on.optimizer_form == "foreach", "torch's default on a card"


@pytest.mark.slow
def test_a_lever_that_alone_saves_nothing_helps_where_recompute_has_moved_the_peak() -> None:
    """The peak lies in backward. Below it lies that of the optimizer, with temporaries of all parameters."""

    def at(batch: int) -> RunSpec:
        spec = spec_of("mlp", optimizer_form="foreach")
        arguments = {**spec.model.arguments, "n_layers": 8, "width": 128, "batch": batch}
        return replace(spec, model=replace(spec.model, arguments=arguments))

    optimizer = measure_without_data(at(2))
    assert optimizer.peak_phase == "optimizer"
    result = fit(at(192), (optimizer.step_peak_bytes or 0) - 1)
    assert result.as_is.fits is False and result.combinations
    reasons = {row.lever: row.reason for row in result.left_out}
    assert reasons["optimizer with foreach=False"] == reasons["optimizer with fused=True"] == "It saves nothing here."
    mild = [row for row in result.combinations if row.judgement.effect in ("bitwise", "rounding")]
    assert any({"foreach", "fused"} & set(row.levers) and levers.RECOMPUTE in row.levers for row in mild)


SWITCH = """
import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, attn_implementation):
        super().__init__()
        self.qkv, self.fused = nn.Linear(32, 96), attn_implementation == "sdpa"

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = (q @ k.transpose(-2, -1) / 4).softmax(-1) @ v
        return x + mixed.transpose(1, 2).flatten(2)


def build(attn_implementation="eager"):
    return nn.Sequential(*(Attention(attn_implementation) for _ in range(3))), torch.randn(2, 128, 32)
"""


@pytest.mark.slow
def test_a_switch_of_the_attention_is_tried_where_the_model_has_one(tmp_path: Path) -> None:
    (tmp_path / "switch.py").write_text(SWITCH)
    own = RunSpec(model=ModelRef(target=f"{tmp_path}/switch.py:build"), n_repeats=0)
    small = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    arguments = {**small, "vocab_size": 64, "length": 64, "attn_implementation": "eager"}
    llama = replace(own, model=ModelRef(target="hf:LlamaConfig", arguments=arguments))
    for spec in (own, llama):
        (row,) = [row for row in fit(spec).rows if row.levers == ("attention",)]
        measured = measure(row.step.spec)
        assert row.step.step_peak_bytes == pytest.approx(measured.step_peak_bytes, rel=1e-3)
        assert row.judgement.effect == "rounding"
    assert not levers_named(fit(spec_of("mlp")), "attention"), "an MLP has no such argument"


def levers_named(result: Fit, key: str) -> list[LeverRow]:
    return [row for row in result.rows if key in row.levers]


UNEVEN = """
import torch
from torch import nn


def build():
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(3, 8)


def huge():
    return nn.Sequential(nn.Linear(30_000, 30_000), nn.ReLU(), nn.Linear(30_000, 8)), torch.randn(4, 30_000)
"""


@pytest.mark.slow
def test_a_batch_that_cannot_be_halved_is_left_out_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "uneven.py").write_text(UNEVEN)
    result = fit(RunSpec(model=ModelRef(target=f"{tmp_path}/uneven.py:build"), n_repeats=0))
    reasons = {row.lever: row.reason for row in result.left_out}
    assert "batch of 3 samples cannot be split" in reasons["half the batch, accumulated twice"]


@pytest.mark.slow
def test_a_step_too_large_for_this_machine_is_played_and_not_judged(tmp_path: Path) -> None:
    (tmp_path / "uneven.py").write_text(UNEVEN)
    result = fit(RunSpec(model=ModelRef(target=f"{tmp_path}/uneven.py:huge"), card=parse_card("80GiB", "", "")))
    assert result.rows and result.judged_on is None
    assert {row.judgement.effect for row in result.rows} == {"not judged"}
    assert all("No size of the model" in row.judgement.reason for row in result.rows)


@pytest.mark.parametrize(("flops", "free_bytes", "runs_here"), [
    (5e9, 801, True), (5e9 + 1, 801, False), (None, 801, False), (1, 800, False), (1, None, True),
])  # fmt: skip
def test_a_step_is_judged_where_few_flops_and_room_for_eight_of_it_are_there(
    monkeypatch: pytest.MonkeyPatch, flops: int | None, free_bytes: int | None, *, runs_here: bool
) -> None:
    monkeypatch.setattr(player, "available_bytes", lambda: free_bytes)
    step = PlayedStep(spec=spec_of("mlp"), step_peak_bytes=100, total_flops=flops)
    assert player._runs_here(step) is runs_here


def test_smaller_models_are_tried_from_the_default_size_down() -> None:
    few = {"batch": 2, "length": 32}
    large = ModelRef(target="sample_models/gpt.py", size="gpu", arguments={"n_layers": 3})
    assert [(one.size, one.arguments) for one in player._smaller(large)] == [("small", {}), ("small", few)]
    assert [one.arguments for one in player._smaller(replace(large, size="small", arguments={}))] == [few]
    vision = ModelRef(target="sample_models/resnet.py", size="small", arguments={"width": 8})
    assert [one.arguments for one in player._smaller(vision)] == [{}, {"batch": 2}], "it has no length"
    kept = {"hidden_size": 32, levers.ATTENTION: "eager"}
    named = ModelRef(target="hf:LlamaConfig", arguments=kept)
    assert [one.arguments for one in player._smaller(named)] == [
        {levers.ATTENTION: "eager"}, {levers.ATTENTION: "eager", **few}, {**kept, **few},
        {**kept, **few, "num_hidden_layers": 2},
    ]  # fmt: skip


def test_what_the_judged_model_does_not_have_is_left_out_and_told() -> None:
    judge, spec = Judge(spec_of("mlp"), silent), spec_of("mlp")

    def judged(key: str, *blocks: str) -> Judgement:
        policy = Policy.recompute(blocks)
        step = PlayedStep(spec=replace(spec, policy=policy), step_peak_bytes=1)
        return judge.judged(LeverRow(levers=(key,), step=step)).judgement

    both, none, freeze = judged(levers.RECOMPUTE, "1", "9"), judged(levers.RECOMPUTE, "9"), judged("freeze")
    assert (both.effect, both.reason) == ("bitwise", "The judged model has 1 of the 2 units that are recomputed.")
    assert (none.effect, none.reason) == ("not judged", "The judged model has 0 of the 1 units that are recomputed.")
    assert (freeze.effect, freeze.reason) == ("different", "Other parameters are trained.")
    assert judged("attention") == Judgement(reason="The judged model has nothing that the lever changes.")


def test_a_batch_in_float64_stays_and_any_other_gets_the_type_of_the_step() -> None:
    like = torch.zeros(1, dtype=torch.bfloat16)
    types = [torch.float64, torch.float32, torch.bfloat16]
    found = [fit_judge._in_type_of(torch.zeros(1, dtype=dtype), like) for dtype in types]
    assert [one.dtype for one in found if isinstance(one, torch.Tensor)] == [torch.float64, *[torch.bfloat16] * 2]
    assert fit_judge._in_type_of("label", like) == "label" and fit_judge._in_type_of(like, None) is like


def test_other_steps_are_refused_in_one_sentence() -> None:
    for changes in ({"policy": Policy.recompute(["0"])}, {"forward_only": True}, {"ranks": Ranks(n_ranks=2)}):
        with pytest.raises(BadInput, match="whole training step of one process"):
            fit(replace(spec_of("mlp"), **changes))


@pytest.fixture(scope="module")
def small_player() -> Player:
    """An MLP over its limit by a byte."""
    peak_bytes = measure_without_data(spec_of("mlp")).step_peak_bytes or 0
    return Player(spec_of("mlp"), peak_bytes - 1, silent)


def test_a_lever_saves_if_its_step_needs_a_byte_less(small_player: Player) -> None:
    as_is = small_player.as_is
    for less, saves in ((0, False), (1, True), (-1, False)):
        step = replace(as_is, step_peak_bytes=as_is.step_peak_bytes - less)
        assert small_player.saves(LeverRow(levers=("sgd",), step=step)) is saves


class Sets:
    """What `Player.combined` plays and returns for rows of single levers, each with its effect."""

    def __init__(self, player: Player, patch: pytest.MonkeyPatch) -> None:
        self._player = player
        self.played: list[tuple[str, ...]] = []
        self.with_recompute: set[tuple[str, ...]] = set()
        """Sets that fit only with recompute; all others fit without."""
        self.raises: dict[tuple[str, ...], Exception] = {}
        patch.setattr(player, "_with_recompute", self._play)

    def _play(self, keys: tuple[str, ...]) -> LeverRow:
        self.played.append(keys)
        if keys in self.raises:
            raise self.raises[keys]
        added = (levers.RECOMPUTE,) if keys in self.with_recompute else ()
        return LeverRow(levers=(*keys, *added), step=replace(self._player.as_is, fits=True))

    def combined(self, **effects: Effect) -> list[tuple[tuple[str, ...], Effect]]:
        rows = [
            LeverRow(levers=(key,), step=self._player.as_is, judgement=Judgement(effect=effect))
            for key, effect in effects.items()
        ]
        return [(row.levers, row.judgement.effect) for row in self._player.combined(rows)]


@pytest.fixture
def sets(small_player: Player, monkeypatch: pytest.MonkeyPatch) -> Sets:
    return Sets(small_player, monkeypatch)


def test_a_set_that_fits_ends_the_search_in_all_sets_that_hold_it(sets: Sets) -> None:
    both = sets.combined(sgd="different", accumulate="rounding")
    assert both == [(("accumulate",), "rounding"), (("sgd",), "different")]
    assert sets.played == [("accumulate",), ("sgd",)], "both together are no cheaper"


def test_a_set_that_fits_with_recompute_alone_leaves_larger_sets_to_try(sets: Sets) -> None:
    """More levers may need less recompute."""
    sets.with_recompute = {("accumulate",), ("sgd",)}
    assert sets.combined(sgd="different", accumulate="rounding", recompute="bitwise") == [
        (("accumulate", "recompute"), "rounding"), (("sgd", "recompute"), "different"),
        (("sgd", "accumulate"), "different"),
    ]  # fmt: skip


def test_a_set_has_the_worst_effect_of_its_levers_and_none_if_one_is_not_judged(sets: Sets) -> None:
    sets.with_recompute = {("accumulate",)}
    assert sets.combined(accumulate="rounding", recompute="different") == [(("accumulate", "recompute"), "different")]
    assert sets.combined(accumulate="bitwise", recompute="rounding") == [(("accumulate", "recompute"), "rounding")]
    assert sets.combined(accumulate="rounding") == [(("accumulate", "recompute"), "not judged")]


def test_a_set_that_cannot_be_played_is_skipped_and_a_cancelled_fit_ends(sets: Sets) -> None:
    sets.raises = {("accumulate",): BadInput("No batch.")}
    assert sets.combined(sgd="different", accumulate="rounding")[0] == (("sgd",), "different")
    for error in (Cancelled("Cancelled."), TimedOut("Too late.")):
        sets.raises = {("accumulate",): error}
        with pytest.raises(type(error)):
            sets.combined(sgd="different", accumulate="rounding")


def test_twelve_sets_are_played_at_most(sets: Sets) -> None:
    effects: dict[str, Effect] = {"sgd": "bitwise", "accumulate": "bitwise", "chunks": "bitwise", "lora": "bitwise"}
    sets.with_recompute = {keys for n in range(1, 5) for keys in permutations(effects, n)}
    assert len(sets.combined(**effects)) == len(sets.played) == 12


@pytest.mark.parametrize("optimizer_form", ["default", "fused"])
def test_the_judged_step_has_the_optimizer_form_of_the_card(optimizer_form: OptimizerForm) -> None:
    for card, form in ((parse_card("24GiB", "", ""), "foreach"), (None, "default")):
        player = Player(spec_of("mlp", card=card, optimizer_form=optimizer_form), None, silent)
        small = player.small()
        assert small is not None and small.card is None and small.n_repeats == 0
        assert small.optimizer_form == (form if optimizer_form == "default" else optimizer_form)
        assert small.holds_output == player.spec.output_is_held, "as on the card"


EQUAL, DIFFERS = (graphs.compared(graphs.GRAPH, graphs.SPEC, equal=equal) for equal in (True, False))
ROUNDS = replace(DIFFERS, gradients=tuple(
    replace(diff, candidate_error=1e-8, baseline_error=1e-8) for diff in DIFFERS.gradients
))  # fmt: skip
FAILED = replace(EQUAL, failure=Failure(kind="model raised", sentence="It raised."))
NOT_EQUAL_TWICE = replace(EQUAL, reproducible=False, not_reproducible_because="Two steps differ.")


class Judged:
    """Judges rows of a model, where every comparison has the same outcome."""

    def __init__(self, name: str, comparison: Comparison, patch: pytest.MonkeyPatch) -> None:
        self._judge, self._spec = Judge(spec_of(name), silent), spec_of(name)
        comparison = replace(comparison, baseline=replace(comparison.baseline, spec=self._spec))
        patch.setattr(SpecBaseline, "compared", lambda baseline, candidate: comparison)

    def row(self, key: str) -> Judgement:
        row = LeverRow(levers=(key,), step=PlayedStep(spec=self._spec, step_peak_bytes=1))
        return self._judge.judged(row).judgement


@pytest.mark.parametrize(
    ("comparison", "effect", "reason"),
    [
        (EQUAL, "bitwise", ""), (ROUNDS, "rounding", ""), (FAILED, "not judged", "It raised."),
        (NOT_EQUAL_TWICE, "not judged", "Two steps differ."),
        (DIFFERS, "different", "Parameters are rounded to bfloat16 before the first step."),
    ],
)  # fmt: skip
def test_the_verdict_of_the_real_steps_is_the_effect(
    comparison: Comparison, effect: Effect, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    judgement = Judged("mlp", comparison, monkeypatch).row("dtype")
    assert (judgement.effect, judgement.reason) == (effect, reason)
    worst = comparison.worst
    assert judgement.distance == (worst and worst.relative_norm)


STEP_OF_ITS_OWN = "The optimizer makes another step of the gradients: lr is 0.2 instead of 0.1."


@pytest.mark.parametrize(
    ("name", "key", "reason"),
    [
        ("resnet", "accumulate", "Each half is computed alone, and the model has BatchNorm2d."),
        ("gpt", "accumulate", "Each half is computed alone, and the model has Dropout."),
        ("tied_lm", "accumulate", fit_judge.BY_HALVES),
        ("resnet", "freeze", "Other parameters are trained."), ("mlp", "lora", "Other parameters are trained."),
        ("mlp", "autocast", "Products are made in bfloat16, which rounds more."),
        ("mlp", "chunks", "Another cause."),
    ],
)  # fmt: skip
def test_why_a_lever_changes_the_training(name: str, key: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = replace(DIFFERS, causes=("Another cause.",))
    assert Judged(name, comparison, monkeypatch).row(key).reason == reason
    comparison = replace(comparison, optimizer_settings=(("lr", "0.1", "0.2"),))
    trains_others = key in ("freeze", "lora")
    assert Judged(name, comparison, monkeypatch).row(key).reason == (reason if trains_others else STEP_OF_ITS_OWN)


def test_an_error_of_the_small_step_is_the_reason_and_a_cancelled_one_ends_the_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged = Judged("mlp", EQUAL, monkeypatch)

    def fail(error: Exception) -> None:
        def compared(baseline: SpecBaseline, candidate: RunSpec) -> Comparison:
            raise error

        monkeypatch.setattr(SpecBaseline, "compared", compared)

    fail(RuntimeError("no kernel"))
    assert judged.row("sgd").effect == "not judged" and "no kernel" in judged.row("sgd").reason
    for error in (Cancelled("Cancelled."), TimedOut("Too late.")):
        fail(error)
        with pytest.raises(type(error)):
            judged.row("sgd")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_a_judged_step_is_whole_and_no_lever_stays_for_the_next(name: str) -> None:
    """The optimizer's step is part of it, and statistics of BatchNorm move once."""
    spec = spec_of(name)
    baseline = SpecBaseline(spec)
    blocks = [fqn for fqn, module in load_for(spec).model.named_modules() if fqn and not list(module.children())]
    recomputed = baseline.compared(replace(spec, policy=Policy.recompute(blocks[:3])))
    assert recomputed.verdict == "bitwise equal" and recomputed.n_steps == 2
    assert bool(recomputed.buffers) == (name == "resnet")
    other = baseline.compared(replace(spec, optimizer="sgd"))
    assert other.verdict == "different" and all(diff.bitwise for diff in other.gradients)
    assert all(not diff.bitwise for diff in other.parameters if diff.trained)
    assert baseline.compared(spec).verdict == "bitwise equal"
