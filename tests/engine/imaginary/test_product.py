"""The product on the imaginary card: bytes are torch's own, and what the card has not is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from explorer.engine.imaginary.run import run_on
from explorer.jobs.run_file import read
from explorer.plan.card.cards import parse_card
from explorer.record import Measurement
from explorer.record.base import from_msgpack
from tests.engine.imaginary.test_run import has_cuda_build, values_on

ROOT = Path(__file__).resolve().parents[3]
COMPARED = """
from explorer.engine.compare.compare import compare
from explorer.record import KEEP_ALL, ModelRef, Policy, RunSpec
from msgspec.structs import replace
kept = RunSpec(model=ModelRef(target="sample_models/gpt.py"), device="cuda", n_repeats=3)
both = compare(kept, replace(kept, policy=Policy.recompute(["blocks.0", "blocks.1"])))
out["verdict"], out["why"] = both.verdict, both.not_reproducible_because
runs = both.baseline, both.candidate
out["times"] = [run.times is not None and run.times.step.median_ms is not None for run in runs]
out["peaks"] = [[run.step_peak_bytes, run.peaks.requested_peak_bytes] for run in runs]
out["where"] = both.baseline.environment.device_name
"""


@has_cuda_build
def test_a_comparison_has_bytes_and_neither_values_nor_times() -> None:
    seen = values_on(parse_card("h100"), COMPARED)
    assert seen["verdict"] == "not comparable" and "imaginary" in str(seen["why"])
    assert seen["times"] == [False, False] and "imaginary" in str(seen["where"])
    (kept, counted), (recomputed, counted_again) = seen["peaks"]  # type: ignore[misc]
    assert kept == counted > recomputed == counted_again


RECORDED = """
import os
os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)  # a setting counts on every card
import explorer
from torch import nn
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(512, 64, device="cuda")
def step():
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
step()
with explorer.record_step(model, optimizer) as run:
    step()
peaks = run.measurement.peaks
out["allocator"] = [peaks.allocated_peak_bytes, peaks.reserved_peak_bytes]
out["played"] = [run.on_card("h100").headlines()[name] for name in ("allocated_bytes", "reserved_bytes")]
out["budget"] = [explorer.auto_policy(model, step, budget=card).card.allocated_bytes for card in ("h100", "t4")]
"""


@has_cuda_build
def test_a_step_recorded_there_is_played_on_a_card_to_the_byte() -> None:
    seen = values_on(parse_card("h100"), RECORDED)
    assert seen["played"] == seen["allocator"]
    on_h100, on_t4 = seen["budget"]  # type: ignore[misc]
    assert on_h100 - on_t4 == 2 * (33_554_432 - 8_519_680), "the workspaces of two threads, torch 2.13"


WALKED = """
import os
import explorer
from torch import nn
from torch.utils.data import DataLoader

def made(n, device="cuda"):
    blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(n))
    model = nn.Sequential(*blocks).to(device)
    return model, torch.optim.AdamW(model.parameters())

