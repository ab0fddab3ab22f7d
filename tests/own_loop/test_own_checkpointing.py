"""Is a model's own checkpointing alive, and on everything: the table of a recorded step against torch alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import explorer
from explorer.plan.why.checkpointing import Row, checkpointing_lines, checkpointing_rows, untrained
from explorer.record import Measurement

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
WIDTH = 8
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


class Adapted(nn.Module):
    """A frozen layer with a trainable way around it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.adapter(x))


class Stack(nn.Module):
    """Blocks under a checkpoint of the model's own, behind an entry that may be frozen."""

    def __init__(self, how: str, *, frozen_entry: bool, n_blocks: int = 4, n_on: int | None = None) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH).requires_grad_(not frozen_entry)
        self.blocks = nn.Sequential(*(Adapted() for _ in range(n_blocks)))
        self.head = nn.Linear(WIDTH, 1)
        self.how, self.n_on = how, n_blocks if n_on is None else n_on
        if "wrapper" in how:
            kind = CheckpointImpl.REENTRANT if "reentrant" in how else CheckpointImpl.NO_REENTRANT
            self.blocks = nn.Sequential(*(checkpoint_wrapper(block, checkpoint_impl=kind) for block in self.blocks))
        if "composable" in how:
            for block in self.blocks:
                composable_checkpoint(block)

    def forward(self, x: Tensor) -> Tensor:
        x, reentrant = self.entry(x), "reentrant" in self.how
        if "sequential" in self.how:
            return self.head(checkpoint_sequential(self.blocks, 4, x, use_reentrant=reentrant))
        for i, block in enumerate(self.blocks):
            if "wrapper" in self.how or "composable" in self.how or i >= self.n_on:
                x = block(x)
            elif "closure" in self.how:
                x = checkpoint(lambda x, block=block: block(x), x, use_reentrant=reentrant)
            elif "list" in self.how:
                x = checkpoint(lambda xs, block=block: block(xs[0]), [x], use_reentrant=reentrant)
            else:
                x = checkpoint(block, x, use_reentrant=reentrant)
        return self.head(x)


def step_of(model: nn.Module) -> Callable[[], object]:
    return lambda: model(X).square().mean().backward()


def recorded(model: nn.Module, step: Callable[[], object] | None = None) -> Measurement:
    with explorer.record_step(model) as run:
        (step or step_of(model))()
    return run.measurement


def missing(model: nn.Module) -> set[str]:
    """By torch alone."""
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None}


def findings(rows: list[Row]) -> dict[str, str]:
    return {str(row["block"]): str(row["that is"]) for row in rows}


ALL_FOUR = "blocks.0 to 3, each of 4"
LAST = "blocks.3"
"""checkpoint_sequential leaves the last of its segments out."""
KINDS = ["plain", "reentrant", "closure", "reentrant closure"]
SEQUENTIAL = ["sequential", "reentrant sequential"]
WRAPPERS = ["wrapper", "reentrant wrapper", "composable"]


@pytest.mark.parametrize("how", SEQUENTIAL)
def test_checkpoint_sequential_is_seen_and_the_segment_that_it_leaves_out(how: str) -> None:
    rows = findings(checkpointing_rows(recorded(Stack(how, frozen_entry=False))))
    assert rows == {"blocks.0 to 2, each of 3": "alive", LAST: "kept, though 3 of 4 blocks like it are checkpointed"}


def test_a_sequential_checkpoint_may_be_dead() -> None:
    model = Stack("reentrant sequential", frozen_entry=True)
    rows = findings(checkpointing_rows(recorded(model)))
    assert rows["blocks.0 to 2, each of 3"].startswith("dead") and rows[LAST].startswith("kept")
    assert {name.split(".")[1] for name in missing(model)} == {"0", "1", "2"}


@pytest.mark.parametrize("how", [*KINDS, *WRAPPERS])
def test_a_checkpoint_that_acts_is_alive_and_every_parameter_trains(how: str) -> None:
    model = Stack(how, frozen_entry=False)
    run = recorded(model)
    (row,) = checkpointing_rows(run)
    assert (row["block"], row["that is"], row["ran again"], row["called"]) == (ALL_FOUR, "alive", "1", 1)
    assert not untrained(run) and not missing(model)


