"""Runs of schedules: in one process, rank by rank, or in real processes. Read inproc.py first."""
