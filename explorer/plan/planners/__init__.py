"""Policies that a machine chooses: the cheapest one under a budget, with a proof."""
