"""A step on many ranks, predicted in one process: to the byte what real ranks hold, and what a policy does to it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace
from torch import distributed

from benchmarks.ranks import MODELS, SPLITS
from explorer.engine.device.without_data import fake_group
from explorer.engine.model.describe import describe
from explorer.engine.ranks.predict import predict_ranks, ranks_to_play
from explorer.errors import BadInput, ModelFailed
from explorer.plan.export.formats import exported
from explorer.plan.memory.ledger import ledger
from explorer.plan.policy.file import dumps, file_of, loads
from explorer.plan.predict.calls import RNG_STATE_BYTES
from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.why.collectives import FUNCTIONAL, repeated, sent_bytes
from explorer.record.base import to_json
from explorer.record.graph import ModelRef
from explorer.record.measurement import RecordedRanks
from explorer.record.policy import KEEP_ALL, Policy, Unit
from explorer.record.run import Optimizer, Ranks, RunSpec

LAYERS = ["layers.0", "layers.1"]
TRANSFORMER = ModelRef(target=f"{MODELS}:transformer", arguments={"n_layers": len(LAYERS)})
NESTED = """
from torch import nn, ones
from torch.distributed.fsdp import fully_shard


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
        self.last = nn.Sequential(nn.Linear(6, 6), nn.GELU())

    def forward(self, x):
        return self.last(self.inner(self.first(x)).sin()).sin()


def build():
    return nn.Sequential(Layer(), Layer()), ones(2, 6)


