"""Pipelines: a model split into stages and run by a schedule, in one process, rank by rank, or in many processes.

A RunSpec with a pipeline plan comes in. `run_pipeline` returns a `PipelineRun`, `profile_blocks` the prices for
predictions. Read run.py first, then in_process.py. tape.py, stages.py and build.py make the stages.
"""
