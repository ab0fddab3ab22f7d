"""Experiments: each runs something real in seconds and computes what there is to learn. `run.run_lab` is the way in."""
