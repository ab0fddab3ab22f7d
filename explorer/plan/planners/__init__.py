"""The search for a policy: the cheapest one under a memory budget, or the lowest peak under a time budget.

In comes one run with its timeline and the graph of the model. Out comes a Plan: a policy, its predicted peak and cost,
and a certificate with the lower bound of the solver. Begin with `budget`; `candidates`, `pieces`, `columns`, `reruns`
and `classes` build the integer program, and `solve` solves it.
"""
