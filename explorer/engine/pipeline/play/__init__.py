"""Schedules played: in one process, rank by rank, in real processes."""
