"""OLMo-core: modules by name. The names are patterns, so each is written whole."""

from __future__ import annotations

import json

from explorer.plan.export.outcome import Target
from explorer.record.policy_file import Export, PolicyFile

OLMO_CORE = Target(
    name="olmo-core",
    written_for="OLMo-core of 2026-06 (fa6c501)",
    options=("determinism_check",),
    fixed=(("preserve_rng_state", False),),
    nested=False,
)


def to_olmo_core(file: PolicyFile) -> Export:
    blocks = OLMO_CORE.recomputed(file.policy)
    if not blocks:
        return OLMO_CORE.exported(file.policy, "# No ac_config: every block keeps what it saves.\n")
    names = "".join(f"            {json.dumps(fqn)},\n" for fqn in blocks)
    return OLMO_CORE.exported(
        file.policy, _TEXT.replace("@NAMES@", names), note="Blocks with experts are refused there."
    )


_TEXT = """\
from olmo_core.train.train_module import (
    TransformerActivationCheckpointingConfig,
    TransformerActivationCheckpointingMode,
)

train_module_config = dict(
    ac_config=TransformerActivationCheckpointingConfig(
        mode=TransformerActivationCheckpointingMode.selected_modules,
        modules=[
@NAMES@        ],
    ),
)
"""
