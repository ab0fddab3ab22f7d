"""The integer program: its variables are policies, its bytes those of the forecast, and its answer is proven."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from explorer.errors import NotOnThisDevice
from explorer.plan.planners import solver
from explorer.plan.planners.planner import Planner
from explorer.plan.planners.program import Limits, Solution, _Search
from explorer.plan.planners.solver import Classes, Question, classes_of, minimised
from explorer.plan.planners.variables import Values, Variables
from explorer.plan.predict.forecaster import Forecaster
from tests.plan.planners.samples import (
    DEEP,
    KEEPING,
    PARTS,
    UNEQUAL,
    WIDE,
    Among,
    encoder,
    graph_and_run,
    planner,
    planner_of,
    point,
    policies,
)


@pytest.mark.parametrize(
    "among", [DEEP, WIDE, [*WIDE, "blocks.0"], KEEPING], ids=["deep", "segments", "segments and a block", "keeping"]
)
def test_the_rows_of_places_let_through_policies_and_nothing_else(among: Among) -> None:
    planner = planner_of(among)
    variables = planner._program.variables
    every = {tuple(point(variables, chosen, planner.candidates.around).tolist()) for chosen in policies(planner)}
    assert len(variables.of_choice) <= 16
    points = np.array(list(itertools.product((0.0, 1.0), repeat=len(variables.of_choice))))
    for path in variables.paths:
        most = 1.0 if path.holder is None else points[:, path.holder]
        points = points[points[:, list(path.variables)].sum(axis=1) <= most]
    assert {(*taken, 0.0) for taken in points.tolist()} == every and len(every) > 10


@pytest.mark.parametrize(
    ("sample", "among"),
    [("gpt", DEEP), ("gpt", WIDE), ("gpt", KEEPING), ("unet", UNEQUAL), ("encoder", PARTS)],
    ids=["deep", "wide", "keeping", "unequal", "parts"],
)
def test_the_rows_hold_under_every_policy_what_the_forecast_simulates(sample: str, among: Among) -> None:
    """Tick by tick, rerun by rerun, and as a step written out event by event."""
    graph, run = encoder(own_outputs=True) if sample == "encoder" else graph_and_run(sample)
    planner, forecaster, n_nested = Planner(run, graph, among=among), Forecaster(run, graph), 0
    program, around = planner._program, planner.candidates.around
    for chosen in policies(planner):
        peak, x = program.peak(chosen), point(program.variables, chosen, around)
        assert not program.over(x, peak)
        (_, row_of), *_ = program.over(x, peak - 2)
        row, most = row_of()
        assert sum(n * x[column] for column, n in row.items()) - most == pytest.approx(peak, abs=1)
        assert all(sum(n * x[i] for i, n in row.items()) <= most for row, most in program.variables.bound_rows())
        assert float(program.variables.costs @ x) == pytest.approx(planner.candidates.cost(chosen))
        policy = planner.candidates.policy(chosen)
        line, step = forecaster.line(policy), forecaster.step(policy)
        assert line is not None and step is not None and step.held_peak_bytes == peak
        between = program.timeline.line(program.line, program.variables.factors(x))
        linear = between.copy()
        is_less = np.zeros(len(line), dtype=bool)
        for rerun in (rerun for rerun in program.reruns if rerun.unit in chosen):
            held = between[rerun.tick] + max(excess for excess, _ in program._worst_moments(rerun, x))
            linear[rerun.tick] = max(linear[rerun.tick], held)
            n_nested += any(rerun.unit in around[i] for i in chosen)
            is_less[rerun.tick] |= meets_another(planner, rerun.unit, chosen)
        assert np.array_equal(linear[~is_less], line[~is_less]), policy
        assert (linear <= line).all(), "a bound that is too high would exclude policies"
    assert n_nested or among is KEEPING


def meets_another(planner: Planner, unit: int, chosen: tuple[int, ...]) -> bool:
    """True if the rows of a rerun may hold less than the rerun.

    It stops in a unit inside, begins with that of a unit around, or frees later than forward what a unit inside saves.
    """
    units, around, replay = planner.candidates.units, planner.candidates.around, planner._replay
    (call,) = units[unit].calls
    last = replay.between(call.first, call.rerun_ends)[-1]
    inside = [inner for i in chosen if unit in around[i] for inner in units[i].calls]
    begin = [outer.backward_begins for i in around[unit] if i in chosen for outer in units[i].calls]
    return call.backward_begins in begin or any(
        one.outputs or last in (*one.entries, *one.saved_outputs) for one in inside
    )


def test_units_taken_greedily_in_any_order_are_a_policy() -> None:
    planner = planner_of(DEEP)
    every = set(policies(planner))
    for order in itertools.permutations(range(len(DEEP))):
        assert tuple(sorted(planner._program.variables.legal(order))) in every, order


def gpt12() -> tuple[Planner, Variables]:
    return planner("gpt12"), planner("gpt12")._program.variables


def costs_and_moments() -> Values:
    """Costs, and the bytes of the three moments that hold most with everything kept."""
    chosen, variables = gpt12()
    over = chosen._program.over(np.zeros(variables.n_variables), 0.9 * chosen.keep_all_bytes)
    rows = np.zeros((4, variables.n_variables))
    rows[0] = variables.costs
    for row, (_, row_of) in zip(rows[1:], over):
        for variable, n_bytes in row_of()[0].items():
            row[variable] = n_bytes
    return rows


def counted(classes: Classes, x: Values) -> Values:
    return np.bincount(classes.labels, x, len(classes.sizes)).astype(np.float64)


@pytest.mark.parametrize("seed", [1, 4, 7])
def test_the_numbers_of_every_policy_keep_the_rows_and_make_a_policy_that_costs_and_holds_the_same(seed: int) -> None:
    chosen, variables = gpt12()
    says = costs_and_moments()
    classes = classes_of(variables, says)
    order = random.Random(seed).sample(range(variables.n_units), variables.n_units)
    x = point(variables, tuple(variables.legal(order)[: seed + 1]), chosen.candidates.around)
    numbers = counted(classes, x)
    for row, most in classes.rows:
        assert sum(n * numbers[label] for label, n in row.items()) <= most + 1e-9
    other = classes.assigned(numbers, says.sum(axis=0))
    is_assigned = np.array_equal(counted(classes, other), numbers)
    if is_assigned:
        assert variables.legal(variables.chosen(other)) == list(variables.chosen(other))
        assert says @ other == pytest.approx(says @ x)
    assert is_assigned or any(len(chosen.candidates.units[i].unit.blocks) > 1 for i in variables.chosen(x))


def test_equal_blocks_are_counted_and_the_first_of_them_are_taken() -> None:
    chosen, variables = gpt12()
    classes = classes_of(variables, np.zeros((1, variables.n_variables)))
    blocks = [
        i for i, one in enumerate(chosen.candidates.units) if one.unit.blocks[0] in graph_and_run("gpt12")[0].repeats
    ]
    units = [one.unit for one in chosen.candidates.units]
    whole = [i for i in blocks if len(units[i].blocks) == 1 and units[i].action == "recompute"]
    assert len(whole) == 12 and len({classes.labels[i] for i in whole}) == 1
    numbers = np.zeros(len(classes.sizes))
    numbers[classes.labels[whole[0]]] = 4
    x = classes.assigned(numbers, np.zeros(variables.n_variables))
    assert variables.chosen(x) == tuple(whole[:4])


def test_segments_that_would_have_to_overlap_are_not_given() -> None:
    chosen, variables = gpt12()
    classes = classes_of(variables, np.zeros((1, variables.n_variables)))
    lengths = {i: len(one.unit.blocks) for i, one in enumerate(chosen.candidates.units)}
    triple = next(i for i, n in lengths.items() if n == 3)
    numbers = np.zeros(len(classes.sizes))
    numbers[classes.labels[triple]] = 5
    assert 0 < counted(classes, classes.assigned(numbers, np.zeros(variables.n_variables)))[classes.labels[triple]] < 5


ROOT = Path(__file__).resolve().parents[3]


def threads_now() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def question(*rows: tuple[dict[int, float], float]) -> Question:
    return Question(rows=rows, for_peak=False, most_cost=None, seconds=10.0)


def test_rows_that_contradict_each_other_have_no_answer() -> None:
    variables = planner_of(WIDE)._program.variables
    assert minimised(variables, question(({0: 1.0}, 0.0), ({0: -1.0}, -1.0))) is None


@pytest.mark.parametrize(("whole", "proven"), [(True, 3.0), (False, 4.0)])
def test_the_bound_of_integers_is_what_the_solver_proved(
    monkeypatch: pytest.MonkeyPatch, *, whole: bool, proven: float
) -> None:
    """The best choice that HiGHS knows costs 4. It may stop before it has proved this."""
    variables = planner_of(WIDE)._program.variables
    info = SimpleNamespace(primal_solution_status=2, mip_dual_bound=3.0, objective_function_value=4.0)
    solution = SimpleNamespace(col_value=np.zeros(variables.n_variables), row_value=[])
    stopped = SimpleNamespace(
        getInfo=lambda: info, getSolution=lambda: solution, getModelStatus=int, modelStatusToString=lambda _: "Optimal"
    )
    monkeypatch.setattr(solver, "_solved", lambda *_, **__: stopped)
    answer = minimised(variables, msgspec.structs.replace(question(), whole=whole, single_units=True))
    assert answer is not None and answer.bound == pytest.approx(proven / solver.SCALE * variables.unit_cost)


def test_without_the_solver_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = planner_of(WIDE)._program.variables
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(NotOnThisDevice, match="Planning needs highspy"):
        minimised(variables, question())


def test_a_solve_prints_nothing_and_starts_no_thread(capfd: pytest.CaptureFixture[str]) -> None:
    variables, before = planner_of(WIDE)._program.variables, threads_now()
    assert minimised(variables, question((dict.fromkeys(range(len(variables.of_choice)), -1.0), -1.0))) is not None
    assert capfd.readouterr().out == "" and threads_now() <= before


def test_a_solver_of_other_code_with_threads_does_not_stand_in_the_way() -> None:
    """HiGHS 1.15 refuses a call whose number of threads differs from that of the first call of the process."""
    program = """
