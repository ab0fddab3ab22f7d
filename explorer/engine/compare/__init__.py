"""Compares the results of two runs bit by bit: is the candidate's step still the baseline's step?

In come two RunSpecs (compare.py) or two training programs (programs.py). Out come the fields of a Comparison.
Read outcome.py first (the results of one run), then compare.py (the order of the runs) and diffs.py (distances).
"""
