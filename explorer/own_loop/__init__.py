"""The instruments in a user's training loop.

A model, an optimizer and a step function of the caller come in. A `RecordedRun`, `Watch`, `AutoPlan`, `Judged` or
`Audit` goes out, and the training stays bitwise unchanged. Read record_step.py first, then watch.py.
"""
