"""Measurement of one training step: each allocation with its role and block, FLOPs and times.

A RunSpec comes in, or the model and step of a caller's loop; a `record.measurement.Measurement` goes out.
bench.py takes and times a step, recording.py records it, attribution.py names each byte. Read measure.py first, then
user_loop.py and user_step.py for the steps of a caller's loop.
"""