def shard_inside(model, mesh):
    for layer in model:
        fully_shard(layer.inner, mesh=mesh)
        fully_shard(layer.last, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def broken(model, mesh):
    raise RuntimeError("no such mesh")
"""

OWN = """
from torch import distributed, empty_like, nn, ones
from torch.distributed.fsdp import fully_shard


class Net(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.up = how, nn.Linear(6, 6)
        if how == "own group":
            distributed.init_process_group("gloo", init_method="tcp://localhost:1", rank=0, world_size=4)
        if how == "larger":
            distributed.new_group([0, 1, 2, 3])
        if how == "asserted":
            assert distributed.get_world_size() == 4
        if how == "sharded":
            fully_shard(self.up)

    def forward(self, x):
        x = self.up(x)
        if self.how == "gathered":
            distributed.all_gather([empty_like(x) for _ in range(4)], x)
        if self.how == "summed":
            distributed.all_reduce(x.detach())
        return x if self.how != "wrong" else x.view(5)


def build(how):
    return Net(how), ones(2, 6)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "nested.py"
    path.write_text(NESTED)
    return path


PLAYS: dict[bytes, RecordedRanks] = {}


def predicted(
    ranks: Ranks, model: ModelRef = TRANSFORMER, policy: Policy = KEEP_ALL, *, optimizer: Optimizer = "none"
) -> RecordedRanks:
    """The prediction of each step, made once."""
    spec = RunSpec(model=model, policy=policy, ranks=ranks, optimizer=optimizer)
    key = to_json(spec)
    if key not in PLAYS:
        PLAYS[key] = predict_ranks(spec)
    return PLAYS[key]


def test_ranks_with_other_shards_are_found_and_equal_ones_are_played_once(file: Path) -> None:
    """Six rows on eight ranks: two ranks have none. The group is gone afterwards."""
    ranks = predicted(Ranks(n_ranks=8), ModelRef(target=f"{file}:build"), optimizer="adamw")
    assert [run.rank for run in ranks.ranks] == [0, 6] and ranks.missing == ()
    assert ranks.equal == {rank: 0 for rank in range(1, 6)} | {7: 6}
    shard_bytes = 4 * 2 * 4 * (6 + 1)
    """Four matrices and four vectors of two layers, a row each. torch pads a shard without rows, not its states."""
    for run, rows in zip(ranks.ranks, (1, 0)):
        roles = ledger(run, tick=0).by_role
        assert roles["parameter"] == shard_bytes
        assert roles["optimizer state"] == 2 * rows * shard_bytes + 4 * 16, "and a count of steps a parameter"
    assert not distributed.is_initialized()
    by_size = {((n,),): [rank] for rank, n in enumerate((5, 4, 9, 8, 7, 1))}
    assert ranks_to_play(by_size) == [0, 1, 2, 5], "the first, the heaviest, the last and one more"


def test_roles_and_collectives_of_fsdp_are_named() -> None:
    """A unit is gathered in forward and in backward; without resharding once, and its parameters stay."""
    freed, stayed = (predicted(Ranks(n_ranks=2, reshard=reshard)).ranks[0] for reshard in (True, False))
    calls = [Counter((call.kind, call.phase) for call in run.collectives) for run in (freed, stayed)]
    n_units = len(LAYERS) + 1
    assert calls[0]["all-gather", "forward"] == calls[1]["all-gather", "forward"] == n_units
    assert (calls[0]["all-gather", "backward"], calls[1]["all-gather", "backward"]) == (n_units, 0)
    assert calls[0]["reduce-scatter", "backward"] == calls[1]["reduce-scatter", "backward"] == n_units
    assert {call.block for call in freed.collectives} == {"", *LAYERS}
    assert sent_bytes(stayed) * 3 == sent_bytes(freed) * 2
    held = ledger(stayed).by_role["gathered parameter"]
    assert held > sum(call.n_bytes for call in stayed.collectives if call.kind == "all-gather") * 0.8


@pytest.mark.slow
def test_a_toggle_forecasts_what_the_play_of_its_policy_holds() -> None:
    """A unit that is gathered early has not begun its backward. Each live checkpoint keeps a generator's state."""
    policy = Policy.recompute(LAYERS)
    forecast = Forecaster(predicted(Ranks(n_ranks=2)).fullest, describe(TRANSFORMER)).forecast(policy)
    n_bytes = predicted(Ranks(n_ranks=2), policy=policy).fullest.step_peak_bytes
    assert abs(forecast.step_peak_bytes - n_bytes) <= RNG_STATE_BYTES


def test_a_sum_that_the_recompute_repeats_is_named_with_the_policy_that_keeps_it() -> None:
    split = SPLITS["tp"]
    again = predicted(split, policy=Policy.recompute(LAYERS)).ranks[0]
    assert sum(call.phase == "recompute" for call in again.collectives) == len(LAYERS)
    (sentence,) = repeated(again)
    assert f"repeats {len(LAYERS)} all-reduces" in sentence and FUNCTIONAL["all-reduce"] in sentence
    units = tuple(Unit(blocks=(x,), action="save_ops", save_ops=(FUNCTIONAL["all-reduce"],)) for x in LAYERS)
    once = predicted(split, policy=Policy(units=units)).ranks[0]
    assert repeated(once) == () and not any(call.phase == "recompute" for call in once.collectives)


def test_a_unit_that_is_gathered_twice_in_backward_is_named(file: Path) -> None:
    """torch before 2.13 frees a unit inside a recomputed block after the recompute, and gathers it again.

    https://github.com/pytorch/pytorch/issues/175406
    """
    ranks = Ranks(n_ranks=2, data="none", parallelize=f"{file}:shard_inside")
    run = predicted(ranks, ModelRef(target=f"{file}:build"), Policy.recompute(["0", "1"])).ranks[0]
    (gather,) = (call for call in run.collectives if call.phase == "recompute" and call.block == "0.inner")
    assert repeated(run) == (), "2.13 keeps it"
    (sentence,) = repeated(replace(run, collectives=(*run.collectives, replace(gather, phase="backward"))))
    assert sentence.startswith("0.inner is gathered twice in backward")


def test_the_export_for_fsdp2_is_the_step_that_was_predicted(tmp_path: Path) -> None:
    """Its wrappers stand below the hooks of FSDP2 and its units are the same: the same bytes, the same collectives.

    The file of a plan brings the choice of resharding.
    """
    policy = Policy.recompute([LAYERS[0], f"{LAYERS[1]}.up"])
    ranks = Ranks(n_ranks=2, reshard=False)
    text = exported(loads(dumps(file_of(policy, describe(TRANSFORMER), ranks=ranks))), "fsdp2").text
    (tmp_path / "exported.py").write_text(
        f"{text}\n\ndef split(model, mesh):\n    recompute_then_shard(model, mesh=mesh)\n"
    )
    theirs = predicted(Ranks(n_ranks=2, data="none", parallelize=f"{tmp_path}/exported.py:split")).fullest
    ours = predicted(ranks, policy=policy).fullest
    calls = [Counter((call.kind, call.n_bytes, call.phase) for call in run.collectives) for run in (theirs, ours)]
    assert calls[0] == calls[1] and sum(calls[0].values()) > len(LAYERS)
    assert theirs.step_peak_bytes == ours.step_peak_bytes


@pytest.mark.parametrize(("ranks", "sentence"), [
    (Ranks(n_ranks=3, n_tensor=2), "cannot be divided"),
    (Ranks(n_ranks=4, n_tensor=2, data="ddp"), "DDP takes no"),
    (Ranks(n_ranks=2, data="none"), "share nothing"),
    (Ranks(n_ranks=2, data="none", n_tensor=2), "brings no plan"),
])  # fmt: skip
def test_ranks_that_cannot_be_are_refused_in_a_sentence(ranks: Ranks, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        predicted(ranks)
    assert not distributed.is_initialized()


def test_a_function_that_cannot_split_is_named(file: Path) -> None:
    with pytest.raises(ModelFailed, match="broken.*no such mesh"):
        predicted(Ranks(n_ranks=2, data="none", parallelize=f"{file}:broken"), ModelRef(target=f"{file}:build"))


@pytest.mark.parametrize(("how", "sentence"), [
    ("own group", "of 2 and raised ValueError: trying to initialize the default process group twice"),
    ("larger", "of 2 and raised ValueError: the new group's world size"),
    ("asserted", "of 2 and raised AssertionError"),
    ("gathered", "of 2 and raised RuntimeError: all_gather has 4 tensors to fill"),
    ("sharded", "is split by its own code already"),
])  # fmt: skip
def test_a_model_that_is_split_by_its_own_code_is_refused_in_a_sentence(
    how: str, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    model = ModelRef(target=f"{tmp_path}/own.py:build", arguments={"how": how})
    with pytest.raises((ModelFailed, BadInput), match=sentence) as raised:
        predicted(Ranks(n_ranks=2), model)
    assert "--parallelize FILE.py:FUNCTION" in raised.value.hint and not distributed.is_initialized()
    with pytest.raises(ModelFailed, match="step without data.*shape"):
        predicted(Ranks(n_ranks=2), replace(model, arguments={"how": "wrong"}))


def test_a_model_that_calls_the_group_of_its_ranks_is_played(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    model = ModelRef(target=f"{tmp_path}/own.py:build", arguments={"how": "summed"})
    assert "all-reduce" in {call.kind for call in predicted(Ranks(n_ranks=2), model).fullest.collectives}
    with fake_group(0, 2):
        assert "up" in describe(model).by_fqn, "a policy is chosen in the same group"
    with pytest.raises(ModelFailed, match="without a process group"):
        describe(model)


def test_tokens_that_are_picked_by_value_are_refused_in_a_sentence() -> None:
    with pytest.raises(ModelFailed, match="decides by values that it computes"):
        predicted(Ranks(n_ranks=2), ModelRef(target="sample_models/moe.py", size="small"))


@pytest.mark.parametrize(("model", "ranks", "words"), [
    ("transformer", Ranks(n_ranks=2), ["1.2 % more", "FSDP2 real ranks"]),
    (
        "transformer",
        Ranks(n_ranks=4, n_tensor=2, parallelize=f"{MODELS}:split"),
        ["5 % more", "tensor parallelism"],
    ),
    ("transformer", Ranks(n_ranks=2, data="ddp"), []),
    ("picture", Ranks(n_ranks=2, data="ddp"), ["12 to 21 % more", "oneDNN"]),
])  # fmt: skip
def test_what_real_ranks_were_measured_to_hold_beyond_stands_beside_the_figure(
    model: str, ranks: Ranks, words: list[str]
) -> None:
    spec = RunSpec(model=ModelRef(target=f"{MODELS}:{model}"), ranks=ranks, optimizer="sgd")
    text = " ".join(predict_ranks(spec).by_rank[0].warnings)
    assert all(word in text for word in words)
    assert ("eal ranks" in text) is bool(words)
