"""Compares the results of two runs bit by bit: is the candidate's step still the baseline's step?

In come two RunSpecs (compare.py) or two training programs of a user. Out comes a Comparison with its evidence.
Read programs.py first (what runs, of two kinds), then outcome.py (the results of one run) and judgement.py (the order
of the runs).
"""