from highspy import Highs
first = Highs()
for option, value in (("output_flag", False), ("threads", 2)):
    first.setOptionValue(option, value)
first.run()
from explorer.plan.planners.planner import Planner
from explorer.plan.planners.program import Limits, Solution, _Search
from explorer.plan.planners.solver import Question, minimised
from explorer.record import RunSpec
from tests import graphs
graph = graphs.gpt(2)
variables = Planner(graphs.measured(graph, RunSpec(model=graph.model)), graph)._program.variables
assert minimised(variables, Question(rows=(), for_peak=False, most_cost=None, seconds=10.0)) is not None
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("value", "bound", "gap"), [(200.0, 190.0, 0.05), (200.0, 0.0, 1.0), (200.0, 210.0, 0.0), (0.0, 0.0, 0.0)]
)
def test_the_gap_is_the_share_of_the_value_that_is_not_proven(value: float, bound: float, gap: float) -> None:
    solution = Solution(chosen=(), value=value, bound=bound, n_rows=0, n_solves=0)
    assert solution.gap == pytest.approx(gap, abs=1e-12)


@pytest.mark.parametrize(
    ("limits", "value", "bound", "done"),
    [
        (Limits(budget_bytes=1), 10_000.0, 9_990.0, True),  # a gap of 0.1 %
        (Limits(budget_bytes=1), 10_000.0, 9_989.0, False),
        (Limits(budget_bytes=1), 10.0, 8.1, False),  # a cost has no unit of which one could be left
        (Limits(), 10_000.0, 9_990.0, True),
        (Limits(), 10_000.0, 9_989.0, False),
        (Limits(), 10.0, 8.1, True),  # below two bytes
        (Limits(), 10.0, 8.0, False),
        (Limits(rival=1_000.0), 2_000.0, 999.0, True),  # nothing better than the rival can be found
        (Limits(rival=1_000.0), 2_000.0, 998.9, False),
    ],
)
def test_a_search_is_done_within_a_thousandth_or_two_bytes(
    limits: Limits, value: float, bound: float, *, done: bool
) -> None:
    program = planner_of(DEEP)._program
    search = _Search(program=program, limits=limits, ends=0.0, best=(), value=value, bound=bound)
    assert search.done is done
    without = _Search(program=program, limits=limits, ends=0.0, bound=bound)
    assert without.done is (bound >= limits.rival * 0.999), "without a choice only the rival ends it"
