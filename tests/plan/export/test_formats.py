"""Every export: what is written, which blocks it names, and what is said of the differences."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from torch import nn

from explorer.errors import InvalidPolicy
from explorer.plan.export.formats import FORMATS, exported
from explorer.plan.export.target import STATISTICS
from explorer.plan.names import recomputed_blocks
from explorer.record.files import PolicyFile
from explorer.record.policy import Policy, Unit
from explorer.view.text.plan import export_sentences
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
            assert form.text
            assert bool(form.reasons) is (form.fit != "exact"), name
            if form.recomputed is not None and form.fit == "exact":
                assert form.recomputed == tuple(recomputed_blocks(policy)) and not form.missing
            if form.recomputed is not None and form.fit == "approximated":
                assert form.as_run is not None and form.as_run.blocks == form.recomputed
                assert set(form.recomputed) == set(policy.blocks) - set(form.missing)


@pytest.mark.parametrize(("target", "policy", "words"), [
    ("huggingface", Policy.recompute([("layers.0", "layers.1")]), "layers.0 and layers.1 are recomputed together"),
    ("huggingface", Policy.recompute(["layers.0"], restore_rng=("numpy",)), "torch does not stash (numpy)"),
    ("fsdp2", Policy(units=(Unit(blocks=("a",), action="offload"),)), "Offloaded here and kept there: a."),
])  # fmt: skip
def test_what_is_lost_is_a_sentence(target: str, policy: Policy, words: str) -> None:
    form = exported(PolicyFile(policy=policy), target)
    assert form.fit != "exact" and words in " ".join(form.reasons)


def test_a_whole_target_says_what_it_offloads_and_what_it_recomputes() -> None:
    units = (Unit(blocks=("a",), action="offload"), Unit(blocks=("b",)))
    form = exported(PolicyFile(policy=Policy(units=units)), "torch")
    assert (form.recomputed, form.missing) == (("b",), ())
    assert export_sentences(form)[:2] == ["It recomputes b.", "It offloads a on a GPU; on a CPU nothing moves."]


def test_what_the_target_does_is_a_policy_that_can_be_measured() -> None:
    file = file_of(("layers.0", "layers.1"), "layers.3", restore_rng=("numpy",), early_stop=False)
    there = exported(file, "fsdp2").as_run
    single = ["layers.0", "layers.1", "layers.3"]
    assert there == Policy.recompute(single, running_stats="every_forward", early_stop=False)
    assert exported(file, "torch").as_run == file.policy


def test_running_statistics_that_move_twice_there_are_a_note() -> None:
    assert exported(file_of("layers.0"), "fsdp2").notes == (STATISTICS,)
    assert not exported(file_of("layers.0"), "torch").notes


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
    assert form.fit == "exact" and form.recomputed == chosen
    for names in (document["names"], [f"layers.{i}" for i in document["numbers"]["layers"]]):
        assert_these_alone_run_again(model, chain_loss, lambda model, names=names: recompute(model, names), chosen)


def test_names_are_of_every_list_and_any_block() -> None:
    blocks = ("enc.0", "dec.1.mlp", "dec.0", "1", "true")
    document = yaml.safe_load(exported(file_of(*blocks), "names").text)
    assert document == {"names": list(blocks), "numbers": {"enc": [0], "dec": [0], "": [1]}}
    assert yaml.safe_load(exported(file_of(), "names").text) == {"names": [], "numbers": {}}
    assert exported(file_of("a", early_stop=False, use_reentrant=True), "names").fit == "exact"


CODE = ("huggingface", "fsdp2")


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
        module_of(file_of("layers.7"), "fsdp2").chosen(Chain())


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
