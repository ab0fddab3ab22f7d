"""Every export: what is written, which blocks it names, and what is said of the differences."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from explorer.errors import InvalidPlan, InvalidPolicy
from explorer.plan.export.formats import FORMATS, exported, first_of, prefix_of
from explorer.plan.pipeline.actions import to_csv
from explorer.plan.pipeline.schedules import one_f_one_b
from explorer.record.files import PolicyFile
from explorer.record.policy import KEEP_ALL, Policy, Unit
from explorer.record.run import PipelinePlan
from tests.plan.export.runs import LAYERS, PLAN, Chain, assert_these_alone_run_again, chain_loss, file_of, module_of


def test_an_unknown_target_is_named() -> None:
    with pytest.raises(InvalidPolicy, match="no exporter torhc. Did you mean torch"):
        exported(PolicyFile(policy=Policy()), "torhc")
    assert "torch" in FORMATS


def test_every_form_answers_every_policy() -> None:
    offload = Unit(blocks=("layers.1",), action="offload")
    save = Unit(blocks=("layers.2",), action="save_ops", save_ops=("aten.mm.default",))
    policies = (
        Policy(),
        Policy.recompute(["layers.0", "layers.3"]),
        Policy.recompute([("layers.0", "layers.1"), "layers.3.mlp"], preserve_rng_state=False, restore_rng=("python",)),
        Policy(units=(offload, save)),
    )
    for policy in policies:
        for name in FORMATS:
            form = exported(PolicyFile(policy=policy, pipeline=PLAN), name)
            assert form.target == name and form.written_for
            assert bool(form.text) is (form.fit != "not expressible")
            assert bool(form.reasons) is (form.fit != "exact"), name
            if form.recomputed is not None and form.fit == "exact":
                assert form.recomputed == policy.blocks and not form.extra and not form.missing
            if form.recomputed is not None and form.fit == "approximated":
                assert form.as_run is not None and form.as_run.blocks == form.recomputed
                assert set(form.recomputed) == (set(policy.blocks) | set(form.extra)) - set(form.missing)


@pytest.mark.parametrize(
    ("target", "policy", "words"),
    [
        ("huggingface", Policy.recompute([("layers.0", "layers.1")]), "layers.0 and layers.1 are recomputed together"),
        ("huggingface", Policy.recompute(["layers.0"], restore_rng=("numpy",)), "torch does not stash (numpy)"),
        ("lightning", Policy(units=(Unit(blocks=("a",), action="offload"),)), "a is offloaded; there it is kept"),
        ("megatron", Policy.recompute(["layers.0", "layers.0.mlp"]), "layers.0.mlp is no numbered layer"),
        ("megatron", Policy.recompute(["a.layers.0", "b.layers.0"]), "Layers of a.layers and of b.layers are chosen"),
    ],
)
def test_what_is_lost_is_a_sentence(target: str, policy: Policy, words: str) -> None:
    form = exported(PolicyFile(policy=policy), target)
    assert form.fit != "exact" and words in " ".join(form.reasons)


def test_what_the_target_does_is_a_policy_that_can_be_measured() -> None:
    file = file_of(("layers.0", "layers.1"), "layers.3", restore_rng=("numpy",), early_stop=False)
    form = exported(file, "lightning")
    assert form.as_run == Policy.recompute(["layers.0", "layers.1", "layers.3"], running_stats="every_forward")
    reentrant = exported(file_of("layers.1"), "megatron").as_run
    assert reentrant is not None and reentrant.use_reentrant and reentrant.blocks == ("layers.0",)
    assert exported(file, "torch").as_run == file.policy
    assert exported(file_of("head"), "megatron").as_run is None


def test_what_changes_no_gradient_is_a_note() -> None:
    form = exported(file_of("layers.0", early_stop=False), "lightning")
    assert form.fit == "exact" and "early_stop is on there and off in the policy" in form.notes[0]
    assert not exported(file_of("layers.0", early_stop=False), "torch").notes


FILE = PolicyFile(
    policy=KEEP_ALL, pipeline=PipelinePlan(stages=(("a", "b"), ("c",)), n_microbatches=3, schedule="1F1B")
)


def test_stages_and_schedule_are_exported() -> None:
    assert json.loads(exported(FILE, "stages").text) == [["a", "b"], ["c"]]
    assert exported(FILE, "schedule").text == to_csv(one_f_one_b(2, 3))


@pytest.mark.parametrize("target", ["stages", "schedule", "megatron-layout"])
def test_a_file_without_a_plan_says_so(target: str) -> None:
    with pytest.raises(InvalidPlan, match="holds no pipeline plan"):
        exported(PolicyFile(policy=KEEP_ALL), target)


def recompute(model: nn.Module, names: list[str]) -> None:
    """As any program does that takes a list of modules."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for name in names:
        parent, _, index = name.rpartition(".")
        model.get_submodule(parent).register_module(index, checkpoint_wrapper(model.get_submodule(name)))


