"""Hazards of a policy or a plan, found before any run.

In come a model graph, a policy and perhaps a plan, out come Hazards. Begin with `hazards`; each rule is one function.
"""
