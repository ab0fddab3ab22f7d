"""A function and its arguments come in; a clean process that runs the function goes out. Read forks.py first."""
