"""What is lost on the way to a target is said, block by block and option by option."""

from __future__ import annotations

import pytest

from explorer.plan.export.formats import exported
from explorer.record.policy import Policy, Unit
from explorer.record.policy_file import PolicyFile
from tests.plan.export.runs import file_of


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
