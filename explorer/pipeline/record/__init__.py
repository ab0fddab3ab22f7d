"""Records of a pipelined step: its plan below a cap, its prices, its run."""
