"""Two programs: silent bugs are called different with the right tensor first, harmless changes never are."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import LBFGS, SGD, Adam, AdamW

import explorer
from explorer.errors import BadInput
from explorer.own_loop.judge import Judged
from tests.own_loop.harmless_changes import COMPILED, HARMLESS, channels_last
from tests.own_loop.program_nets import (
    WIDTH,
    accumulated,
    adamw,
    backward,
    convolutional,
    decoder,
    loss_of,
    pictures,
    squares,
    text,
)
from tests.own_loop.silent_bugs import BUGS, forgets_a_parameter, no_divisor, on_rows


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


SAYS = {
    "the last microbatch's gradients": "The model returns the same; 33 of 35 gradients differ, that of the last block",
    "clipped one by one": "are clipped or scaled otherwise",
    "no accumulation divisor": "are 2 times the baseline's, in the same direction: a divisor",
    "a parameter nobody steps": "the step of norm.bias is not: the candidate does not move it. Usual cause: its ",
    "tied weight dropped": "embed.weight, head.weight are one parameter in one of the two programs alone: a tie",
    "a detached activation": "backward is the same down to layers.0.mlp.down.weight, and ",
    "a detached way around": "the loss is equal; the gradient of embed.weight alone differs. Usual causes: a detach",
    "no scale": "it is Attention in the baseline and Unscaled in the candidate",
    "looks ahead": "layers.1.attention is the first block that returns another output for the same input",
    "inputs reversed": "The model gets other inputs in the candidate's step",
    "cut off and clipped": "13 more. Usual causes: a detach or no_grad, requires_grad that is off, a reentrant",
    "targets not shifted": "Usual causes: shifted targets, padding that counts, smoothing, a term that is missing",
    "a mean of uneven means": "The model is called once in a step of the baseline and 2 times in the candidate's",
    "another epsilon": "norm is the first block that returns another output for the same input",
    "weight decay on biases": "weight_decay is 0 in the baseline and 0.1 in the candidate",
    "frozen statistics": "track_running_stats=True) in eval mode in the candidate",
    "gradients never zeroed": "gradients that were not zeroed",
    "a block in bfloat16": "layers.1.mlp.up is the first block that returns another output for the same input",
    "a gradient counted twice": "the gradient of layers.0.mlp.up.weight alone differs",
    "one layer twice": "The model is the first block that returns another output for the same input",
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_silent_bug_is_different_and_its_tensor_comes_first(bug: str) -> None:
    case = BUGS[bug]
    model, candidate_model = case.models()
    judged = explorer.judge(case.reference, case.candidate, model, case.batch(), candidate_model)
    assert judged.verdict in ("different", "state moved"), judged
    assert not case.first or judged.worst[0].name.startswith(case.first), judged
    assert SAYS.get(bug, "") in " ".join(judged.causes), judged.causes
    assert "none of these shows" not in " ".join(judged.causes)
    assert bug != "cut off and clipped" or len(judged.causes) == 1, "clipping follows from what is missing"
    with pytest.raises(AssertionError, match=judged.worst[0].name):
        judged.require()


@pytest.mark.parametrize("change", [*HARMLESS, *(pytest.param(name, marks=pytest.mark.slow) for name in COMPILED)])
def test_a_harmless_change_is_at_most_rounding(change: str) -> None:
    case = (HARMLESS | COMPILED)[change]
    model, candidate_model = case.models()
    explorer.judge(case.reference, case.candidate, model, case.batch(), candidate_model).require()


@pytest.mark.parametrize("kind", [SGD, torch.optim.SparseAdam])
def test_an_optimizer_steps_on_sparse_gradients(kind: Callable[..., torch.optim.Optimizer]) -> None:
    """With repeated rows, which SGD adds one by one."""
    model, batch = nn.Embedding(6, 4, sparse=True), torch.tensor([1, 1, 2, 0])

    def times(factor: float, n: int, lr: float = 0.1) -> Callable[[nn.Module, Any], None]:
        def step(model: nn.Module, batch: Any) -> None:
            model.zero_grad()
            for _ in range(n):
                (model(batch).pow(3).sum() * factor).backward()
            kind(model.parameters(), lr=lr).step()

        return step

    assert explorer.judge(times(0.7, 1), times(0.7, 1), model, batch).verdict == "bitwise equal"
    assert explorer.judge(times(2.1, 1), times(0.7, 3), model, batch).verdict == "rounding"
    assert explorer.judge(times(0.7, 1), times(0.7, 1, lr=0.2), model, batch).verdict == "different"


def test_everything_is_put_back() -> None:
    model, batch = decoder(), text()
    model.norm.register_buffer("mean", torch.zeros(WIDTH))
    model.seen = seen = [1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    backward(model, batch)
    optimizer.step()
    moments = {parameter: held["exp_avg"] for parameter, held in optimizer.state.items()}
    values = {name: value.clone() for name, value in {**model.state_dict(), "moment": moments[model.norm.bias]}.items()}
    gradients = [(parameter.grad, parameter.grad.clone()) for parameter in model.parameters()]
    position, modes = torch.get_rng_state(), [module.training for module in model.modules()]

    def step(model: nn.Module, batch: Any) -> None:
        model.eval()
        torch.rand(3)
        model.seen.append(2)
        model.norm.mean = model.norm.mean + 1
        backward(model, batch)
        optimizer.step()
        model.new = 1

    assert explorer.judge(step, step, model, batch).verdict == "bitwise equal"
    now = {**model.state_dict(), "moment": optimizer.state[model.norm.bias]["exp_avg"]}
    assert all(torch.equal(now[name], value) for name, value in values.items())
    assert all(optimizer.state[parameter]["exp_avg"] is moment for parameter, moment in moments.items())
    now_gradients = [parameter.grad for parameter in model.parameters()]
    assert all(now is grad and torch.equal(now, was) for now, (grad, was) in zip(now_gradients, gradients))
    assert model.seen is seen and seen == [1] and not hasattr(model, "new")
    assert torch.equal(torch.get_rng_state(), position) and modes == [m.training for m in model.modules()]


def test_a_reference_that_does_not_equal_itself_is_not_comparable() -> None:
    model, calls = decoder(), itertools.count()

    def step(model: nn.Module, batch: Any) -> None:
        model.zero_grad()
        (loss_of(model, *batch) * (1 + next(calls))).backward()

    judged = explorer.judge(step, backward, model, text())
    assert judged.verdict == "not comparable"
    assert "Two runs of the baseline from the same state and seed differ in 35 of 35 gradients" in judged.causes[0]
    with pytest.raises(AssertionError, match="Two runs of the baseline"):
        judged.require("different")


def test_a_candidate_that_raises_is_a_verdict_and_a_reference_that_raises_is_an_error() -> None:
    def raises(model: nn.Module, batch: Any) -> None:
        raise ValueError("no such kernel")

    judged = explorer.judge(backward, raises, decoder(), text())
    assert judged.verdict == "not comparable" and "ValueError: no such kernel" in judged.causes[0]
    with pytest.raises(ValueError, match="no such kernel"):
        explorer.judge(raises, backward, decoder(), text())


def forward_alone(model: nn.Module, batch: Any) -> None:
    loss_of(model, *batch)


def other_values(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    model.norm.weight.data.mul_(2)
    return model


def other_names(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    model.final = model.norm
    del model.norm
    return model


@pytest.mark.parametrize(("make", "step", "words"), [
    (other_values, backward, "other values or shapes in norm.weight"),
    (other_names, backward, "norm.weight, norm.bias of the reference alone; final.weight, final.bias of the cand"),
    (lambda model: nn.Linear(3, 3), backward, "share no name of a parameter"),
    (lambda model: model, forward_alone, "Neither step left a gradient"),
])  # fmt: skip
def test_what_cannot_be_judged_is_refused_in_one_sentence(make: Any, step: Any, words: str) -> None:
    model = decoder()
    with pytest.raises(BadInput, match=words):
        explorer.judge(step, step, model, text(), make(model))


def test_the_bias_before_a_norm_does_not_lead() -> None:
    """Its gradient is zero but for rounding, and of that much is left after another order of sums."""
    judged = explorer.judge(channels_last, squares, convolutional(), pictures())
    bias = next(diff for diff in judged.worst if diff.name == "0.bias")
    assert judged.verdict == "rounding" and bias.relative_norm > 1e3 * judged.worst[0].relative_norm


def test_coarser_kernels_are_told_from_other_mathematics() -> None:
    """Torch's channels_last BatchNorm is less exact on the CPU; twice the epsilon is less than its distance."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    batch = torch.randn(16, 3, 32, 32), torch.randn(16, 8, 28, 28)
    coarser = explorer.judge(squares, channels_last, model, batch)
    other = copy.deepcopy(model)
    other[1].eps *= 2
    assert coarser.verdict == "different" and "In float64 the gradients of both are the same" in coarser.causes[0]
    assert "The model is the first block whose input lies in another order of memory" in coarser.causes[1]
    assert "float64" not in " ".join(explorer.judge(squares, squares, model, batch, other).causes)


