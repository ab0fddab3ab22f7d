"""Assertions on a training step for a project's tests: its peak, its recomputes, its gradient, its lock.

    def test_step(guard):                                # the fixture of pytest_plugin.py
        step = guard("models.py:gpt", policy="policy.yaml")
        step.peak_below("2 GiB")
        step.recomputes("layers.*")
        step.same_gradient("keep-all")
        step.same_as_lock("explorer.lock")

Peak, recomputes and lock are predicted without data, so the figures are equal on every run. `same_gradient` runs real
steps.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from explorer.engine.bench.measure import measure_without_data
from explorer.engine.compare.compare import compare
from explorer.engine.device.without_data import without_data
from explorer.engine.model.describe import describe
from explorer.errors import BadInput, nearest
from explorer.own_loop.judge import Judged
from explorer.plan.catalogue import default_size, sizes_of
from explorer.plan.guard.lock import load, lock_of, runs_again
from explorer.plan.guard.moves import moves, versions
from explorer.plan.names import listed
from explorer.plan.policy.block_names import matching
from explorer.plan.policy.read_policy import named
from explorer.plan.sizes import distinct_texts, mib, parse_bytes
from explorer.record.comparison import Verdict
from explorer.record.files import Lock
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.run import RunSpec


class GuardedStep:
    """One training step of a model. Each method returns nothing, or raises AssertionError in words."""

    def __init__(self, model: str, policy: str = "keep-all", *, size: str | None = None, **conditions: Any) -> None:
        """`model` and `policy` are those of the command line; `set` holds arguments of the factory.

        Other conditions are fields of RunSpec, such as dtype="bfloat16". Raises BadInput for an unknown condition.
        """
        arguments = conditions.pop("set", {})
        if unknown := sorted(set(conditions) - set(RunSpec.__struct_fields__)):
            raise BadInput(
                f"guard takes no condition {', '.join(unknown)}.", hint=nearest(unknown[0], RunSpec.__struct_fields__)
            )
        size = size or default_size(sizes_of(model))
        self._spec = RunSpec(model=ModelRef(target=model, size=size, arguments=arguments), **conditions)
        self._policy = policy

    def peak_below(self, limit: str | int) -> None:
        """The predicted peak is below `limit`: bytes, or `2 GiB`."""
        most = parse_bytes(limit) if isinstance(limit, str) else limit
        peak = self._lock.step.peak_bytes
        if peak >= most:
            text, limit_text = distinct_texts(peak, most)
            largest = sorted(self._lock.step.at_peak.items(), key=lambda entry: -entry[1])[:3]
            parts = ", ".join(f"{role} {mib(size)}" for role, size in largest)
            where = f"In {self._lock.step.peak_phase} it holds {parts}."
            raise AssertionError(f"The predicted peak is {text}, not below {limit_text}. {where}")

    def recomputes(self, pattern: str) -> None:
        """Every block that matches `pattern`, such as `layers.*`, runs again.

        Raises InvalidPolicy if no block matches.
        """
        called = [fqn for fqn, block in self._lock.blocks.items() if block.n_forward]
        chosen = matching(pattern, called)
        if lost := [fqn for fqn in chosen if not runs_again(self._lock, fqn)]:
            raise AssertionError(f"Not recomputed: {listed(lost, 8)} ({len(lost)} of {len(chosen)} blocks).")

    def same_gradient(self, reference: str = "keep-all", *, at_most: Verdict = "bitwise equal") -> None:
        """The step has the gradients of the same step under the policy `reference`. Real steps run.

        Raises BadInput for a step on ranks.
        """
        if self._spec.ranks is not None:
            raise BadInput("same_gradient runs steps of one process.", hint="Use `compare --ranks` for a sharded step.")
        graph = _described(self._spec)
        policies = (named(name, graph).file.policy for name in (reference, self._policy))
        Judged(compare(*(replace(self._spec, policy=policy, n_repeats=0) for policy in policies))).require(at_most)

    def same_as_lock(self, path: str | Path) -> None:
        """Nothing moved since the lock file was written."""
        old = load(Path(path))
        changes = moves(old, self._lock)
        if changes:
            sentences = [*(move.sentence for move in changes), versions(old, self._lock)]
            raise AssertionError("\n".join(filter(None, sentences)))

    @cached_property
    def _lock(self) -> Lock:
        return predicted_lock(self._spec, self._policy)


def predicted_lock(spec: RunSpec, policy: str) -> Lock:
    """The lock of a step under a policy by name. Raises InvalidPolicy, UnreadableFile, ModelNotLoaded, ModelFailed."""
    graph = _described(spec)
    spec = replace(spec, policy=named(policy, graph).file.policy)
    if spec.ranks is None:
        return lock_of(measure_without_data(spec), graph, policy)
    from explorer.engine.ranks.predict import predict_ranks  # torch.distributed takes a while to import

    return lock_of(predict_ranks(spec).fullest, graph, policy)


def _described(spec: RunSpec) -> ModelGraph:
    with without_data():
        return describe(spec.model, seed=spec.seed, conditions=spec.conditions)
