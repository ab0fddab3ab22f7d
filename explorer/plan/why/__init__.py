"""Sentences that say why, computed from what was measured.

In come measurements and comparisons, out come sentences. Begin with `peak`; `gradients` explains a difference.
"""
