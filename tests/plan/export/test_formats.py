"""Every target answers every policy: what it writes, what is lost on the way, and what it will do."""

from __future__ import annotations

import json

import pytest

from explorer.errors import InvalidPlan, InvalidPolicy
from explorer.plan.export.formats import FORMATS, exported
from explorer.plan.export.target import Target
from explorer.plan.pipeline.actions import from_csv
from explorer.plan.pipeline.orders import one_f_one_b
from explorer.record.policy import KEEP_ALL, Policy, Unit
from explorer.record.policy_file import PolicyFile
from explorer.record.run import PipelinePlan
from tests.plan.export.runs import PLAN, file_of


def test_an_unknown_target_is_named() -> None:
    with pytest.raises(InvalidPolicy, match="no exporter torhc. Did you mean torch"):
        exported(PolicyFile(policy=Policy()), "torhc")
    assert "torch" in FORMATS


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
        ("megatron", Policy.recompute(["layers.0", "layers.0.mlp"]), "layers.0.mlp is no numbered layer"),
        ("megatron", Policy.recompute(["a.layers.0", "b.layers.0"]), "Layers of a.layers and of b.layers are chosen"),
    ],
)
def test_what_is_lost_is_a_sentence(target: str, policy: Policy, words: str) -> None:
    form = exported(PolicyFile(policy=policy), target)
    assert form.fit != "exact" and words in " ".join(form.reasons)


def test_what_the_target_does_is_a_policy_that_can_be_measured() -> None:
    file = file_of(("layers.0", "layers.1"), "layers.3", preserve_rng_state=True, early_stop=False)
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


def test_a_program_that_sets_no_random_numbers_back_loses_the_dropout() -> None:
    target = Target(name="t", written_for="t", fixed=(("preserve_rng_state", False),))
    assert "gradients of dropout belong to another forward" in target.losses(Policy.recompute(["a"]))[0]
    assert not target.losses(Policy.recompute(["a"], preserve_rng_state=False))


FILE = PolicyFile(
    policy=KEEP_ALL, pipeline=PipelinePlan(stages=(("a", "b"), ("c",)), n_microbatches=3, schedule="1F1B")
)


def test_stages_and_schedule_are_exported() -> None:
    assert json.loads(exported(FILE, "stages").text) == [["a", "b"], ["c"]]
    assert from_csv(exported(FILE, "schedule").text) == one_f_one_b(2, 3)


@pytest.mark.parametrize("target", ["stages", "schedule"])
def test_a_file_without_a_plan_says_so(target: str) -> None:
    with pytest.raises(InvalidPlan, match="holds no pipeline plan"):
        exported(PolicyFile(policy=KEEP_ALL), target)
