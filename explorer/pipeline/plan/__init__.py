"""The prediction of a pipelined step before it runs: schedules, cuts, costs and a clock.

In come a split of the model (stages, microbatches, schedule) and a profile. Out come rows of actions, and their times
and memory by rank. Begin with `schedules`, then `clock`.
"""
