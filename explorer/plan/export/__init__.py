"""A policy or a plan in the form of another program.

In comes a PolicyFile, out comes an Export: the text, how well it fits, and what is lost. Begin with `formats`, which
has one row for each target; `target` computes the losses.
"""
