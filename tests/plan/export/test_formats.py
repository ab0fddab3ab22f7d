"""Every form answers every policy, by its name; an unknown one is named."""

from __future__ import annotations

import pytest

from explorer.errors import InvalidPolicy
from explorer.plan.export.formats import FORMATS, exported
from explorer.record.policy import Policy, Unit
from explorer.record.policy_file import PolicyFile
from tests.plan.export.runs import PLAN


def test_an_unknown_target_is_named() -> None:
    with pytest.raises(InvalidPolicy, match="no exporter torhc. Did you mean torch"):
        exported(PolicyFile(policy=Policy()), "torhc")
    assert "torch" in FORMATS


def test_every_form_answers_every_policy() -> None:
    policies = (
        Policy(),
        Policy.recompute(["layers.0", "layers.3"]),
        Policy.recompute([("layers.0", "layers.1"), "layers.3.mlp"], preserve_rng_state=False, restore_rng=("python",)),
        Policy(
            units=(
                Unit(blocks=("layers.1",), action="offload"),
                Unit(blocks=("layers.2",), action="save_ops", save_ops=("aten.mm.default",)),
            )
        ),
    )  # fmt: skip
    for policy in policies:
        for name in FORMATS:
            form = exported(PolicyFile(policy=policy, pipeline=PLAN), name)
            assert form.target == name and form.written_for
            assert bool(form.text) is (form.fit != "not expressible")
            assert bool(form.reasons) is (form.fit != "exact"), name
            if form.recomputed is not None and form.fit == "exact":
                assert form.recomputed == policy.blocks and not form.extra and not form.missing
            if form.recomputed is not None and form.fit == "approximated":
                assert form.as_run is not None and form.as_run.blocks == form.recomputed
                assert set(form.recomputed) == (set(policy.blocks) | set(form.extra)) - set(form.missing)
