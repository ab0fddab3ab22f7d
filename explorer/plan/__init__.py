"""Decisions without data: pure code over records, without torch.

In come records of graphs and measured steps. Out come policies, forecasts, hazards and texts. Begin with `policy`, then
`predict` (the effect of a policy) and `planners` (the search for one).
"""
