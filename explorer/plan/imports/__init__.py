"""Policies from outside: policy files, and recompute settings of training programs.

In comes a text and the graph of a model, out comes a Reading: a policy file, how well it fits, and what is lost.
Begin with `read_policy`.
"""
