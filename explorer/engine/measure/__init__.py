"""Measurement of one training step: each allocation with its role and block, FLOPs and times.

A RunSpec comes in, or the model and step of a caller's loop; a `record.measurement.Measurement` goes out.
Read measure.py first, then attribution.py. live.py records a caller's loop, own_steps.py times its policies.
"""
