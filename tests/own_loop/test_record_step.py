"""A step of a foreign loop is recorded, and nothing of that loop can tell."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import grad
from torch.utils.flop_counter import FlopCounterMode

import explorer
from explorer.engine.bench.host_stand_in import host_stand_in
from explorer.engine.bench.measure import measure
from explorer.engine.model.load import load
from explorer.engine.state.bits import n_bytes
from explorer.errors import BadInput, NotSaved
from explorer.jobs.run_file import read
from explorer.own_loop.record_step import RecordedRun, RecordedStep
from explorer.plan.memory.ledger import ledger
from explorer.plan.why.caveats import why_not_predicted
from explorer.record import Comparison, Measurement, ModelRef, Policy, RunSpec, Unit
from explorer.record.base import from_msgpack
from explorer.record.measurement import AllocatorPeaks
from tests.graphs import with_costs
from tests.view.builders import measured

WIDTH, BATCH = 64, 256


def net() -> nn.Sequential:
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(4)
    ]
    return nn.Sequential(*blocks, nn.BatchNorm1d(WIDTH))


class Loop:
    """Accumulation over two microbatches, clipping, AdamW, a schedule: nothing in it knows of a recorder."""

    def __init__(self, make: Callable[[], Any] = net, n_rows: int = 2 * BATCH) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.x, self.y = torch.randn(n_rows, WIDTH), torch.randn(n_rows, WIDTH)

    def step(self) -> None:
        self.optimizer.zero_grad()
        for x, y in zip(self.x.chunk(2), self.y.chunk(2)):
            (nn.functional.mse_loss(self.model(x), y) / 2).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.schedule.step()


def carried(loop: Loop) -> list[torch.Tensor]:
    """All tensors that training carries on, generators included."""
    state = [value for values in loop.optimizer.state.values() for value in values.values()]
    gradients = [p.grad for p in loop.model.parameters() if p.grad is not None]
    tensors = [*loop.model.state_dict().values(), *gradients, *state, torch.get_rng_state()]
    return [tensor.detach().clone() for tensor in tensors]


def trained(*, recorded: bool) -> tuple[Loop, RecordedStep | None]:
    loop, run = Loop(), None
    for i in range(3):
        run = explorer.record_step(loop.model, loop.optimizer) if recorded and i == 1 else run
        with run if run is not None and i == 1 else nullcontext():
            loop.step()
    return loop, run


def test_a_record_searches_the_objects_of_the_process_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has 300,000 objects: each search costs as much as a step of small kernels."""
    searches: list[str] = []
    for name in ("get_objects", "get_referrers"):
        plain = getattr(gc, name)
        monkeypatch.setattr(gc, name, lambda *args, name=name, plain=plain: (searches.append(name), plain(*args))[1])
    trained(recorded=True)
    assert searches == ["get_referrers"]


def test_tensors_that_a_compiler_keeps_have_no_memory_and_are_left_out() -> None:
    with FakeTensorMode():
        kept = torch.empty(BATCH, WIDTH)
    _, run = trained(recorded=True)
    assert run is not None and run.peak_bytes > 0 and kept.shape == (BATCH, WIDTH)


def test_fake_tensors_that_a_step_makes_hold_nothing_and_no_warning_is_printed() -> None:
    """DTensor derives shapes from fake tensors at the first step of a sharded model."""
    model, peaks = nn.Linear(8, 8), []
    torch.set_warn_always(True)
    try:
        for n_fake in (0, 1):
            model.zero_grad()
            with warnings.catch_warnings(action="error"), explorer.record_step(model) as run:
                model(torch.ones(4, 8)).sum().backward()
                with FakeTensorMode():
                    held = [torch.ones(2, 2).mul(2) for _ in range(n_fake)]
            assert len(held) == n_fake
            peaks.append(run.measurement.step_peak_bytes)
    finally:
        torch.set_warn_always(False)
    assert peaks[0] == peaks[1]


def test_phases_are_found_accumulation_and_what_lies_between_included() -> None:
    _, run = trained(recorded=True)
    assert run is not None
    phases = [span.phase for span in run.measurement.phases]
    assert phases[-4:-1] == ["backward", "between", "optimizer"] or phases[-3:] == ["backward", "between", "optimizer"]
    assert [phase for phase in phases if phase in ("forward", "backward")] == ["forward", "backward"] * 2
    assert run.measurement.by_fqn["0"].n_forward == 2
    assert run.measurement.origin == "recorded"
    assert run.measurement.recorded_in.startswith("test_record_step.py:")


