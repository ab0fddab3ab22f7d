"""torch's own program: without its packages it says which; what its estimators raise is a sentence, not an end."""

from __future__ import annotations

import sys

import pytest

from explorer.engine.arena import sac_milp
from explorer.engine.arena.fight import fight
from explorer.engine.step import prepare
from explorer.errors import BadInput
from explorer.record import RunSpec
from explorer.record.arena import Bout, Ground
from explorer.record.progress import silent
from tests.engine.tiny_nets import ref

MIB = 1024**2
SPEC = RunSpec(model=ref("chain"), n_repeats=1)
GROUND = Ground(peak_bytes=MIB, saved_bytes=MIB // 2, is_measured=True)
BOUT = Bout(rival="sac-milp", share=0.5, budget_bytes=MIB)


@pytest.mark.parametrize("missing", ["pwlf", "torch.distributed._tools.sac_ilp"])
def test_without_its_packages_it_says_which(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    bout = fight(SPEC, BOUT, GROUND, silent)
    assert not bout.ran and bout.failure is None and "pip install pulp pwlf" in bout.why


def test_what_its_estimators_raise_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(trainee: object) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(sac_milp, "_program", lambda: None)
    monkeypatch.setattr(sac_milp, "_estimated", fails)
    with pytest.raises(BadInput, match="Its estimators raised .*no such operator"):
        sac_milp.contestant(prepare(SPEC), BOUT, GROUND)
