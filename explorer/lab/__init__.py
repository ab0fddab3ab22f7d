"""The lab: lessons that run something real in seconds and compute what there is to learn.

A slice. In come the name of a lesson and its switches, out comes a `LabOutcome`. Read
record.py first, then engine/run.py.

Needs of the core: cli, engine.bench, engine.compare, engine.device, engine.model, engine.policy, engine.ranks,
engine.state, errors, jobs, plan, plan.memory, plan.why, record, ui.session, ui.shared, view.drawing, view.report,
view.text.
"""
