"""A pipelined step: actions in time, memory by rank, whose fault a difference is."""
