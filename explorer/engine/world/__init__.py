"""Reads and restores the state that a run moves: generators, global settings, tensors and attributes of models.

In comes a model, or a model and a step. Out come snapshots with `put_back` or `restore`, and plain copies to compare.
Read as_found.py first (settings), then rng.py (generators), remembered.py (state of a model) and found_step.py.
"""
