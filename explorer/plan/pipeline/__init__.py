"""Schedules, cuts and clocks: a pipelined step before it runs."""