def test_what_follows_an_optimizer_inside_backward_is_backward_too() -> None:
    model = net()
    for parameter in model.parameters():
        optimizer = torch.optim.AdamW([parameter])
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    with explorer.record_step(model) as run:
        model(torch.randn(BATCH, WIDTH)).sum().backward()
    phases = [span.phase for span in run.measurement.phases]
    assert phases.count("optimizer") > 2 and "between" not in phases[1:-1]


TINY: dict[str, Any] = {
    "n_layers": 3, "width": 32, "n_heads": 2, "length": 32, "batch": 8, "vocabulary": 32, "dropout": 0.1,
}  # fmt: skip
GPT = ModelRef(target="sample_models/gpt.py", arguments=TINY)


def gpt_step(policy: Policy | None = None) -> tuple[Measurement, RecordedStep]:
    """The same step twice: measured by the product, and recorded in a loop written by hand."""
    spec = RunSpec(model=GPT, n_repeats=0, policy=policy or Policy())
    loaded = load(GPT, seed=0)
    handle = explorer.apply_policy(loaded.model, spec.policy)
    optimizer = torch.optim.AdamW(loaded.model.parameters())
    inputs, targets = loaded.inputs, loaded.targets

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(loaded.model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    with explorer.record_step(loaded.model, optimizer) as run:
        step()
    handle.undo()
    return measure(spec), run


@pytest.mark.parametrize("policy", [None, Policy.recompute(["blocks.0", "blocks.1"])], ids=["kept", "recomputed"])
def test_peak_and_flops_are_those_of_a_measured_step(policy: Policy | None) -> None:
    measured, run = gpt_step(policy)
    recorded = run.measurement
    assert peak_of_model(recorded) == pytest.approx(peak_of_model(measured), rel=1e-3)
    assert recorded.total_flops == measured.total_flops
    again = {cost.fqn for cost in recorded.blocks if cost.n_recompute and cost.fqn.count(".") == 1}
    assert {fqn for fqn in again if fqn.startswith("blocks.")} == set(policy.blocks if policy else ())


def peak_of_model(run: Measurement) -> int:
    """Without what lay there of no block: the batch, and what other tests left in this process."""
    log = run.allocations
    assert log is not None
    deltas = [0] * (log.n_ticks + 2)
    for size, born, died, block in zip(log.n_bytes, log.born, log.died, log.block):
        if born or log.blocks[block]:
            deltas[born] += size
            deltas[died] -= size
    return max(accumulate(deltas))


def test_a_backward_by_autograd_grad_is_a_backward() -> None:
    loop = Loop()
    parameters, runs = list(loop.model.parameters()), []

    def step() -> None:
        loss = nn.functional.mse_loss(loop.model(loop.x), loop.y)
        for parameter, gradient in zip(parameters, grad(loss, parameters)):
            parameter.grad = gradient
        loop.optimizer.step()

    step()
    policy = Policy.recompute(("0", "1", "2", "3"))
    for chosen in (Policy(), policy):
        gc.collect()
        with explorer.apply_policy(loop.model, chosen), explorer.record_step(loop.model, loop.optimizer) as run:
            step()
        runs.append(run)
    assert [run.measurement.peak_phase for run in runs] == ["backward", "backward"]
    assert runs[0].forecast(policy).step_peak_bytes == pytest.approx(runs[1].peak_bytes, rel=0.001)
    explorer.auto_policy(loop.model, step, budget="90%").require()


def test_a_step_with_two_backwards_through_one_forward_is_forecast_with_a_caveat() -> None:
    def penalty(loop: Loop) -> None:
        x = loop.x.clone().requires_grad_()
        output = loop.model(x)
        (slope,) = grad(output.sum(), x, create_graph=True)
        (slope.square().sum() + output.square().sum()).backward()

    def kept(loop: Loop) -> None:
        output = loop.model(loop.x)
        output.sum().backward(retain_graph=True)
        output.square().sum().backward()

    policy, words = Policy.recompute(("0", "1")), []
    for step in (penalty, kept, Loop.step):
        loop = Loop()
        with explorer.record_step(loop.model, loop.optimizer) as run:
            step(loop)
        words.append(why_not_predicted(policy, run.measurement.graph, run.forecast(policy), run.measurement))
    assert "runs backward more than once through 0" in words[0] and words[0] == words[1] and not words[2]


def test_a_step_that_raises_is_kept_until_then_and_raises(tmp_path: Path) -> None:
    loop = Loop()
    with pytest.raises(RuntimeError, match="shape"), explorer.record_step(loop.model) as run:
        loop.model(loop.x).view(3, 5)
    assert run.measurement.failure is not None and run.measurement.step_peak_bytes is None
    assert run.peak_bytes > 0 and "at least" in repr(run)
    opened = read(run.save(tmp_path / "run.explorer").read_bytes())
    assert opened.kind == "measurement"


def test_a_peak_with_convolutions_on_the_cpu_is_the_least() -> None:
    model = nn.Conv2d(1, 2, 3)
    with explorer.record_step(model) as run:
        model(torch.randn(1, 1, 8, 8)).sum().backward()
    assert "peak at least" in repr(run) and "oneDNN holds memory" in repr(run)


@pytest.mark.parametrize("given", ["wrapper", "inner module"])
def test_a_peak_under_ddp_is_the_least(given: str) -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(4, 4)
        wrapper = nn.parallel.DistributedDataParallel(model)
        with explorer.record_step(wrapper if given == "wrapper" else model) as run:
            wrapper(torch.randn(2, 4)).sum().backward()
        assert "peak at least" in repr(run) and "holds its buckets in C++" in repr(run)
    finally:
        distributed.destroy_process_group()


def test_the_file_opens_with_the_figures_of_the_run(tmp_path: Path) -> None:
    _, run = trained(recorded=True)
    assert run is not None
    path = run.save(tmp_path / "step.explorer")
    again = from_msgpack(read(path.read_bytes()).record, Measurement)
    assert again.step_peak_bytes == run.peak_bytes and again.origin == "recorded"
    assert not list(tmp_path.glob("*.part"))
    assert run.measurement.recorded_in in run.report(tmp_path / "step.html").read_text()
    plan = run.plan("99%")
    assert plan.step_peak_bytes <= 0.99 * run.peak_bytes and plan.policy.units
    assert "peak" in repr(run) and run.why()[0].startswith("The peak of")
    with pytest.raises(NotSaved, match="could not be written"):
        run.save(tmp_path / "nowhere" / "step.explorer")


def test_another_instrument_is_refused_in_a_sentence(tmp_path: Path) -> None:
    model = net()
    with pytest.warns(match="FlopCounterMode"), FlopCounterMode(display=False), explorer.record_step(model):
        pass
    refused = pytest.warns(match="another step is being recorded")
    with explorer.record_step(model), refused, explorer.record_step(model) as second:
        model(torch.randn(2, 64))
    with pytest.raises(BadInput, match="another step is being recorded"):
        second.measurement  # noqa: B018
    several: Any = [torch.optim.SGD(model.parameters()), "sgd"]
    with pytest.warns(match="The optimizer is a str, .* a list of several"), explorer.record_step(model, several):
        pass
    with pytest.warns(match="no.explorer is not written. The step of .* is not recorded"):
        assert not second.save(tmp_path / "no.explorer").exists()
    with pytest.raises(BadInput, match="not been recorded yet"):
        explorer.record_step(model).measurement  # noqa: B018
    with pytest.warns(match="lies on meta"), explorer.record_step(nn.Linear(2, 2, device="meta")):
        pass


def test_a_step_without_anything_inside_is_refused() -> None:
    with pytest.warns(match="Nothing was allocated"), explorer.record_step(net()):
        pass
    garbage = [torch.zeros(1000)]
    with pytest.warns(match="Nothing was allocated"), explorer.record_step(net()):
        garbage.clear()


def test_a_model_with_nothing_to_choose_has_a_plan_that_keeps_everything() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    with explorer.record_step(model) as run:
        model(torch.randn(512, 64)).square().mean().backward()
    assert not run.plan("100%").policy.units


def test_a_process_that_ends_while_it_writes_leaves_no_half_written_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = Path(__file__).parents[1] / "golden/cpu.msgpack"
    run, file = RecordedRun(from_msgpack(golden.read_bytes(), Comparison).candidate), tmp_path / "step.file"
    whole = run.save(file).read_bytes()

    def ends(path: Path, name: Path) -> None:
        assert path != file == name and path.read_bytes()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", ends)
    for write in (run.save, run.report):
        with pytest.raises(KeyboardInterrupt):
            write(file)
        assert file.read_bytes() == whole and read(whole).kind == "measurement"


def steps_of(*, keeps_output: bool) -> list[RecordedStep]:
    """Three recorded steps. The output stays in a variable of the loop, or dies in backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4096), nn.Tanh(), nn.Linear(4096, 512))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x, runs = torch.randn(BATCH, WIDTH), []
    for _ in range(3):
        run = explorer.record_step(model, optimizer)
        with run:
            optimizer.zero_grad()
            logits = model(x)
            loss = logits.pow(2).sum()
            if not keeps_output:
                del logits
            loss.backward()
            optimizer.step()
        runs.append(run)
    return runs


@pytest.mark.parametrize("keeps_output", [True, False])
def test_a_card_repeats_the_lifetimes_of_the_record(keeps_output: bool) -> None:
    """The first step has neither state nor gradients: what a card says from it is what a later step then holds."""
    first, *_, later = steps_of(keeps_output=keeps_output)
    assert first.peak_bytes < later.peak_bytes
    for run in (first, later):
        memory = run.on_card("24GiB", allocator="max_split_size_mb:64")
        assert memory.requested_bytes - memory.workspace_bytes == later.peak_bytes
        assert memory.card.options == "max_split_size_mb:64" and "ran on the CPU" in str(memory)
    with pytest.raises(BadInput, match="neither a card"):
        later.on_card("b201")


def layouts() -> dict[str, Callable[[], torch.Tensor]]:
    dense = torch.rand(256, 256).sub(0.5).relu()
    return {
        "coo": dense.to_sparse,
        "csr": dense.to_sparse_csr,
        "csc": dense.to_sparse_csc,
        "bsr": lambda: dense.to_sparse_bsr((16, 16)),
        "nested": lambda: torch.nested.nested_tensor([dense, dense]),
        "jagged": lambda: torch.nested.nested_tensor([dense, dense], layout=torch.jagged),
        "quantised": lambda: torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", sorted(layouts()))
def test_a_tensor_without_one_storage_that_the_script_holds_is_an_input(layout: str) -> None:
    model, held = nn.Linear(8, 8), []

    def inputs() -> int:
        model.zero_grad()
        with explorer.record_step(model) as run:
            model(torch.ones(4, 8)).sum().backward()
        return ledger(run.measurement, 0).by_role["input"]

    before = inputs()
    held.append(layouts()[layout]())
    assert inputs() - before >= n_bytes(held[0]) > 0


@pytest.mark.parametrize("beside", ["teacher", "average", "critic"])
def test_weights_of_other_models_are_parameters_and_no_input(beside: str) -> None:
    """No batch size lowers the bytes of a teacher, of an average of the weights, or of a critic with its optimizer."""
    student = nn.Linear(8, 8)

    def by_role(held: tuple[nn.Module, ...]) -> Counter[str]:
        student.zero_grad()
        with explorer.record_step(student) as run:
            loss = student(torch.ones(4, 8)).sum()
            for other in held if beside == "teacher" else ():
                loss = loss + other(torch.ones(4, 32)).detach().sum()
            loss.backward()
        return Counter(ledger(run.measurement, 0).by_role)

    gc.collect()
    before = by_role(())
    other = nn.Linear(32, 32).requires_grad_(beside == "critic")
    critics = torch.optim.AdamW(other.parameters()) if beside == "critic" else None
    if critics is not None:
        other(torch.ones(4, 32)).sum().backward()
        critics.step()
    more = by_role((other,))
    more.subtract(before)
    n_bytes, is_trained = sum(parameter.nbytes for parameter in other.parameters()), critics is not None
    assert (more["parameter"], more["input"]) == (n_bytes, 0)
    assert (more["gradient"], more["optimizer state"]) == (n_bytes * is_trained, (2 * n_bytes + 2 * 4) * is_trained)


def test_views_of_a_parameter_are_no_results_of_an_earlier_forward() -> None:
    flat = nn.Linear(512, 512)
    _views = flat.weight.t(), flat.weight.view(-1)  # as an implementation with one flat parameter has them
    gc.collect()
    with explorer.record_step(flat) as run:
        flat(torch.ones(4, 512)).sum().backward()
    assert run.measurement.left_bytes < flat.weight.nbytes


@pytest.mark.parametrize("held_by", ["a variable", "a caught error", "nothing"])
def test_results_of_an_earlier_forward_are_named_where_they_are_much_of_the_peak(held_by: str) -> None:
    """PyTorch's FAQ: a traceback refers to every variable of its frames, so a retry inside `except` starts full."""
    model = nn.Sequential(nn.Linear(8, 4096), nn.Tanh(), nn.Linear(4096, 1))

    def forward() -> torch.Tensor:
        hidden = model[1](model[0](torch.ones(64, 8)))
        if held_by == "a caught error":
            raise RuntimeError("out of memory, say")
        return hidden if held_by == "a variable" else hidden.detach()

    gc.collect()
    try:
        _held = forward()
    except RuntimeError:
        _held = None
        with explorer.record_step(model) as run:
            model(torch.ones(4, 8)).sum().backward()
    else:
        with explorer.record_step(model) as run:
            model(torch.ones(4, 8)).sum().backward()
    n_bytes = 0 if held_by == "nothing" else 64 * 4096 * 4
    assert run.measurement.left_bytes == n_bytes
    assert ("1.0 MiB of the peak are results of an earlier forward" in str(run)) == bool(n_bytes)


def test_the_adjacency_of_a_graph_is_an_input_and_no_convolution_is_named() -> None:
    n = 400
    adjacency = torch.rand(n, n).to_sparse()

    class Gcn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.spmm(adjacency, self.second(torch.relu(torch.spmm(adjacency, self.first(x)))))

    model = Gcn()
    with explorer.record_step(model) as run:
        model(torch.randn(n, 16)).square().mean().backward()
    assert ledger(run.measurement, 0).by_role["input"] >= n_bytes(adjacency)
    assert "unattributed" in str(run) and "convolution" not in str(run)


@pytest.mark.parametrize("how", ["called", "in place", "function"])
def test_where_the_compiler_is_switched_off_a_step_has_its_blocks(how: str) -> None:
    """As by TORCH_COMPILE_DISABLE=1: the advice of a compiled step must work."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)))
    called: Callable[..., torch.Tensor] = model
    if how == "in place":
        model.compile(backend="eager")
    else:
        called = torch.compile(model if how == "called" else (lambda x: model(x)), backend="eager")
    with torch._dynamo.config.patch(disable=True), explorer.record_step(model) as run:
        called(torch.randn(64, 32)).sum().backward()
    assert not run.measurement.ran_compiled and run.measurement.ran_as_written
    assert "torch.compile was off in this step" in str(run)
    assert run.plan(f"{run.peak_bytes - 1} B").policy.units  # what other tests left alive counts in a share of the peak


def test_a_log_has_the_steady_reserved_bytes_and_counts_a_block_with_its_inside_once() -> None:
    run = with_costs(with_costs(measured(), n_recompute=0), "layers.1", "layers.1.inner", "layers.2", n_recompute=1)
    for steady, reserved in ((5, 5), (None, 7)):
        peaks = AllocatorPeaks(reserved_peak_bytes=7, steady_reserved_peak_bytes=steady)
        scalars = RecordedRun(replace(run, peaks=peaks)).scalars()
        assert (scalars["memory/reserved_bytes"], scalars["recompute/blocks"]) == (reserved, 2)


def test_a_step_is_recorded_once_and_the_first_record_stays() -> None:
    loop = Loop()
    step = explorer.record_step(loop.model, loop.optimizer)
    with step:
        loop.step()
    first = step.measurement
    with pytest.warns(UserWarning, match="recorded in it already"), step:
        loop.step()
    assert step.measurement is first


def test_a_record_says_that_offload_moves_nothing_on_a_cpu() -> None:
    loop = Loop()
    units = (Unit(blocks=("0",), action="offload"),)
    for more in ((), (Unit(blocks=("2",), action="recompute"),)):
        recording = explorer.record_step(loop.model, loop.optimizer)
        with explorer.apply_policy(loop.model, Policy(units=(*units, *more))), recording as run:
            loop.step()
        assert "had no effect" not in str(run)
        assert "The policy offloads 0, and on a CPU nothing moves" in str(run)
        with pytest.raises(BadInput, match="on a CPU nothing moves.*run --card h100"):
            run.on_card("h100")
    recording = explorer.record_step(loop.model, loop.optimizer)
    with explorer.apply_policy(loop.model, Policy(units=units)), host_stand_in(), recording as run:
        loop.step()
    assert run.measurement.peaks.offloaded_peak_bytes and "on a CPU" not in str(run)