class Frozen(nn.Sequential):
    """Two convolutions with norms, whose channels_last kernels round more, beside a weight that nothing reaches."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
        self.frozen = nn.Parameter(torch.ones(3))
        self.n_seen = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :3])


def by_hand(model: nn.Module, decay: float = 0.0) -> None:
    """A step of SGD that no optimizer of torch makes."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * (parameter.grad + decay * parameter)


def zero_gradient(model: nn.Module, batch: Any) -> None:
    channels_last(model, batch)
    model.frozen.grad = torch.zeros(3)


def zero_gradient_decays(model: nn.Module, batch: Any) -> None:
    zero_gradient(model, batch)
    AdamW(model.parameters(), weight_decay=0.1).step()


def small_gradient_is_doubled(model: nn.Module, batch: Any) -> None:
    """Of one number, whose share of the length of all gradients is small."""
    channels_last(model, batch)
    model[1].weight.grad[0] *= 1.001


def statistics_move_twice(model: nn.Module, batch: Any) -> None:
    channels_last(model, batch)
    model(batch[0])


def gradients_are_lost(model: nn.Module, batch: Any) -> None:
    channels_last(model, batch)
    model[0].bias.grad = None


def decays_by_hand(model: nn.Module, batch: Any) -> None:
    channels_last(model, batch)
    by_hand(model, decay=1e-3)


