"""The Lab page: an experiment with its switches comes in, its findings go out. Read page.py first."""
