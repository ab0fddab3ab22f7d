"""Rivals on real steps: each in a process of its own, judged and timed against the step with everything kept."""