def counts(model: nn.Module, batch: Any) -> None:
    channels_last(model, batch)
    model.n_seen += 1.0


FAULTS: list[tuple[Any, Any]] = [
    (zero_gradient, squares),
    (zero_gradient_decays, lambda model, batch: (squares(model, batch), AdamW(model.parameters()).step())),
    (small_gradient_is_doubled, squares),
    (statistics_move_twice, squares),
    (gradients_are_lost, squares),
    (decays_by_hand, lambda model, batch: (squares(model, batch), by_hand(model))),
    (counts, squares),
]


@pytest.mark.parametrize(("faulty", "reference"), FAULTS)
def test_what_rounds_more_is_not_the_cause_of_a_fault_beside_it(faulty: Any, reference: Any) -> None:
    """Gradients that differ by rounding are evidence of themselves alone."""
    torch.manual_seed(0)
    model, batch = Frozen(), (torch.randn(16, 3, 32, 32), torch.randn(16, 8, 28, 28))
    judged = explorer.judge(reference, faulty, model, batch)
    assert judged.verdict == "different" and "rounds more" not in " ".join(judged.causes), judged
    assert "rounds more" in explorer.judge(squares, channels_last, model, batch).causes[0]


def test_a_gradient_of_the_candidate_alone_is_named_and_what_it_does_is_said() -> None:
    def steps(*, zero: bool) -> Callable[[nn.Module, Any], None]:
        def step(model: nn.Module, batch: Any) -> None:
            model.zero_grad()
            model[1](model[0](batch).detach() + (0.0 * model[0](batch) if zero else 0.0)).sum().backward()
            AdamW(model.parameters(), weight_decay=0.1).step()

        return step

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    judged = explorer.judge(steps(zero=False), steps(zero=True), model, torch.randn(2, 4))
    assert judged.verdict == "different"
    assert [diff.presence for diff in judged.comparison.gradients][:2] == ["candidate only"] * 2
    assert judged.causes[0].startswith("0.weight, 0.bias have a gradient in the candidate alone.")


