"""What is lost on the way to a target is said, block by block and option by option."""

from __future__ import annotations

import pytest
import yaml

from explorer.errors import InvalidPlan
from explorer.plan.export.formats import FORMATS, exported
from explorer.record.pipeline_plan import PipelinePlan
from explorer.record.policy import Policy, Unit
from explorer.record.policy_file import Evidence, PolicyFile
from tests.plan.export.runs import LAYERS, file_of

PLAN = PipelinePlan(stages=(("embed", *LAYERS[:2]), (*LAYERS[2:], "head")), n_microbatches=4, checkpoint="except_last")


def test_every_form_answers_every_policy() -> None:
    policies = (
        Policy(),
        Policy.recompute(["layers.0", "layers.3"]),
        Policy.recompute([("layers.0", "layers.1"), "layers.3.mlp"], preserve_rng_state=False, restore_rng=("python",)),
        Policy(
            units=(
                Unit(blocks=("layers.1",), action="offload"),
                Unit(blocks=("layers.2",), action="save_ops", save_ops=("aten.mm.default",)),
            )
        ),
    )  # fmt: skip
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
        ("olmo-core", Policy.recompute(["blocks.0"]), "gradients of dropout belong to another forward"),
        ("primus", Policy.recompute(["layers.0", "layers.0.mlp"]), "layers.0.mlp is no numbered layer"),
        ("primus", Policy.recompute(["a.layers.0", "b.layers.0"]), "Layers of a.layers and of b.layers are chosen"),
        ("deepspeed", Policy.recompute(["layers.0"]), "selects no block"),
        ("memory-budget", Policy.recompute(["layers.0"]), "holds no run against everything kept"),
        ("llm-foundry", Policy.recompute(["head"]), "head is no numbered layer"),
    ],
)
def test_what_is_lost_is_a_sentence(target: str, policy: Policy, words: str) -> None:
    form = exported(PolicyFile(policy=policy), target)
    assert form.fit != "exact" and words in " ".join(form.reasons)


def test_what_the_target_does_is_a_policy_that_can_be_measured() -> None:
    told = file_of(("layers.0", "layers.1"), "layers.3", preserve_rng_state=True, early_stop=False)
    form = exported(told, "olmo-core")
    assert form.as_run == Policy.recompute(
        ["layers.0", "layers.1", "layers.3"], preserve_rng_state=False, running_stats="every_forward"
    )
    reentrant = exported(file_of("layers.1"), "megatron").as_run
    assert reentrant is not None and reentrant.use_reentrant and reentrant.blocks == ("layers.0",)
    assert exported(told, "torch").as_run == told.policy
    assert exported(told, "deepspeed").as_run is None


def test_what_changes_no_gradient_is_a_note() -> None:
    form = exported(file_of("layers.0", early_stop=False), "lightning")
    assert form.fit == "exact" and "early_stop is on there and off in the policy" in form.notes[0]
    assert not exported(file_of("layers.0", early_stop=False), "torch").notes


def test_numbers_and_names_in_configurations() -> None:
    file = file_of("model.layers.3", "model.layers.0")
    assert yaml.safe_load(exported(file, "primus").text) == {
        "recompute_granularity": "full",
        "recompute_method": None,
        "recompute_layer_ids": "0,3",
    }
    foundry = yaml.safe_load(exported(file, "llm-foundry").text)
    assert foundry["model"]["activation_checkpointing_target"] == {"mptblock": [0, 3]}
    space: dict[str, object] = {}
    exec(exported(file, "mmengine").text, space)
    assert space["activation_checkpointing"] == ["model.layers.3", "model.layers.0"]
    assert '"model.layers.3",' in exported(file, "olmo-core").text


def test_a_budget_is_the_share_that_is_left() -> None:
    measured = Evidence(
        device="a CPU", torch_version="2.13", saved_after_forward_bytes=30, baseline_saved_after_forward_bytes=120
    )
    form = exported(PolicyFile(policy=Policy.recompute(["layers.0"]), evidence=measured), "memory-budget")
    assert "activation_memory_budget = 0.250" in form.text and form.fit == "approximated"


def test_flagscale_says_which_microbatches() -> None:
    """Its rows are [stages, microbatches, value, microbatches, value]; they sum to the plan's."""
    form = exported(file_of("layers.0", "layers.2", "layers.3", plan=PLAN), "flagscale")
    rows = yaml.safe_load(form.text)
    for key in ("granularity", "method", "num_layers"):
        table = rows[f"recompute_{key}_per_stage_micro_batch"]
        assert sum(row[0] for row in table) == len(PLAN.stages)
        assert all(sum(row[1::2]) == PLAN.n_microbatches for row in table)
    assert rows["recompute_num_layers_per_stage_micro_batch"] == [[1, 3, 1, 1, 0], [1, 3, 2, 1, 0]]
    assert form.fit == "exact"
    shifted = exported(file_of("layers.1", plan=PLAN), "flagscale")
    assert (shifted.extra, shifted.missing) == (("layers.0",), ("layers.1",))
    with pytest.raises(InvalidPlan, match="holds no pipeline plan"):
        exported(file_of("layers.0"), "flagscale")
