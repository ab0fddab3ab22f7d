"""Pipelines: a model cut into stages that pass microbatches to each other, predicted and run for real.

A slice. In come a `RunSpec` with a `PipelinePlan`, out comes a `PipelineRun`. Read record/step.py first, then
plan/schedules.py and engine/run.py. `PipelinePlan` itself is a record of the core: policy files and specs hold one.

Needs of the core: child_process, cli, engine.bench, engine.compare, engine.device, engine.imaginary, engine.model,
engine.policy, engine.state, errors, jobs, plan, plan.export, plan.hazards, plan.policy, record, ui.components,
ui.session, ui.shared, view.compare, view.drawing, view.graph, view.report, view.text.
"""
