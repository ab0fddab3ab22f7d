"""Comparisons come in; charts and tables of headline, cost, gradients and state go out. Read headline.py first."""
