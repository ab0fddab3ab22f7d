"""Trainings of several models, and of several optimizers: all of an iteration is in the record, under names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import explorer
from explorer.errors import BadInput
from explorer.own_loop.script import ScriptUnderWatch
from explorer.own_loop.turns import Turns
from explorer.record import ROLES, Measurement

WIDTH, BATCH = 64, 512


def tower(n: int) -> nn.Sequential:
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(n)]
    )


class Gan:
    """Two models with an optimizer each; three calls and three backwards in one iteration."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.netG, self.netD = tower(3), tower(2)
        self.models = {"netG": self.netG, "netD": self.netD}
        self.optimizers = [torch.optim.Adam(model.parameters(), 1e-4) for model in (self.netD, self.netG)]
        self.real, self.noise = torch.randn(2 * BATCH, WIDTH), torch.randn(2 * BATCH, WIDTH)

    def step(self) -> None:
        of_d, of_g = self.optimizers
        self.netD.zero_grad()
        self.netD(self.real).square().mean().backward()
        fake = self.netG(self.noise)
        (1 - self.netD(fake.detach())).square().mean().backward()
        of_d.step()
        self.netG.zero_grad()
        self.netD(fake).square().mean().backward()
        of_g.step()

    def state(self) -> list[torch.Tensor]:
        return [p.detach().clone() for model in self.models.values() for p in model.parameters()]


def bytes_of(run: Measurement, role: str, block: str) -> int:
    """Bytes alive before the step, or at its peak for roles that it makes."""
    log = run.allocations
    assert log is not None
    tick = 0 if role in ("parameter", "optimizer state") else log.peak_tick
    rows = zip(log.n_bytes, log.born, log.died, log.role, log.block)
    return sum(
        size for size, born, died, number, at in rows
        if born <= tick < died and ROLES[number] == role and log.blocks[at].split(".")[0] == block
    )  # fmt: skip


