"""The pytest plugin: the fixture `guard`, which makes a guard.GuardedStep.

pytest loads this file at the start of each run of a project that has the package installed, used or not. It therefore
stands apart from guard.py, whose imports take time and need the extra `loop`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def guard() -> Callable[..., object]:
    """`guard(model, policy="keep-all", **conditions)`: a training step to make assertions on."""
    from explorer.own_loop.guard import GuardedStep

    return GuardedStep