@pytest.mark.parametrize("how", ["reentrant", "reentrant closure", "reentrant wrapper"])
def test_a_dead_checkpoint_is_named_with_what_it_keeps_from_training(how: str) -> None:
    model = Stack(how, frozen_entry=True)
    run = recorded(model)
    (row,) = checkpointing_rows(run)
    assert row["block"] == ALL_FOUR and (row["called"], row["ran again"], row["without a gradient"]) == (1, "0", 2)
    assert str(row["that is"]).startswith("dead: no input requires a gradient") and "use_reentrant=False" in str(row)
    own = run.own_checkpointing
    assert own is not None and set(own.without_gradient) == missing(model) and len(missing(model)) == 8
    assert untrained(run).startswith("8 of 10 trainable parameters got no gradient in this step: blocks.0.")
    audit = explorer.audit(model, step_of(model))
    assert audit.is_same is False and audit.judged is not None and audit.judged.verdict == "different"
    alone = {diff.name for diff in audit.judged.comparison.gradients if diff.presence == "baseline only"}
    assert alone == {name.replace("_checkpoint_wrapped_module.", "") for name in missing(model)}
    assert "dead: no input requires a gradient" in repr(audit)


@pytest.mark.parametrize("how", ["plain", "closure", "wrapper", "composable"])
def test_the_cure_is_the_other_kind(how: str) -> None:
    model = Stack(how, frozen_entry=True)
    assert set(findings(checkpointing_rows(recorded(model))).values()) == {"alive"} and not missing(model)
    audit = explorer.audit(model, step_of(model))
    assert audit.is_same and audit.judged is not None and audit.judged.verdict == "bitwise equal"


def test_a_tensor_inside_of_a_list_passes_no_gradient_to_a_reentrant_checkpoint() -> None:
    model = Stack("reentrant list", frozen_entry=False)
    (row,) = checkpointing_rows(recorded(model))
    assert row["block"] == ALL_FOUR and str(row["that is"]).startswith("dead")


def test_regions_may_be_dead_in_part() -> None:
    """The first two come before anything that trains, an adapter between them and the others lets those live."""
    model = Stack("reentrant", frozen_entry=True, n_blocks=4)
    model.blocks[1].register_forward_hook(lambda module, args, out: out + 0.0 * model.head.weight.sum())
    plain = model.forward

    def forward(x: Tensor) -> Tensor:
        x = model.entry(x)
        for i, block in enumerate(model.blocks):
            x = checkpoint(block, x + (model.head.bias if i == 2 else 0.0), use_reentrant=True)
        return model.head(x)

    assert plain is not None
    model.forward = forward  # type: ignore[method-assign]
    rows = checkpointing_rows(recorded(model))
    assert [row["block"] for row in rows] == ["blocks.0 to 1, each of 2", "blocks.2 to 3, each of 2"]
    assert str(rows[0]["that is"]).startswith("dead") and rows[1]["that is"] == "alive"
    assert {name.split(".")[1] for name in missing(model)} == {"0", "1"}


def test_one_region_may_be_dead_in_some_of_its_calls() -> None:
    block, head = Adapted(), nn.Linear(WIDTH, 1)
    model = nn.ModuleList([block, head])

    def step() -> None:
        first = checkpoint(block, X, use_reentrant=True)
        second = checkpoint(block, first + head.bias, use_reentrant=True)
        head(second).square().mean().backward()

    (row,) = checkpointing_rows(recorded(model, step))
    assert (row["block"], row["called"], row["ran again"], row["that is"]) == ("0", 2, "1", "alive")
    own = recorded(model, step).own_checkpointing
    assert own is not None and own.regions[0].n_without_gradient == 1


def test_blocks_that_are_kept_beside_equals_that_run_again_are_counted() -> None:
    rows = checkpointing_rows(recorded(Stack("plain", frozen_entry=False, n_blocks=8, n_on=3)))
    assert [row["block"] for row in rows] == ["blocks.0 to 2, each of 3", "blocks.3 to 7, each of 5"]
    assert rows[1]["that is"] == "kept, though 3 of 8 blocks like it are checkpointed"


