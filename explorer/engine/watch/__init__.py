"""Observers of a running step: operators, storages, calls, FLOPs, what moves."""