def stepped(model, optimizer, device="cuda"):
    model(torch.randn(512, 64, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def recorded(name, model, optimizer, device="cuda"):
    stepped(model, optimizer, device)
    with explorer.record_step(model, optimizer) as run:
        stepped(model, optimizer, device)
    noted(name, run.measurement)

def noted(name, step):
    card = 1 if name.startswith("second") else 0
    out[name] = [step.step_peak_bytes, step.peaks.requested_peak_bytes, step.peaks.allocated_peak_bytes,
                 torch.cuda.max_memory_allocated(card), list(step.warnings)]

class Stages(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = made(3)[0], made(2, "cuda:1")[0]
    def forward(self, x):
        return self.second(self.first(x).to("cuda:1"))

class OnAStream(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.stream = nn.Linear(64, 64), torch.cuda.Stream()
    def forward(self, x):
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            out = nn.functional.gelu(self.linear(x))
        torch.cuda.current_stream().wait_stream(self.stream)
        out.record_stream(torch.cuda.current_stream())
        return out

stages = Stages()  # alive to the end: no figure of one card may hold it
both = torch.optim.AdamW(stages.parameters())
recorded("second of both", stages, both)
recorded("first", *made(2))
recorded("second", *made(2, "cuda:1"), "cuda:1")
streams = nn.Sequential(*(OnAStream() for _ in range(3))).cuda()
recorded("streams", streams, torch.optim.AdamW(streams.parameters()))
model, optimizer = made(3)
batches = iter(DataLoader(torch.randn(64, 64), batch_size=16, pin_memory=True, num_workers=1))
with explorer.record_step(model, optimizer) as run:
    batch = next(batches)
    out["pinned batch"] = batch.is_pinned()
    model(batch.to("cuda", non_blocking=True)).square().mean().backward()
    optimizer.step()
noted("pinned", run.measurement)
units = (explorer.Unit(blocks=(block,), action="offload") for block in "012")
explorer.apply_policy(model, explorer.Policy(units=tuple(units)))
recorded("offload", model, optimizer)
model, optimizer = made(3)
watcher = explorer.watch(model, optimizer, at=(2,))
for _ in range(3):
    stepped(model, optimizer)
noted("watch", watcher.runs[2].measurement)
child = os.fork()
if not child:
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        os._exit("forked subprocess" in str(error))
    os._exit(2)
out["child"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
recorded("after a fork", *made(3))
"""
REFUSED = """
import copy

def backward(model, batch):
    model(batch).square().mean().backward()

model, optimizer = made(3)
batch = torch.randn(512, 64, device="cuda")
for name, other in (("itself", model), ("a copy", copy.deepcopy(model))):
    judged = explorer.judge(backward, backward, model, batch, other)
    out["judged " + name] = [judged.verdict, str(judged)]
    try:
        judged.require("different")
        out["judged " + name].append("passed")
    except AssertionError:
        pass

def refused(name, *n_rows):
    try:
        for n in n_rows:
            model(torch.empty(n, 64, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except torch.OutOfMemoryError as error:
        counts = torch.cuda.memory_stats()
        held = [counts[f"{kind}_bytes.all.current"] for kind in ("requested", "allocated", "reserved")]
        out["refused " + name] = [*held, torch.cuda.mem_get_info()[0], *getattr(error, "__notes__", ())]

TOO_MANY = 1 << 25
for name, n_rows in (("first", [TOO_MANY]), ("later", [512, TOO_MANY])):
    try:
        with explorer.watch(model, optimizer, on_oom=os.environ["FOLDER"] + f"/{name}.explorer"):
            refused(name, *n_rows)
            raise torch.OutOfMemoryError  # a second error: the file of the first one stays
    except torch.OutOfMemoryError:
        pass
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
torch.cuda.memory._record_memory_history()
refused("in a history", 512, 512, TOO_MANY)
peaks = torch.cuda.memory_stats()
out["peaks"] = [peaks[f"{kind}_bytes.all.peak"] for kind in ("requested", "allocated", "reserved")]
torch.cuda.memory._dump_snapshot(os.environ["FOLDER"] + "/history.pickle")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("refused")


@pytest.fixture(scope="module")
def walked(folder: Path) -> dict[str, Any]:
    """One process with two cards, as most training scripts have one process."""
    return values_on(parse_card("h100"), WALKED + REFUSED, n_cards=2, FOLDER=str(folder))


STEPS = ("second of both", "first", "second", "streams", "pinned", "offload", "watch", "after a fork")


@has_cuda_build
@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_a_training_script_holds_what_its_card_counted(name: str, walked: dict[str, Any]) -> None:
    drawn, requested, allocated, counted, warnings = walked[name]
    assert drawn == requested > 0
    assert 0 <= allocated - requested < 512 * 200, "rounded to blocks of 512 bytes"
    assert name in ("pinned", "watch") or allocated == counted, "the record's last step is the card's last"
    assert [text for text in warnings if "also lies on" not in text] == []
    assert any("also lies on cuda:0" in text for text in warnings) == (name == "second of both")


@has_cuda_build
def test_pinned_batches_and_forks_are_those_of_torch(walked: dict[str, Any]) -> None:
    assert walked["pinned batch"] is True and walked["child"] == 1


@has_cuda_build
@pytest.mark.parametrize("name", ["itself", "a copy"])
def test_two_programs_without_values_are_never_called_equal(name: str, walked: dict[str, Any]) -> None:
    verdict, text, *passed = walked[f"judged {name}"]
    assert verdict == "not comparable" and "nothing was compared" in text and "imaginary" in text and not passed


@has_cuda_build
@pytest.mark.parametrize(
    ("name", "asked", "in_first_block"), [("first", "8,589,934,592 bytes", 64), ("later", "about 8.00 GiB", 0)]
)
def test_the_file_of_a_refusal_holds_what_torch_held(
    name: str, asked: str, in_first_block: int, walked: dict[str, Any], folder: Path
) -> None:
    """The batch has 8 GiB, the first block holds 64 GiB, and its output of 8 GiB is refused.

    Step 1 is recorded, with the block of each tensor. No instrument runs in later steps.
    """
    requested, allocated, _, free_bytes, *notes = walked[f"refused {name}"]
    assert len(notes) == 1 and f"asked for {asked}" in notes[0], notes
    record = from_msgpack(read((folder / f"{name}.explorer").read_bytes()).record, Measurement)
    assert record.failure is not None and record.failure.free_bytes and record.allocations
    assert record.failure.asked_bytes == 8 << 30
    assert abs(record.failure.free_bytes - free_bytes) <= 0.005 * 2**30, "torch writes GiB with two decimals"
    assert record.held_peak_bytes == (requested if name == "first" else allocated)
    log = record.allocations
    large = [n for n, block in zip(log.n_bytes, log.block) if n >= 32 << 30 and log.blocks[block].startswith("0")]
    assert sum(large) == in_first_block << 30


@has_cuda_build
def test_a_snapshot_that_torch_wrote_is_reported(walked: dict[str, Any], folder: Path) -> None:
    command = [sys.executable, "-m", "explorer", "report", str(folder / "history.pickle"), "--json"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    device = json.loads(ran.stdout)["devices"][0]
    assert [device[f"{kind}_bytes"] for kind in ("requested", "allocated", "reserved")] == walked["peaks"]
    _, allocated, reserved, free_bytes, *_ = walked["refused in a history"]
    (refused,) = device["refused"]
    assert refused == {
        "event": refused["event"], "n_bytes": 8 << 30, "allocated_bytes": allocated, "reserved_bytes": reserved,
        "driver_free_bytes": free_bytes,
    }  # fmt: skip
    simulated = next(row for row in device["simulated"] if not row["options"])
    assert [simulated["allocated_bytes"], simulated["reserved_bytes"], simulated["n_refused"]] == [
        *walked["peaks"][1:],
        1,
    ]


SIZES = ("n_layers=3", "width=64", "n_heads=2", "length=64", "vocabulary=256")
VERBS = {
    "batch": ("--budget", "200MiB"),
    "plan": ("--budget", "90%", "--set", "batch=64"),
}


@has_cuda_build
@pytest.mark.parametrize("verb", VERBS)
def test_a_prediction_on_the_card_is_what_torch_then_counts(verb: str, tmp_path: Path) -> None:
    model = ["sample_models/gpt.py", *(part for size in SIZES for part in ("--set", size)), "--device", "cuda"]
    command = ["-m", "explorer", verb, *model, *VERBS[verb], "--json"]
    ran = run_on(parse_card("h100"), command, {"CHECKPOINT_EXPLORER_HOME": str(tmp_path)}, capture=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    answer = json.loads(ran.stdout)
    if verb == "batch":
        assert answer["predicted_peak_bytes"] == answer["step_peak_bytes"] <= answer["budget_bytes"] == 200 << 20
    else:
        assert answer["met"] and answer["measured"]["step_peak_bytes"] == answer["plan"]["step_peak_bytes"]
        assert answer["measured"]["step_ms"] is None, "no clock of a card"