def test_a_block_that_needs_no_rerun_is_not_called_dead() -> None:
    model = Stack("plain", frozen_entry=True)
    model.blocks[0].requires_grad_(False)
    rows = checkpointing_rows(recorded(model))
    assert rows[0]["block"] == "blocks.0" and rows[0]["that is"] == "not needed: backward asks for nothing from there"
    assert rows[1]["that is"] == "alive"


def test_a_policy_is_not_the_models_own() -> None:
    for reentrant in (False, True):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Adapted(), nn.Linear(WIDTH, 1))
        with explorer.apply_policy(model, explorer.Policy.recompute(["1"], use_reentrant=reentrant)):
            run = recorded(model)
        assert run.by_fqn["1"].n_recompute == 1
        assert run.own_checkpointing is not None and run.own_checkpointing.regions == ()
        assert checkpointing_rows(run) == []


def test_a_model_without_any_has_no_table_and_torch_is_left_as_found() -> None:
    names = torch.utils.checkpoint.CheckpointFunction, torch.utils.checkpoint._checkpoint_without_reentrant_generator
    run = recorded(Adapted())
    assert checkpointing_rows(run) == [] and not untrained(run)
    assert names == (
        torch.utils.checkpoint.CheckpointFunction,
        torch.utils.checkpoint._checkpoint_without_reentrant_generator,
    )


@pytest.mark.parametrize("how", [*KINDS, *SEQUENTIAL, *WRAPPERS])
def test_a_recorded_step_is_the_step(how: str) -> None:
    """With dropout, whose generator a checkpoint sets back."""
    torch.manual_seed(0)
    model = Stack(how, frozen_entry=False)
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: nn.functional.dropout(out))
    ends = []
    for record in (False, True):
        torch.manual_seed(1)
        model.zero_grad()
        (recorded if record else lambda model: step_of(model)())(model)
        ends.append([torch.get_rng_state(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))


def test_gradients_that_an_optimizer_clears_inside_of_the_step_did_come() -> None:
    model = Adapted()
    optimizer = torch.optim.SGD([model.adapter.weight], lr=0.1)

    def step() -> None:
        model(X).sum().backward()
        optimizer.step()
        model.zero_grad()

    assert not untrained(recorded(model, step))
    assert not untrained(recorded(model, lambda: model(X).sum())), "no backward, no word"


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted() for _ in range(3))
        self.gradient_checkpointing = True

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            acts = self.gradient_checkpointing and self.training
            x = checkpoint(block, x, use_reentrant=False) if acts else block(x)
        return x


@pytest.mark.parametrize(
    ("change", "block", "begin", "switch", "mode"),
    [
        (lambda unet: None, "1.blocks.0 to 2, each of 3", "alive", "gradient_checkpointing on", "train"),
        (lambda unet: unet.eval(), "1", "switched on and without effect: it is in eval mode",
         "gradient_checkpointing on", "eval"),
        (lambda unet: setattr(unet, "gradient_checkpointing", False), "1", "off: ", "gradient_checkpointing off",
         "train"),
        (lambda unet: setattr(unet, "forward", lambda x: unet.blocks[0](x)), "1", "switched on and never called",
         "gradient_checkpointing on", "train"),
    ],
)  # fmt: skip
def test_a_switch_is_held_against_what_it_does(change: Any, block: str, begin: str, switch: str, mode: str) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Unet())
    change(model[1])
    (row,) = checkpointing_rows(recorded(model))
    assert row["block"] == block and str(row["that is"]).startswith(begin)
    assert (row["switch"], row["mode"]) == (switch, mode)
    text = repr(explorer.audit(model, step_of(model)))
    assert begin in text and f"{switch} " in text


