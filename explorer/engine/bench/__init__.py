"""Measurement of one training step: each allocation with its role and block, FLOPs and times.

A RunSpec comes in, or the model and step of a caller's loop; a `record.measurement.Measurement` goes out.
Read step.py and measure.py first, then attribution.py. user_loop.py and user_step.py take the steps of a caller's loop.
"""