def test_names_and_numbers_choose_the_same_blocks_and_those_run_again() -> None:
    chosen, model = ("layers.3", "layers.1"), Chain()
    form = exported(file_of(*chosen), "names")
    document = yaml.safe_load(form.text)
    assert document == {"names": ["layers.3", "layers.1"], "numbers": {"layers": [1, 3]}}
    assert form.fit == "exact" and form.recomputed == chosen and form.checked == "executed"
    for names in (document["names"], [f"layers.{i}" for i in document["numbers"]["layers"]]):
        assert_these_alone_run_again(model, chain_loss, lambda model, names=names: recompute(model, names), chosen)


def test_names_are_of_every_list_and_any_block() -> None:
    blocks = ("enc.0", "dec.1.mlp", "dec.0", "1", "true")
    document = yaml.safe_load(exported(file_of(*blocks), "names").text)
    assert document == {"names": list(blocks), "numbers": {"enc": [0], "dec": [0], "": [1]}}
    assert yaml.safe_load(exported(file_of(), "names").text) == {"names": [], "numbers": {}}
    assert exported(file_of("a", early_stop=False, use_reentrant=True), "names").fit == "exact"


def test_no_other_prefix_differs_less() -> None:
    stages = [[0, 1, 2], [3, 4, 5]]
    for n in range(7):
        for chosen in itertools.combinations(range(6), n):
            differ = [len(set(chosen) ^ set(first_of(stages, k))) for k in range(4)]
            assert differ[prefix_of(stages, chosen)] == min(differ)


def plan_of(*stages: tuple[str, ...]) -> PipelinePlan:
    return PipelinePlan(stages=stages, n_microbatches=4)


def expanded(layout: str) -> list[str]:
    """Stages as strings of E, t and L: `x*n` repeats a part, `(...)*n` several, `|` separates, commas are ignored."""
    layout = re.sub(r"\(([^)]+)\)\*(\d+)", lambda match: match[1] * int(match[2]), layout.replace(",", ""))
    return re.sub(r"(.)\*(\d+)", lambda match: match[1] * int(match[2]), layout).split("|")


@pytest.mark.parametrize(
    ("chosen", "n", "extra", "missing"),
    [(LAYERS[:3], 3, (), ()), (LAYERS[:4:3], 2, LAYERS[1:2], LAYERS[3:4]), (LAYERS[4:], 1, LAYERS[:1], LAYERS[4:])],
)
def test_without_a_plan_it_is_a_prefix(
    chosen: tuple[str, ...], n: int, extra: tuple[str, ...], missing: tuple[str, ...]
) -> None:
    form = exported(file_of(*chosen), "megatron")
    assert form.text == f"--recompute-granularity full --recompute-method block --recompute-num-layers {n}\n"
    assert (form.recomputed, form.extra, form.missing) == (LAYERS[:n], extra, missing)
    assert form.fit == ("exact" if not extra else "approximated")


def test_with_a_plan_it_is_a_prefix_of_every_stage() -> None:
    plan = plan_of(("embed", *LAYERS[:2]), (*LAYERS[2:], "norm", "head"))
    form = exported(file_of("layers.0", "layers.2", plan=plan), "megatron")
    assert form.fit == "exact" and "--recompute-num-layers 1\n" in form.text
    uneven = exported(file_of("layers.2", "layers.3", plan=plan), "megatron")
    assert (uneven.recomputed, uneven.extra, uneven.fit) == (LAYERS[:4], LAYERS[:2], "approximated")
    none = exported(file_of("layers.4", plan=plan), "megatron")
    assert none.recomputed == () and none.missing == ("layers.4",) and none.text.startswith("#")


