"""Starts clean processes and ends them with everything that they start. Read forks.py first."""
