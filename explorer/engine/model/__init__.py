"""From a reference to a model with a batch and a loss, and to its block graph."""
