"""Observers of a running step: operators, storages, calls, FLOPs, moved state.

In comes a model whose forward or step runs under hooks and dispatch modes. Out come columns and facts for records.
Read scopes.py first (the running block), then tracker.py (a measured step) and forward.py (the block graph).
"""