def test_gradients_of_the_batch_are_judged() -> None:
    model = torch.nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 4))
    x = torch.randn(3, 16, requires_grad=True)

    def detached(model: nn.Module, x: Any) -> None:
        on_rows(model, x.detach())

    judged = explorer.judge(on_rows, detached, model, x)
    assert judged.verdict == "different" and judged.worst[0].name == "batch" and x.grad is None


@pytest.mark.slow
def test_a_model_in_shards_is_judged_under_its_plain_names() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = decoder()
        sharded = copy.deepcopy(model)
        for layer in sharded.layers:
            fully_shard(layer)
        judged = explorer.judge(adamw, adamw, model, text(), fully_shard(sharded))
        judged.require("bitwise equal")
        assert judged.comparison.n_gradients == 35
        explorer.judge(adamw, forgets_a_parameter, model, text(), sharded)
        assert explorer.judge(accumulated, no_divisor, model, text(), sharded).verdict == "different"
        again = copy.deepcopy(model)
        for layer in again.layers:
            fully_shard(layer)
        explorer.judge(adamw, adamw, fully_shard(again), text(), sharded).require("bitwise equal")
        assert explorer.judge(adamw, forgets_a_parameter, again, text(), sharded).verdict == "different"
    finally:
        distributed.destroy_process_group()


Make = Callable[[Any], torch.optim.Optimizer]


def step_with(make: Make) -> Callable[[nn.Module, Any], Tensor]:
    """One optimizer for all steps of a run, made at the first."""
    made: dict[int, torch.optim.Optimizer] = {}

    def step(model: nn.Module, batch: Any) -> Tensor:
        optimizer = made.setdefault(id(model), make(model.parameters()))
        if isinstance(optimizer, LBFGS):
            return optimizer.step(partial(squares, model, batch))  # type: ignore[arg-type, return-value]
        loss = squares(model, batch)
        optimizer.step()
        return loss

    return step


def judged(reference: Make, candidate: Make) -> Judged:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
    batch = torch.randn(32, 16), torch.randn(32, 5)
    return explorer.judge(step_with(reference), step_with(candidate), model, batch, copy.deepcopy(model))


def of(kind: Any, **options: Any) -> Make:
    return lambda parameters: kind(parameters, **options)


