"""The instruments in somebody's own training loop."""
