"""The policy for Lightning's FSDPStrategy, put on by Lightning's own Trainer in a whole run of it.

torch refuses FSDP on the CPU, and Lightning its own class by name: the strategy is a subclass without a change, and a
module that holds the model whole stands for FullyShardedDataParallel. All else is theirs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.plan.export.runs import LAYERS, Calls, Chain, Gradients, assert_same, file_of, module_of, ran_again

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
]


class Whole(nn.Module):
    """Where FullyShardedDataParallel would hold a shard."""

    def __init__(self, module: nn.Module, **sharding: Any) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._fsdp_wrapped_module(*args, **kwargs)


def training() -> Any:
    """A module of Lightning, which is imported here: collecting the tests of all rooms would wait for it."""
    pl = pytest.importorskip("lightning.pytorch")

    class Training(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = Chain()

        def training_step(self, batch: Tensor, i: int) -> Tensor:
            output: Tensor = self.net(batch)
            return output.square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Training()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank, whose group and variables are gone afterwards."""
    monkeypatch.setattr("torch.distributed.fsdp.FullyShardedDataParallel", Whole)
    before = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


def trained(module: Any, **chosen: Any) -> tuple[Gradients, Calls]:
    """Gradients of the last of two steps under its Trainer, and how often each module without children ran."""
    calls: Calls = {}
    names = {name: one for name, one in module.named_modules() if not list(one.children())}
    for name, one in names.items():
        one.register_forward_pre_hook(lambda _, given, name=name: calls.update({name: calls.get(name, 0) + 1}))
    trainer = pytest.importorskip("lightning.pytorch").Trainer(
        accelerator="cpu", devices=1, max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **chosen,
    )  # fmt: skip
    torch.manual_seed(1)
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(8, 8), batch_size=4))
    gradients = {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in module.named_parameters()}
    return gradients, calls


def test_the_chosen_blocks_run_again_under_its_trainer_and_no_others() -> None:
    strategies = pytest.importorskip("lightning.pytorch.strategies")

    class OnCpu(strategies.FSDPStrategy):  # type: ignore[misc, name-defined]
        """The strategy itself; its name is not on the list of those that need a GPU."""

    chosen = ("net.layers.1", "net.layers.3")
    plain, before = trained(training())
    module = training()
    policy = module_of(file_of(*chosen), "lightning").activation_checkpointing_policy(module)
    strategy = OnCpu(activation_checkpointing_policy=policy, process_group_backend="gloo")
    gradients, calls = trained(module, strategy=strategy)
    assert ran_again(before, calls, tuple(f"net.{name}" for name in LAYERS)) == set(chosen)
    assert_same(plain, gradients)
    assert type(module.net.layers["1"]).__name__ == "CheckpointWrapper"


def test_it_is_ignored_where_the_model_holds_wrappers_already() -> None:
    """As the exported file says."""
    module = training()
    from lightning.fabric.strategies.fsdp import _setup_activation_checkpointing
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    policy = module_of(file_of("net.layers.1"), "lightning").activation_checkpointing_policy(module)
    module.net.layers["0"] = checkpoint_wrapper(module.net.layers["0"])
    with pytest.warns(UserWarning, match="Checkpointing will be ignored"):
        _setup_activation_checkpointing(module, {"auto_wrap_policy": policy})
    assert type(module.net.layers["1"]) is nn.Sequential
