"""A model split into stages and driven by a schedule: in one process, rank by rank, or in many processes."""