OPTIMIZER_BUGS = {
    "decay forgotten": (of(SGD, lr=1e-2, weight_decay=1e-4), of(SGD, lr=1e-2), "weight_decay is 0.0001 in "),
    "lr of 1e-3": (of(SGD, lr=1e-3), of(SGD, lr=1.01e-3), "lr is 0.001 in the baseline and 0.00101 in the candidate"),
    "lr of 1e-5": (of(SGD, lr=1e-5), of(SGD, lr=2e-5), "lr is 1e-05 "),
    "decay of AdamW forgotten": (of(AdamW, weight_decay=1e-3), of(AdamW, weight_decay=0), "weight_decay is 0.001 in "),
    "coupled decay": (of(AdamW), of(Adam, weight_decay=1e-2), "the class is AdamW in the baseline and Adam in "),
    "momentum": (of(SGD, momentum=0.9), of(SGD, momentum=0.89), "momentum is 0.9 in the baseline and 0.89 in "),
    "nesterov": (of(SGD, lr=1e-5, momentum=0.9), of(SGD, lr=1e-5, momentum=0.9, nesterov=True), "nesterov is False "),
    "second beta": (of(AdamW), of(AdamW, betas=(0.9, 0.98)), "betas is (0.9, 0.999) in the baseline and (0.9, 0.98)"),
    "epsilon": (of(AdamW, lr=1e-3), of(AdamW, lr=1e-3, eps=1e-7), "eps is 1e-08 in the baseline and 1e-07 in the cand"),
    "lr of LBFGS": (of(LBFGS, lr=0.1), of(LBFGS, lr=0.2), "lr is 0.1 in the baseline and 0.2 in the candidate"),
    "a learning rate of zero": (of(SGD, lr=1e-2), of(SGD, lr=0.0), "lr is 0.01 in the baseline and 0 in the cand"),
}


@pytest.mark.parametrize("bug", OPTIMIZER_BUGS)
def test_another_optimizer_is_different_and_what_it_does_is_said(bug: str) -> None:
    reference, candidate, says = OPTIMIZER_BUGS[bug]
    verdict = judged(reference, candidate)
    assert verdict.verdict == "different", verdict
    assert str(verdict).startswith("different: 6 of 6 gradients are equal bit by bit")
    assert verdict.causes[0].startswith("The gradients are the same and the step of ")
    assert says in verdict.causes[-1] and ("differ: the class" in verdict.causes[-1]) == (bug == "coupled decay")
    assert "of its last step away" in str(verdict)


class AdamWInFloat32(torch.optim.Optimizer):
    """Written by hand, its corrections in float32: 1 - 0.999 ** n is right to three digits fewer."""

    def __init__(self, parameters: Any, lr: float, decay: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                own = self.state[p]
                if not own:
                    own |= {"n": torch.zeros(()), "mean": torch.zeros_like(p), "square": torch.zeros_like(p)}
                own["n"] += 1
                own["mean"].lerp_(p.grad, 0.1)
                own["square"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                first, second = (1 - torch.tensor(beta) ** own["n"] for beta in (0.9, 0.999))
                p.mul_(1 - group["lr"] * group["decay"])
                p.sub_(group["lr"] * (own["mean"] / first) / ((own["square"] / second).sqrt() + 1e-8))


@pytest.mark.parametrize(("reference", "candidate"), [
    (of(AdamW, lr=1e-2), of(AdamW, lr=1e-2, fused=True)),
    (of(AdamW, lr=1e-2), of(AdamWInFloat32, lr=1e-2)),
    (of(AdamW, lr=1e-4), of(AdamWInFloat32, lr=1e-4)),
    (of(SGD, lr=0.1, momentum=0.9), of(SGD, lr=0.1, momentum=0.9, fused=True)),
    (of(SGD, lr=1e-2), of(SGD, lr=1e-2 * (1 + 1e-6))),
    (of(LBFGS, lr=0.1), of(LBFGS, lr=0.1)),
])  # fmt: skip
def test_the_same_step_in_other_arithmetic_is_rounding(reference: Make, candidate: Make) -> None:
    judged(reference, candidate).require()


def test_a_step_that_leaves_no_gradient_is_judged_by_its_parameters() -> None:
    def step(model: nn.Module, batch: Any) -> None:
        squares(model, batch)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad)  # type: ignore[arg-type]
                parameter.grad = None

    verdict = explorer.judge(step, step, nn.Linear(16, 5), (torch.randn(32, 16), torch.randn(32, 5)))
    assert str(verdict).startswith("bitwise equal: 2 of 2 parameters are equal bit by bit after the steps")
