"""The guard of a training step in continuous integration: a lock file of predicted figures, and what moved since.

In comes a predicted measurement with its graph, out come a `Lock`, its text, and the `Move`s between two locks.
Read lock.py first.
"""
