"""The block graph as a drawing: a model graph comes in, positions and labels go out. Read nesting.py first."""
