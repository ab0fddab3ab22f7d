"""The planner: the cheapest policy whose peak stays below a budget, or the lowest peak within a step time.

planner = Planner(run, graph)         # any measured step that fits
planner.within(budget_bytes)          # -> Plan
planner.least_memory(0.10)            # -> Plan: at most ten percent more time
planner.front()                       # -> Plans between everything kept and the floor
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace as evolve
from functools import cached_property

import numpy as np
from msgspec.structs import replace

from explorer.errors import BadInput
from explorer.plan.memory.ledger import array_of, held
from explorer.plan.planners.candidates import (
    MOST_STRETCHES,
    Candidates,
    Named,
    beside_every_stretch,
    candidates_of,
    default_units,
    preset_units,
    unit_of,
    units_near,
)
from explorer.plan.planners.certificate import certificate_of, not_both, recompute_in_interval, refusal
from explorer.plan.planners.chain import ChainProgram, chain_program, is_chain_of_few
from explorer.plan.planners.linear_memory import linear_reruns, linear_timeline
from explorer.plan.planners.nested_chain import NestedChain, nested_chain
from explorer.plan.planners.program import LEAST_SECONDS, ForecastChoices, Limits, Program, Solution
from explorer.plan.planners.solver import TOLERANCE
from explorer.plan.planners.variables import Variables
from explorer.plan.policy.counted import offloading
from explorer.plan.predict.calls import stash_bytes
from explorer.plan.predict.changes import units_around
from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.predict.not_predicted import no_baseline, not_covered
from explorer.plan.predict.replay import graph_under
from explorer.record.allocations import FIXED_ROLES, ROLES
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.plan import Certificate, Plan, Wish
from explorer.record.policy import KEEP_ALL, Policy, Unit

FRONT_SECONDS = 2.5
"""Seconds for all points of the front together. Most points take much less: a person waits for them."""
MOST_WITH_EVERY_STRETCH = 150
"""Candidates that the integer program solves within a second: of a chain with more it gets few stretches."""


class Planner:
    """An integer program made from one measured step; for a chain, of every stretch of its blocks."""

    def __init__(
        self,
        run: Measurement,
        graph: ModelGraph,
        *,
        among: Iterable[Named] | None = None,
        seconds: float = 3.0,
        nested: bool = True,
    ) -> None:
        """`among`: the blocks, segments and units to choose from, by default all that `default_units` has.

        `nested`: segments inside segments of a chain are tried too, unless `among` names the choices.

        Raises BadInput for a run without a complete timeline.
        """
        graph = graph_under(run, graph) or graph
        self._forecaster = Forecaster(run, graph)
        baseline = self._forecaster.baseline
        replay = self._forecaster.replay
        if baseline is None or replay is None:
            hint = "Measure again, with --policy keep-all or, where that does not fit, with --policy all."
            raise BadInput(
                no_baseline(run) or "A plan is made from a complete step with its timeline, and this run is none.",
                hint="" if run.ran_compiled else hint,
            )
        self._seconds = seconds
        self._baseline, self._graph, self._replay = baseline, graph, replay
        self._among = None if among is None else [unit_of(named) for named in among]
        self._host_bandwidth = 0.0
        self._without: frozenset[Unit] = frozenset()
        self._looks_inside = nested and among is None
        self._make_programs()

    def _make_programs(self) -> None:
        """Makes the programs, each of which chooses among its candidates; the last one has all kinds of them.

        A chain has a quick program of every stretch. If its bytes are constant, no other program is needed.
        """
        self._floor: Plan | None = None
        self._looks_inside = self._looks_inside and not self._without
        stretches, units = None, self._among
        if units is None and is_chain_of_few(self._graph):
            stretches = self._of_chain(self._default_units(every_stretch=True))
        if stretches is not None and stretches.is_exact:
            self._programs: tuple[Program | ChainProgram, ...] = (stretches,)
        else:
            few = stretches is not None and len(stretches.candidates.units) <= MOST_WITH_EVERY_STRETCH
            main = self._of_any(self._default_units(every_stretch=few) if units is None else units)
            if units is None and stretches is None:
                offered = [candidate.unit for candidate in main.candidates.units]
                more = beside_every_stretch(self._graph, offered)
                stretches = None if set(more) <= set(offered) else self._of_chain(more)
            self._programs = (main,) if stretches is None else (stretches, main)
        self._program = self._programs[-1]
        self.candidates = self._program.candidates
        for program in self._programs:
            program.suggested = self._presets(program)

    def without(self, units: Iterable[Unit]) -> Planner:
        """A planner of the same step that excludes `units` too."""
        other = copy.copy(self)
        other._without = self._without.union(units)
        other._make_programs()
        return other

    def with_offload(self, host_bandwidth: float) -> Planner:
        """A planner that may offload blocks too. `host_bandwidth`: bytes a second between device and host.

        Raises BadInput for a run that does not show what autograd saves.
        """
        other, units = copy.copy(self), offloading(self._graph)
        if sentence := not_covered(Policy(units=tuple(units)), self._baseline):
            raise BadInput(sentence, hint="Leave offload out, or name another step.")
        other._host_bandwidth, other._looks_inside = host_bandwidth, False
        other._among = [*(self._among or self._default_units(every_stretch=False)), *units]
        other._make_programs()
        return other

    def _default_units(self, *, every_stretch: bool) -> list[Unit]:
        return default_units(self._baseline, self._graph, self._replay, every_stretch=every_stretch)

    def _of_chain(self, units: Sequence[Unit]) -> ChainProgram | None:
        """The program that chooses among `units`; None if the model is no chain of few choices."""
        return chain_program(self._forecaster, self._graph, self._candidates(units))

    def _of_any(self, units: Sequence[Unit]) -> Program:
        candidates, replay = self._candidates(units), self._replay
        stash = stash_bytes(self._baseline, KEEP_ALL)
        timeline = linear_timeline(replay, candidates, stash_bytes=stash)
        return Program(
            forecaster=self._forecaster,
            candidates=candidates,
            line=replay.line,
            timeline=timeline,
            reruns=linear_reruns(replay, candidates, stash_bytes=stash),
            variables=Variables(candidates, timeline),
        )

    def _candidates(self, units: Sequence[Unit]) -> Candidates:
        left = [unit for unit in units if unit not in self._without]
        return candidates_of(self._baseline, self._graph, self._replay, left, self._host_bandwidth)

    def suggest(self, policies: Iterable[Policy]) -> None:
        """No later plan is worse than one of `policies`. A policy with units that are no candidates is left out."""
        units = [policy.units for policy in policies]
        for program in self._programs:
            number = program.candidates.number
            offered = [map(number.__getitem__, whole) for whole in units if number.keys() >= set(whole)]
            program.suggested += tuple(tuple(sorted(whole)) for whole in offered)

    @property
    def keep_all_bytes(self) -> int:
        """The peak with everything kept, measured or derived from a run with recompute."""
        return int(self._program.line.max())

    @property
    def offered(self) -> tuple[Unit, ...]:
        """Every unit that a plan may recompute."""
        return tuple(dict.fromkeys(unit for program in self._programs for unit in program.candidates.number))

    def presets(self) -> Iterator[tuple[int, float]]:
        """Peak and cost of every preset. No plan is worse than a preset."""
        for chosen in self._program.suggested:
            yield self._program.peak(chosen), self.candidates.cost(chosen)

    def floor(self) -> Plan:
        """The cheapest plan with the lowest peak that is found in the planner's time."""
        if self._floor is None:
            self._floor = self._lowest(None)
        return self._floor

    @property
    def graph(self) -> ModelGraph:
        """The graph that the plans are for."""
        return self._graph

    def within(self, budget_bytes: int, *, seconds: float | None = None) -> Plan:
        """The cheapest plan whose peak is within the budget. Raises BadInput, with the lowest peak, if none is."""
        plan = self._cheapest(budget_bytes, seconds=seconds)
        if plan is None and self.floor().step_peak_bytes <= budget_bytes:  # time ran out before a plan was found
            floor = self.floor()
            unproven = replace(floor.certificate, bound=0.0, gap=1.0)
            plan = replace(floor, budget_bytes=budget_bytes, certificate=unproven)
        if plan is None:
            raise self._impossible(budget_bytes)
        return plan

    def least_memory(self, more_time: float) -> Plan:
        """The plan with the lowest peak whose step takes at most the share `more_time` longer."""
        if not math.isfinite(more_time) or more_time < 0:
            raise BadInput(f"A step cannot take {more_time:+.0%} of its time.", hint="Give zero or more, such as +10%.")
        return self._lowest(more_time)

    def front(self, n_points: int = 10, *, seconds: float = FRONT_SECONDS) -> Iterator[Plan]:
        """Plans from everything kept down to the least peak without segments inside segments, yielded when found.
        `seconds`: for all plans together but the floor. A plan leaves its unused time to later plans.
        """
        if self._looks_inside:
            flat = copy.copy(self)
            flat._looks_inside, flat._floor = False, None
            yield from flat.front(n_points, seconds=seconds)
            return
        ends = time.monotonic() + seconds - self._seconds / 2
        lowest = min(program.lowest_bytes() for program in self._programs)
        last = self.within(self.keep_all_bytes)
        yield last
        budgets = np.linspace(self.keep_all_bytes, lowest, n_points + 1)[1:-1].astype(int).tolist()
        for n_left, budget in zip(range(len(budgets), 0, -1), budgets):
            if budget < last.step_peak_bytes:
                plan = self._cheapest(budget, seconds=max(LEAST_SECONDS, (ends - time.monotonic()) / n_left))
                if plan is None:
                    break
                last = plan
                yield last
        floor = self._floor or self._lowest(None, seconds=self._seconds / 4)
        if floor.step_peak_bytes < last.step_peak_bytes:
            yield floor

    def _cheapest(self, budget_bytes: int, *, seconds: float | None = None) -> Plan | None:
        limits = Limits(budget_bytes=budget_bytes, seconds=seconds or self._seconds)
        return self._best(limits, lambda plan: plan.extra_cost)

    def fulfil(self, wish: Wish) -> Plan:
        """The plan for a budget of memory, of time or of both. Raises BadInput, with what can be reached."""
        # A scale of 0 says that recomputing took no time in the measured steps.
        most_time = None if wish.more_time is None else wish.more_time / max(wish.time_scale, 1e-3)
        if wish.budget_bytes is None:
            return self.least_memory(most_time or 0.0)
        plan = self.within(wish.budget_bytes)
        if most_time is None or plan.cost_ratio is None:
            return plan
        if plan.cost_ratio > (1 + most_time) * (1 + TOLERANCE):
            raise not_both(wish, plan, self.least_memory(most_time))
        return replace(plan, time_budget=most_time)

    def _lowest(self, more_time: float | None, *, seconds: float | None = None) -> Plan:
        """The lowest peak, then the cheapest plan with it: the first solution may recompute units that free nothing."""
        most_cost = None if more_time is None else more_time * self.candidates.step_cost
        limits = Limits(most_cost=most_cost, seconds=seconds or self._seconds)
        plan = self._best(limits, lambda plan: float(plan.step_peak_bytes))
        assert plan is not None, "everything kept is within the limits"
        cheap = self._cheapest(plan.step_peak_bytes)
        if cheap is not None and cheap.extra_cost <= plan.extra_cost:
            plan = replace(cheap, budget_bytes=None, certificate=plan.certificate)
        return replace(plan, time_budget=more_time)

    def _best(self, limits: Limits, value: Callable[[Plan], float]) -> Plan | None:
        """The plan of least `value`: of the programs, or with segments inside segments of a chain."""
        best = self._best_of_programs(limits, value)
        nested = self._with_nested_segments(limits)
        if nested is not None and (best is None or value(nested) < value(best) * (1 - TOLERANCE)):
            best = nested
        if best is None or best.certificate.n_levels > 2 or not self._looks_inside:
            return best
        return self._of_lengths_between(best, limits, value)

    def _of_lengths_between(self, best: Plan, limits: Limits, value: Callable[[Plan], float]) -> Plan:
        """`best`, or a better plan of segments near its own: a long chain's program leaves out most lengths.

        The segments near the better plan are tried in turn, until nothing changes.
        """
        first, before = self._programs[0], math.inf
        if not isinstance(first, ChainProgram) or first.n_stretches <= MOST_STRETCHES:
            return best
        bound = min(program.bound for program in self._programs)
        singles = [unit for unit in first.candidates.number if len(unit.blocks) == 1]
        while value(best) < before * (1 - TOLERANCE):
            before = value(best)
            program = self._of_chain([*singles, *units_near(self._graph, best.policy)])
            solution = None if program is None else program.solve(limits)
            if program is None or solution is None:
                break
            solution = evolve(solution, bound=min(solution.bound, bound))
            plan = self._plan(program, solution, budget_bytes=limits.budget_bytes)
            if value(plan) > before * (1 + TOLERANCE):
                break
            certificate = replace(plan.certificate, beside=certificate_of(first, evolve(solution, chosen=())).scope)
            best = replace(plan, certificate=certificate)
        return best

    @cached_property
    def _nested(self) -> NestedChain | None:
        return nested_chain(self._forecaster, self._graph, self.candidates)

    def _with_nested_segments(self, limits: Limits) -> Plan | None:
        """The best plan found with segments inside segments; nothing is proven of it. None without a chain."""
        judged = self._nested.solve(limits) if self._looks_inside and self._nested is not None else None
        if judged is None:
            return None
        value = float(judged.peak_bytes) if limits.budget_bytes is None else judged.cost
        nothing = Solution(chosen=(), value=value, bound=0.0, n_rows=0, n_solves=0)
        depth = max((1 + len(around) for around in units_around(judged.policy).values()), default=0)
        flat = certificate_of(self._programs[0], nothing)
        certificate = replace(flat, n_levels=max(depth, 2), inside_segments=True)
        return self._priced(judged.policy, judged.cost, certificate, limits.budget_bytes)

    def _best_of_programs(self, limits: Limits, value: Callable[[Plan], float]) -> Plan | None:
        """The plan of least `value` of both programs, with a certificate about the choices of both."""
        plans: list[Plan] = []
        for program in self._programs:
            solution = program.solve(evolve(limits, rival=min(map(value, plans), default=math.inf)))
            if solution is None and limits.budget_bytes is None:
                solution = program.without_solver(limits.most_cost)
            if solution is not None:
                plans.append(self._plan(program, solution, budget_bytes=limits.budget_bytes))
        best = min(plans, key=lambda plan: (value(plan), plan.extra_cost), default=None)
        if best is None or len(self._programs) == 1:
            return best
        solved = [plan.certificate for plan in plans]
        bounds = [certificate.bound for certificate in solved]
        if len(plans) < len(self._programs):
            bounds = [program.bound for program in self._programs]
        solution = Solution(
            chosen=(),
            value=value(best),
            bound=min(*bounds, value(best)),
            n_rows=sum(certificate.n_rows for certificate in solved),
            n_solves=sum(certificate.n_solves for certificate in solved),
        )
        certificate = replace(
            certificate_of(self._program, solution),
            n_levels=best.certificate.n_levels,
            beside=certificate_of(self._programs[0], solution).scope,
        )
        return replace(best, certificate=certificate)

    def _presets(self, program: ForecastChoices) -> tuple[tuple[int, ...], ...]:
        """Numbers of the candidates in each preset. A unit that is no candidate frees nothing, or a hazard forbids it.

        A preset that keeps results is left out if no candidate keeps results: their operators have no measured price.
        """
        number = program.candidates.number
        priced = {unit.action for unit in number}
        wholes = (whole for whole in preset_units(self._graph) if priced.issuperset(unit.action for unit in whole))
        return tuple(tuple(sorted(number[unit] for unit in whole if unit in number)) for whole in wholes)

    def _plan(self, program: ForecastChoices, solution: Solution, *, budget_bytes: int | None) -> Plan:
        candidates = program.candidates
        policy, cost = candidates.policy(solution.chosen), candidates.cost(solution.chosen)
        return self._priced(policy, cost, certificate_of(program, solution), budget_bytes)

    def _priced(self, policy: Policy, cost: float, certificate: Certificate, budget_bytes: int | None) -> Plan:
        forecast = self._forecaster.forecast(policy)
        assert forecast.step_peak_bytes is not None
        if forecast.moved_bytes is not None and self.candidates.cost_unit == "FLOPs":
            cost = self.candidates.step_cost * ((forecast.flop_ratio or 1.0) - 1.0)  # copies take no FLOPs
        return Plan(
            policy=policy,
            budget_bytes=budget_bytes,
            step_peak_bytes=forecast.step_peak_bytes,
            baseline_step_peak_bytes=self.keep_all_bytes,
            extra_cost=cost,
            step_cost=self.candidates.step_cost,
            cost_unit=self.candidates.cost_unit,
            cost_ratio_spread=forecast.time_ratio_spread,
            flop_ratio=forecast.flop_ratio,
            certificate=certificate,
            host_peak_bytes=forecast.host_peak_bytes,
            moved_bytes=forecast.moved_bytes,
            host_bandwidth=self._host_bandwidth,
            recompute_in_interval=recompute_in_interval(self.candidates, policy),
        )

    def _impossible(self, budget_bytes: int) -> BadInput:
        floor = self.floor()
        return refusal(budget_bytes, floor, self.fixed_bytes, self._forecaster.at_peak(floor.policy))

    @property
    def fixed_bytes(self) -> int:
        """Peak bytes of the roles that no recompute can free."""
        log = self._baseline.allocations
        assert log is not None
        fixed = np.isin(array_of(log.role), [ROLES.index(role) for role in FIXED_ROLES])
        return int(held(log, fixed).max())
