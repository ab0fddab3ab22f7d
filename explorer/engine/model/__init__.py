"""Models: from a reference to a model with a batch and a loss, and to the block graph.

A `ModelRef` comes in. `load` returns a `Loaded` (model, batch, loss), `describe` a `ModelGraph`. Both run the model's
code. Read load.py first, then describe.py; loaded.py refuses models that cannot be watched.
"""
