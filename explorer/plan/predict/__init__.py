"""The forecast of a policy: its effect on a measured step, before the policy runs.

In comes one run with its timeline (record/measurement.py), the graph of the model, and a policy. Out comes a forecast:
peak, saved bytes, FLOPs and step time. The rooms `planners`, `why` and the page read it. Begin with forecaster.py, then
changes.py (how the timeline changes) and calls.py (what one call of a unit saves).
"""
