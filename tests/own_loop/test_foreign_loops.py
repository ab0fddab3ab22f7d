"""Training loops of others, recorded by one added line or none: the loop cannot tell, and a refusal leaves a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import explorer
from explorer.engine.bench.measure import measure
from explorer.engine.device.memory_limit import process_memory_limit
from explorer.errors import OutOfMemory
from explorer.own_loop.trainers import WatchCallback
from explorer.own_loop.watch import Watch
from explorer.record import ModelRef, RunSpec
from explorer.record.failure import is_out_of_memory
from tests.own_loop.test_record_step import peak_of_model
from tests.own_loop.test_watch import HUGE, MIB, opened

Loop = Callable[..., nn.Module]
N_STEPS = 4


class Net(nn.Module):
    """With dropout, so that a generator that somebody moved shows; too much memory is asked for in step `refuse_in`."""

    def __init__(self, refuse_in: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(32, 4)
        self.refuse_in, self.n_calls = refuse_in, 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.n_calls += 1
        for block in self.blocks:
            x = x + self.dropout(block(x))
        if self.n_calls == self.refuse_in:
            torch.empty(HUGE, dtype=torch.uint8)
        out = self.head(x)
        return out if labels is None else {"loss": nn.functional.cross_entropy(out, labels), "logits": out}


def batches(size: int = 64) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = (
        torch.randn(N_STEPS * size, 32, generator=generator),
        torch.randint(4, (N_STEPS * size,), generator=generator),
    )
    return DataLoader(TensorDataset(x, y), batch_size=size)


def nanogpt_like(line: Callable[..., Any], refuse_in: int) -> nn.Module:
    """Accumulation by hand, clipping, a learning rate set each step, zero_grad at the end."""
    model = Net(refuse_in)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    with line(model, optimizer):
        for i, (x, y) in enumerate(batches()):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 / (i + 1)
            for part_x, part_y in zip(x.chunk(2), y.chunk(2)):
                (nn.functional.cross_entropy(model(part_x), part_y) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return model


def timm_like(line: Callable[..., Any], refuse_in: int) -> nn.Module:
    """AMP with a scaler, SGD with momentum, a moving average of the weights, a schedule."""
    model = Net(refuse_in)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, N_STEPS)
    scaler = torch.amp.GradScaler("cpu")
    with line(model, optimizer):
        for x, y in batches():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            average.update_parameters(model)
            schedule.step()
    return model


def accelerate_like(line: Callable[..., Any], refuse_in: int) -> nn.Module:
    """accelerate's own loop with accumulation."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = Net(refuse_in)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches(32))
    with line(model, optimizer):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return model


def hugging_face(line: Line, refuse_in: int) -> nn.Module:
    """transformers' Trainer with accumulation, and a callback instead of a line."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    model = Net(refuse_in)
    rows = [{"x": x, "labels": y} for x, y in batches().dataset]
    arguments = TrainingArguments(
        output_dir=str(line.folder), use_cpu=True, per_device_train_batch_size=32, gradient_accumulation_steps=2,
        num_train_epochs=1, report_to=[], save_strategy="no", disable_tqdm=True, seed=0, label_names=["labels"],
    )  # fmt: skip
    with line.callbacks("HuggingFaceCallback") as callbacks:
        Trainer(model=model, args=arguments, train_dataset=rows, callbacks=callbacks).train()  # type: ignore[arg-type]
    return model


def lightning(line: Line, refuse_in: int) -> nn.Module:
    """Lightning's Trainer with clipping, and a callback instead of a line."""
    pl = pytest.importorskip("lightning.pytorch")
    net = Net(refuse_in)

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, i: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    with line.callbacks("LightningCallback") as callbacks:
        trainer = pl.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, gradient_clip_val=1.0, callbacks=callbacks,
        )  # fmt: skip
        trainer.fit(Module(), batches())
    return net


class Line:
    """The one line that is added to a loop, or none."""

    def __init__(self, folder: Path, **wanted: Any) -> None:
        self.folder, self.wanted = folder, wanted
        self.watches: list[Watch] = []

    @contextmanager
    def __call__(self, model: nn.Module, optimizer: Any) -> Iterator[None]:
        if not self.wanted:
            yield
            return
        with explorer.watch(model, optimizer, **self.wanted) as watch:
            self.watches.append(watch)
            yield

    @contextmanager
    def callbacks(self, name: str) -> Iterator[list[Any]]:
        """The callback of a trainer instead of the line. transformers' Trainer does not end it after an error."""
        files = str(self.folder / "step{step}.explorer")
        callbacks = [getattr(explorer, name)(files=files, **self.wanted)] if self.wanted else []
        try:
            yield callbacks
        finally:
            self.watches += [callback.watch for callback in callbacks]
            for watch in self.watches:
                watch.close()


