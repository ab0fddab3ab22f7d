"""Puts a policy onto a model in place, and controls what differs while a block runs again.

In come a model and a Policy. Out comes a PolicyHandle, whose `undo()` restores the model.
Read apply.py first, then units.py: how a unit runs, and the context around each recompute.
"""
