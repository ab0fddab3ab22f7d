"""Memory over a step and at its peak."""