def of_parameters(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def test_every_model_and_every_optimizer_of_an_iteration_is_in_the_record() -> None:
    gan = Gan()
    gan.step()
    with explorer.record_step(gan.models, gan.optimizers) as run:
        gan.step()
    step = run.measurement
    assert (step.by_fqn["netD"].n_forward, step.by_fqn["netG.0"].n_forward) == (3, 1)
    for name, model in gan.models.items():
        assert bytes_of(step, "parameter", name) == of_parameters(model)
        assert bytes_of(step, "optimizer state", name) == 2 * of_parameters(model) + 4 * len(list(model.parameters()))
    saved = step.by_fqn[""].saved_after_forward_bytes
    assert sum(step.by_fqn[name].saved_after_forward_bytes for name in gan.models) > 0.99 * saved > 0
    assert [span.phase for span in step.phases].count("optimizer") == 2
    assert not step.unwatched_parameter_bytes and "no module of the record" not in str(run)
    assert list(step.by_fqn)[1] == "netG", "names stand in the order that was given"


def test_optimizers_need_not_be_given() -> None:
    gan = Gan()
    gan.step()
    with explorer.record_step(gan.models) as run:
        gan.step()
    assert bytes_of(run.measurement, "optimizer state", "netG") > 2 * of_parameters(gan.netG)


def test_what_no_watched_module_owns_is_said_with_its_size() -> None:
    gan = Gan()
    both = torch.optim.SGD([*gan.netG.parameters(), *gan.netD.parameters()], 1e-4)
    for optimizers in (both, gan.optimizers, None):
        with explorer.record_step(gan.netG, optimizers) as run:
            gan.step()
        assert run.measurement.unwatched_parameter_bytes == of_parameters(gan.netD)
        assert f"{of_parameters(gan.netD) / 2**10:.1f} KiB of parameters that this step trains are in no module" in str(
            run
        )


def test_a_plan_names_blocks_of_both_models_and_holds_in_the_next_step() -> None:
    gan, plain = Gan(), Gan()
    with explorer.record_step(gan.models, gan.optimizers) as run:
        gan.step()
    plan = run.plan("88%")
    with explorer.apply_policy(gan.models, plan.policy), explorer.record_step(gan.models, gan.optimizers) as under:
        gan.step()
    assert plan.policy.blocks and all(fqn.split(".")[0] in gan.models for fqn in plan.policy.blocks)
    assert under.peak_bytes == pytest.approx(plan.step_peak_bytes, rel=5e-3)
    plain.step()
    plain.step()
    assert all(torch.equal(a, b) for a, b in zip(gan.state(), plain.state()))


@pytest.mark.parametrize("which", ["netG", "netD", "both"])
def test_auto_policy_takes_a_step_with_several_backwards(which: str) -> None:
    gan = Gan()
    gan.step()
    before = gan.state()
    models = gan.models if which == "both" else gan.models[which]
    plan = explorer.auto_policy(models, gan.step, budget="96%")
    assert plan.kept and plan.policy.blocks
    assert plan.measured_peak_bytes == pytest.approx(plan.plan.step_peak_bytes, rel=5e-3)
    assert all(torch.equal(a, b) for a, b in zip(before, gan.state()))


SCRIPT = """
import torch
from torch import nn
from tests.own_loop.test_several_models import Gan, tower

def towers():
    enc, dec = tower(2), tower(2)
    opt = torch.optim.Adam([*enc.parameters(), *dec.parameters()])
    for _ in range(3):
        opt.zero_grad(); dec(enc(torch.randn(512, 64))).square().mean().backward(); opt.step()

def gan():
    torch.manual_seed(0)
    net = Gan()
    netG, netD = net.netG, net.netD
    net.optimizers = [torch.optim.Adam(netD.parameters(), 1e-4), torch.optim.Adam(netG.parameters(), 1e-4)]
    for _ in range(3):
        net.step()

def one():
    model = tower(2)
    body, head = list(model[0].parameters()), list(model[1].parameters())
    optimizers = [torch.optim.SGD(body, 1e-3), torch.optim.AdamW(head)]
    for _ in range(3):
        model(torch.randn(512, 64)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step(); optimizer.zero_grad()

{which}()
"""


@pytest.mark.parametrize(("which", "models"), [("towers", ("enc", "dec")), ("gan", ("netD", "netG")), ("one", ())])
def test_a_script_is_recorded_with_all_its_models(tmp_path: Path, which: str, models: tuple[str, ...]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(which=which))
    watched = ScriptUnderWatch(script, at=(1, 2), on_oom=None, files=str(tmp_path / "step{step}.explorer"))
    watched.run(())
    assert watched.watch is not None and watched.watch.n_steps == 3
    for run in watched.watch.runs.values():
        step = run.measurement
        assert not step.unwatched_parameter_bytes
        assert set(models) <= set(step.by_fqn)
        n_optimizers = 1 if which == "towers" else 2
        assert [span.phase for span in step.phases].count("optimizer") >= n_optimizers - (which == "one")
        assert bytes_of(step, "parameter", "") == 0


def test_a_step_of_several_optimizers_ends_when_all_have_stepped() -> None:
    a, b, c = (torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1) for _ in range(3))
    turns = Turns([a, b])
    assert [turns.ends_step(one) for one in (a, b, a, a, a, b, b, a)] == [
        False, True, False, False, False, True, False, True,
    ]  # fmt: skip
    same = torch.optim.SGD(a.param_groups[0]["params"], 0.1)
    assert Turns([same, a]).ends_step(a), "a leftover over the same parameters"
    leftover = Turns([a, c])
    assert [leftover.ends_step(a) for _ in range(9)].index(True) == 6, "a critic takes five"
    assert leftover.ends_step(a)
    assert leftover.ends_step(c) is False and leftover.ends_step(a), "it is awaited again from its next step on"
    assert not leftover.ends_step(a) and leftover.ends_step(c)
    pair = Turns([a, b])
    assert [pair.ends_step(one) for one in (a, b) * 9] == [False, True] * 9, "turns are counted step by step"


def test_names_and_things_that_are_no_models_are_refused() -> None:
    for models in ({}, {"a.b": nn.Linear(1, 1)}, {"a": 3}, [nn.Linear(1, 1)], 3):
        with pytest.raises(BadInput):
            explorer.apply_policy(models, explorer.Policy())  # type: ignore[arg-type]
