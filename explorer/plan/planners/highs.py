"""The program in numbers: columns, rows that hold whatever is asked, and the call to HiGHS (scipy.optimize.milp).

columns    the candidates, what hangs on several of them (pieces.py), what early stop spares where a unit ends in
           another, how many of each kind are taken, and the peak
rows       bonds of the second sort; no block in two units; no third level inside a second

How many of a kind are taken is a whole number as well: of hundreds of equal blocks the solver then settles how many
before it asks which.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from explorer.errors import NotOnThisDevice, message_of
from explorer.plan.planners.candidates import Candidates
from explorer.plan.planners.pieces import Bond, Pieces

Row = tuple[dict[int, float], float]
"""Coefficients by column, and what their sum may be at most."""
Whole = Literal["relaxed", "counts", "candidates"]
"""What is whole: nothing, how many of each kind, or each candidate."""
DEPTH = 2
TOLERANCE = 5e-3
"""An answer is good enough that is proven to lie within this share of the best."""
SCALE = 1000.0
"""Costs are thousandths of the step's: the solver's tolerances are absolute."""
LEAST_KIN = 4
N_FIRST = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the solver is asked."""

    rows: Sequence[Row]
    for_peak: bool
    """The lowest peak, else the lowest cost."""
    most_cost: float | None
    whole: Whole
    seconds: float
    bound: float = 0.0
    """What is known already: no answer is below that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Minimum:
    """What the solver found, and the bound it proved."""

    x: NDArray[np.float64]
    peak_bytes: float
    bound: float
    """Cost, or bytes of the peak."""


class Shape:
    """Columns and rows that do not depend on the question."""

    def __init__(self, candidates: Candidates, pieces: Pieces) -> None:
        self._candidates = candidates
        self.n_units = len(candidates.units)
        self._aux = pieces.n_columns
        self._bonds = pieces.bonds
        self._stops = [(j, i) for j, inside in enumerate(candidates.stops_in) for i in inside]
        self._first_stop = self._aux
        kinds: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for i, one in enumerate(candidates.units):
            kinds[one.kin].append(i)
        for column, (j, i) in enumerate(self._stops, start=self._first_stop):
            kinds[(*candidates.units[j].kin, "", *candidates.units[i].kin)].append(column)
        self._kinds = [members for members in kinds.values() if len(members) >= LEAST_KIN]
        self._first_kind = self._first_stop + len(self._stops)
        self.peak_column = self._first_kind + len(self._kinds)
        self.n_columns = self.peak_column + 1
        self.unit_cost = candidates.step_cost or 1.0
        self.costs = np.zeros(self.n_columns)
        self.costs[: self.n_units] = [one.cost for one in candidates.units]
        self.costs[self._first_stop : self._first_kind] = [-candidates.units[i].cost for _, i in self._stops]

    def chosen(self, x: NDArray[np.float64]) -> tuple[int, ...]:
        """The candidates that `x` recomputes."""
        return tuple(np.flatnonzero(x[: self.n_units] > 0.5).tolist())

    def cost(self, chosen: tuple[int, ...]) -> float:
        """The cost of recomputing these, in the candidates' unit."""
        named = set(chosen)
        spared = sum(self._candidates.units[i].cost for j, i in self._stops if {i, j} <= named)
        return sum(self._candidates.units[i].cost for i in chosen) - spared

    def legal(self, order: Sequence[int]) -> list[int]:
        """As many of `order`, first ones first, as keep the rows that every policy keeps."""
        units, around = self._candidates.units, self._candidates.around
        taken: list[int] = []
        named: set[str] = set()
        depth: Counter[int] = Counter()
        above: set[int] = set()
        for i in order:
            blocks = units[i].unit.blocks
            holders = [j for j in around[i] if j in taken]
            if not named.isdisjoint(blocks) or len(holders) >= DEPTH or (holders and i in above):
                continue
            if i in above and any(depth[j] >= 1 for j in taken if i in around[j]):
                continue
            taken.append(i)
            named.update(blocks)
            above.update(around[i])
            depth[i] = len(holders)
        return taken

    def first_of_kinds(self) -> list[tuple[int, ...]]:
        """Of each kind of candidate the first ones, which backward reaches last, in at most N_FIRST numbers."""
        choices = []
        for kind in self._kinds:
            if kind[-1] < self.n_units:
                members = self.legal(kind)  # equal segments overlap
                counts = np.linspace(1, len(members), min(N_FIRST, len(members))).astype(int).tolist()
                choices += [tuple(members[:n]) for n in counts]
        return choices

    def all_but(self, x: NDArray[np.float64]) -> Row:
        """A row that forbids this choice and no other."""
        named = set(self.chosen(x))
        return {i: 1.0 if i in named else -1.0 for i in range(self.n_units)}, len(named) - 1.0

    def tightened(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """`x` with the columns that hang on candidates as low in bytes as their bonds let them."""
        tight = x[: self._aux].copy()
        tight[self.n_units :] = np.nan
        for column, sign, others, most in self._limits:
            slack = most - sum(n * x[other] for other, n in others)
            if sign > 0:
                tight[column] = np.clip(np.fmin(tight[column], slack), 0.0, 1.0)
            else:
                tight[column] = np.clip(np.fmax(tight[column], -slack), 0.0, 1.0)
        return np.nan_to_num(tight)

    @cached_property
    def _limits(self) -> list[tuple[int, float, list[tuple[int, float]], float]]:
        limits = []
        for row, most in self._bonds:
            column = max(row)  # what hangs on others stands behind them
            limits.append((column, row[column], [(i, n) for i, n in row.items() if i != column], most))
        return limits

    @cached_property
    def rows(self) -> list[Bond]:
        """All rows that every policy keeps."""
        spared = {pair: self._first_stop + place for place, pair in enumerate(self._stops)}
        rows = [self._counted_once(bond, spared) for bond in self._bonds]
        pairs: dict[int, list[int]] = defaultdict(list)
        for pair, column in spared.items():
            for unit in pair:
                pairs[unit].append(column)
        rows += [({**dict.fromkeys(columns, 1.0), unit: -1.0}, 0.0) for unit, columns in pairs.items()]
        for place, members in enumerate(self._kinds):
            row = dict.fromkeys(members, 1.0)
            column = self._first_kind + place
            rows += [({**row, column: -1.0}, 0.0), ({**{i: -n for i, n in row.items()}, column: 1.0}, 0.0)]
        named = Counter(fqn for one in self._candidates.units for fqn in one.unit.blocks)
        for fqn, n in named.items():
            if n > 1:
                holders = [i for i, one in enumerate(self._candidates.units) if fqn in one.unit.blocks]
                rows.append((dict.fromkeys(holders, 1.0), 1.0))
        chains = {(i, *around) for i, around in enumerate(self._candidates.around) if len(around) >= DEPTH}
        inside = {j for _, *around in chains for j in around}
        rows += [(dict.fromkeys(chain, 1.0), float(DEPTH)) for chain in chains if chain[0] not in inside]
        return rows

    def _counted_once(self, bond: Bond, spared: dict[tuple[int, int], int]) -> Bond:
        """What two candidates, one inside the other, both let go leaves once: where half of each is taken as well."""
        row, most = bond
        named = [column for column, n in row.items() if n < 0 and column < self.n_units]
        if most or len(named) < 2 or len(named) + 1 < len(row):
            return bond
        return {**row, **{spared[pair]: 1.0 for pair in permutations(named, 2) if pair in spared}}, most

    @cached_property
    def matrix(self) -> tuple[Any, list[float]]:
        """`rows` as the solver takes them."""
        return _sparse(self.rows, self.n_columns), [most for _, most in self.rows]

    @property
    def has_kinds(self) -> bool:
        return bool(self._kinds)

    def whole(self, whole: Whole) -> NDArray[np.int64] | None:
        """Which columns are whole numbers."""
        if whole == "relaxed":
            return None
        integrality = np.zeros(self.n_columns, dtype=np.int64)
        integrality[: self.n_units] = 1
        integrality[self._first_kind : self.peak_column] = 1
        if whole == "counts":
            integrality[[i for members in self._kinds for i in members]] = 0
        return integrality

    def bounds(self, like: Minimum | None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The bounds of each column; `like` fixes how many of each kind."""
        least, most = np.zeros(self.n_columns), np.ones(self.n_columns)
        kinds = slice(self._first_kind, self.peak_column)
        most[kinds] = [len(members) for members in self._kinds]
        if like is not None:
            least[kinds] = most[kinds] = np.round(like.x[kinds])
        most[self.peak_column] = np.inf
        return least, most


def minimised(shape: Shape, question: Question, like: Minimum | None = None) -> Minimum | None:
    """The cheapest (or lowest) choice that keeps the rows; None: there is none, or no time to find one."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import vstack
    except ImportError as error:
        raise NotOnThisDevice(
            f"Planning needs scipy, which could not be loaded: {message_of(error)}.",
            hint="pip install -r requirements.txt",
        ) from error
    extra = list(question.rows)
    scaled = shape.costs / shape.unit_cost * SCALE
    if question.most_cost is not None:
        costs = {int(i): float(scaled[i]) for i in np.flatnonzero(scaled)}
        extra.append((costs, question.most_cost / shape.unit_cost * SCALE))
    objective = np.zeros(shape.n_columns) if question.for_peak else scaled.copy()
    objective[shape.peak_column] = 1.0 if question.for_peak else 0.0
    if question.bound > 0:
        known = question.bound / 1024**2 if question.for_peak else question.bound / shape.unit_cost * SCALE
        extra.append(({int(i): -float(objective[i]) for i in np.flatnonzero(objective)}, -known * (1 - 1e-9)))
    fixed, most = shape.matrix
    result = milp(
        objective,
        integrality=shape.whole(question.whole),
        bounds=Bounds(*shape.bounds(like)),
        constraints=LinearConstraint(
            vstack([fixed, _sparse(extra, shape.n_columns)], format="csr"),
            -np.inf,
            np.array([*most, *(bound for _, bound in extra)]),
        ),
        options={"time_limit": question.seconds, "mip_rel_gap": TOLERANCE / 2},
    )
    if result.x is None:
        return None
    # A program without a choice to make is none of whole numbers, and its answer is its own bound.
    bound = result.fun if question.whole == "relaxed" or result.mip_dual_bound is None else result.mip_dual_bound
    return Minimum(
        x=result.x,
        peak_bytes=float(result.x[shape.peak_column]) * 1024**2,
        bound=float(bound) * (1024**2 if question.for_peak else shape.unit_cost / SCALE),
    )


def _sparse(rows: Sequence[Row], n_columns: int) -> Any:
    from scipy.sparse import csr_matrix

    counts = [len(row) for row, _ in rows]
    columns = [column for row, _ in rows for column in row]
    values = [n for row, _ in rows for n in row.values()]
    return csr_matrix((values, columns, np.concatenate(([0], np.cumsum(counts)))), shape=(len(rows), n_columns))