@pytest.mark.parametrize(
    ("stages", "layout"),
    [
        ((("embed", *LAYERS[:2]), (*LAYERS[2:], "norm", "head")), "Et*2|t*3L"),
        ((("embed",), LAYERS[:1], LAYERS[1:4], (LAYERS[4], "head")), "E|t|t*3|tL"),
        ((("embed", *LAYERS), ("norm", "head")), "Et*5|L"),
        ((LAYERS[:2], LAYERS[2:]), "Et*2|t*3L"),
    ],
)
def test_a_layout_counts_the_layers_of_each_stage(stages: tuple[tuple[str, ...], ...], layout: str) -> None:
    form = exported(file_of(plan=plan_of(*stages)), "megatron-layout")
    assert form.text == f'--pipeline-model-parallel-layout "{layout}"\n' and form.fit == "exact"
    assert [part.count("t") for part in expanded(layout)] == [sum(fqn in LAYERS for fqn in stage) for stage in stages]


def test_what_a_layout_cannot_say_is_said() -> None:
    for stages, words in (
        ((("embed",), ("dropout", *LAYERS)), "on several stages, and a layout has one embedding"),
        (((*LAYERS, "norm"), ("head",)), "on several stages, and a layout has one head"),
        (((*LAYERS[:2], "middle"), LAYERS[2:]), "middle stands between layers"),
        ((("a",), ("b",)), "No stage holds a numbered layer"),
    ):
        form = exported(file_of(plan=plan_of(*stages)), "megatron-layout")
        assert form.fit == "not expressible" and words in form.reasons[0]


CODE = ("huggingface", "diffusers", "lightning", "fsdp2", "torchtitan", "torch-remat")


@pytest.mark.parametrize("target", CODE)
def test_names_of_blocks_are_data_and_never_code(target: str) -> None:
    names = ('a"""\nraise SystemExit', "@BODY@", "b\\", "c'")
    text = exported(file_of(*names), target).text
    space: dict[str, Any] = {}
    decision = text[text.index("BLOCKS = (") : text.index("def chosen")]
    exec(decision, space)
    assert space["BLOCKS"] == names
    compile(text, target, "exec")


def test_a_model_without_the_blocks_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"Chain has no block layers\.7: export the policy for this very model"):
        module_of(file_of("layers.7"), "lightning").chosen(Chain())


@pytest.mark.parametrize("options", [{"early_stop": False}, {"use_reentrant": True}])
def test_fsdp2_recomputes_before_it_shards(options: dict[str, bool]) -> None:
    chosen = ("layers.1", "layers.4")
    module = module_of(file_of(*chosen, **options), "fsdp2")
    model = Chain()
    assert_these_alone_run_again(model, chain_loss, module.recompute, chosen)
    sharded: list[tuple[str, dict[str, bool]]] = []
    module.fully_shard = lambda module, **sharding: sharded.append((type(module).__name__, sharding))
    module.recompute_then_shard(model, wide=True)
    kinds = ["CheckpointWrapper" if name in chosen else "Sequential" for name in LAYERS]
    assert sharded == [(kind, {"wide": True, "reshard_after_forward": True}) for kind in (*kinds, "Chain")]


def test_every_block_that_is_chosen_runs_again_also_those_that_diffusers_does_not_offer() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 8),
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"), norm_num_groups=4,
    )  # fmt: skip
    chosen = ("down_blocks.0.resnets.0", "up_blocks.1.resnets.1", "time_embedding")
    module = module_of(file_of(*chosen), "diffusers")

    def loss_of(model: Any) -> torch.Tensor:
        sample: torch.Tensor = model(torch.ones(1, 3, 8, 8), 3).sample
        return sample.square().mean()

    twice = lambda net: [module.recompute_blocks(net) for _ in range(2)]  # noqa: E731
    assert_these_alone_run_again(model, loss_of, twice, chosen, chosen)
