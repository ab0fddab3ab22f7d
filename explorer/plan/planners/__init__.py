"""The search for a policy: the cheapest one under a memory budget, or the lowest peak under a time budget.

In comes one run with its timeline and the graph of the model. Out comes a Plan: a policy, its predicted peak and cost,
and a certificate with the lower bound of the solver. Begin with `planner`; `candidates` says what may be recomputed,
`variables` builds the integer program, `program` and `solver` solve it, and `chain` plans chains.

The memory of a choice follows the rules of checkpoint memory, numbered in plan/predict/__init__.py. The program takes
them as rows from linear_memory.py. Every answer is then judged by the forecast, which simulates the same rules.
"""