LOOPS = [nanogpt_like, timm_like, accelerate_like, hugging_face, lightning]


@pytest.fixture(params=LOOPS, ids=lambda loop: loop.__name__)
def loop(request: pytest.FixtureRequest) -> Loop:
    return request.param  # type: ignore[no-any-return]


def trained(loop: Loop, line: Line, refuse_in: int = 0) -> SimpleNamespace:
    torch.manual_seed(0)
    model = loop(line, refuse_in)
    return SimpleNamespace(state=model.state_dict(), rng=torch.get_rng_state())


@pytest.mark.filterwarnings("ignore")
def test_the_weights_are_bitwise_those_of_the_loop_alone(loop: Loop, tmp_path: Path) -> None:
    bare, line = trained(loop, Line(tmp_path)), Line(tmp_path, at=(2,))
    watched = trained(loop, line)
    assert bare.state.keys() == watched.state.keys() and torch.equal(bare.rng, watched.rng)
    assert all(torch.equal(bare.state[name], watched.state[name]) for name in bare.state)
    (watch,) = line.watches
    (run,) = watch.runs.values()
    phases = [span.phase for span in run.measurement.phases if span.phase != "between"]
    n = run.measurement.by_fqn[""].n_forward or run.measurement.by_fqn["net"].n_forward
    assert phases == ["forward", "backward"] * n + ["optimizer"] and run.measurement.complete


def alike() -> tuple[Net, tuple[torch.Tensor, torch.Tensor], Any]:
    """The same model and batch for `measure`."""
    return Net(), (torch.randn(64, 32), torch.randint(4, (64,))), nn.functional.cross_entropy


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("loop", "n_rows"), [(nanogpt_like, 64), (accelerate_like, 32), (hugging_face, 64)])
def test_the_peak_is_that_of_a_measured_step(loop: Loop, n_rows: int, tmp_path: Path) -> None:
    """The batch, of which `n_rows` are there at once, comes during a loop's step and lies there before a measured one.

    The other two loops hold the last step's gradients through forward, which no measured step does.
    """
    line = Line(tmp_path, at=(2,))
    trained(loop, line)
    (run,) = line.watches[0].runs.values()
    model = ModelRef(target=f"{__file__}:alike")
    measured = measure(RunSpec(model=model, n_accumulation=2, n_repeats=0))
    batch_bytes = n_rows * (32 * 4 + 8)
    assert peak_of_model(run.measurement) - batch_bytes == pytest.approx(peak_of_model(measured), rel=1e-3)
    assert run.measurement.total_flops == measured.total_flops


@pytest.mark.filterwarnings("ignore")
def test_a_refusal_leaves_a_readable_file(loop: Loop, tmp_path: Path) -> None:
    path = tmp_path / "oom.explorer"
    with pytest.raises((RuntimeError, OutOfMemory)) as caught, process_memory_limit(400 * MIB):
        trained(loop, Line(tmp_path, on_oom=path), refuse_in=1)
    assert is_out_of_memory(caught.value)
    run = opened(path)
    assert run.failure is not None and run.failure.asked_bytes == HUGE
    assert run.failed_in == "forward" and "Held then" in run.failure.hint


def test_a_training_that_broke_off_is_over_when_the_next_begins(tmp_path: Path) -> None:
    model, before = nn.Linear(4, 4), (sys.excepthook, torch.autograd.backward)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = WatchCallback(at=1, on_oom=tmp_path / "oom.explorer", files=str(tmp_path / "step{step}.explorer"))
    watching.begin(model, optimizer, "Trainer")
    watching.begin(model, optimizer, "Trainer")
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    watching.end()
    assert watching.watch is not None and set(watching.watch.runs) == {1}
    assert (sys.excepthook, torch.autograd.backward) == before
    assert not model._forward_hooks and not optimizer._optimizer_step_post_hooks


def test_an_interrupted_fit_ends_the_watch() -> None:
    pytest.importorskip("lightning.pytorch")
    model, callback = nn.Linear(4, 4), explorer.LightningCallback(at=1)
    callback.on_train_start(None, model)
    callback.on_exception(None, model, KeyboardInterrupt())
    assert not model._forward_pre_hooks