def test_transformers_with_a_frozen_base_and_its_cure() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=32, num_key_value_heads=2, use_cache=False, **sizes)
    )
    ids = torch.randint(32, (2, 8))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    (off,) = checkpointing_rows(recorded(model, step))
    assert str(off["that is"]).startswith("off: gradient_checkpointing_enable()")
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
    model.disable_input_require_grads()
    model.train()
    (alive,) = checkpointing_rows(recorded(model, step))
    assert (alive["block"], alive["that is"]) == ("model.layers.0 to 2, each of 3", "alive")
    model.model.embed_tokens.requires_grad_(False)
    model.zero_grad()
    run = recorded(model, step)
    (dead,) = checkpointing_rows(run)
    assert dead["block"] == alive["block"] and str(dead["that is"]).startswith("dead")
    assert run.own_checkpointing is not None and set(run.own_checkpointing.without_gradient) == missing(model)
    model.enable_input_require_grads()
    (cured,) = checkpointing_rows(recorded(model, step))
    assert cured["that is"] == "alive" and not missing(model)
    model.activation_checkpointing_enable(every_n_layers=2)
    rows = findings(checkpointing_rows(recorded(model, step)))
    assert rows["model.layers.1"] == "kept, though 2 of 3 blocks like it are checkpointed"
    model.eval()
    assert all("eval mode" in str(row["that is"]) for row in checkpointing_rows(recorded(model, step)))


def test_timm_on_and_off() -> None:
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 2}
    model, images = timm.models.VisionTransformer(**sizes), torch.randn(2, 3, 16, 16)

    def step() -> None:
        model(images).sum().backward()

    (off,) = checkpointing_rows(recorded(model, step))
    assert str(off["that is"]).startswith("off: ")
    model.set_grad_checkpointing()
    rows = checkpointing_rows(recorded(model, step))
    assert [row["that is"] for row in rows] == ["alive"] and "blocks" in str(rows[0]["block"])


class Switched(nn.Module):
    """A block with transformers' switch, as the Trainer turns it on."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.gradient_checkpointing = nn.Linear(8, 8), False

    def forward(self, x: Tensor) -> Tensor:
        if self.gradient_checkpointing and self.training:
            return checkpoint(self.fc, x, use_reentrant=False).tanh()  # type: ignore[no-any-return]
        return self.fc(x).tanh()  # type: ignore[no-any-return]


@pytest.mark.parametrize("has_policy", [False, True])
@pytest.mark.parametrize("switch", [False, True])
@pytest.mark.parametrize("fsdp", [False, True])
def test_checkpointing_that_is_on_twice_is_said_before_and_in_the_step(
    fsdp: bool, switch: bool, has_policy: bool
) -> None:
    """FSDP's wrapper, the Trainer's switch and a policy: two of them on one block each add a forward."""
    model = nn.Sequential(*(Switched() for _ in range(3)))
    for block in model:
        block.gradient_checkpointing = switch
    if fsdp:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Switched))
    x = torch.randn(4, 8, requires_grad=True)
    policy = explorer.Policy.recompute(["0", "1"] if has_policy else [])
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        handle = explorer.apply_policy(model, policy)
    before = " ".join(str(warning.message) for warning in shown)
    with handle:
        run = recorded(model, lambda: model(x).sum().backward())
    said = "several checkpoints" in "\n".join(checkpointing_lines(run))
    n_on = fsdp + switch + has_policy
    assert said is (n_on > 1), checkpointing_lines(run)
    assert ("adds a forward" in before) is (has_policy and n_on > 1), before
    assert ("FSDP" in before) is (has_policy and fsdp) and ("gradient_checkpointing" in before) is (
        has_policy and switch
    )
    model.eval()
    if not fsdp:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            explorer.apply_policy(model, policy).undo()  # a switch does nothing in eval mode


def test_checkpoints_inside_each_other_on_purpose_are_no_doubling() -> None:
    inner, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8, requires_grad=True)
    model = nn.Sequential(inner, nn.Linear(8, 8), nn.Tanh())

    def outer(x: Tensor) -> Tensor:
        run: Callable[..., Tensor] = checkpoint
        return model[2](model[1](run(inner, x, use_reentrant=False)))  # type: ignore[no-any-return]

    run = recorded(model, lambda: checkpoint(outer, x, use_reentrant=False).sum().backward())
    assert "several checkpoints" not in "\n".join(checkpointing_lines(run))
