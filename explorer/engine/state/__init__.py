"""Reads and restores the state that a run moves: generators, global settings, tensors and attributes of models.

In comes a model, or a model and a step. Out come snapshots with `restore`, and plain copies to compare.
Read snapshot.py first, then state_diff.py: copies of a model's state that are compared.
"""
