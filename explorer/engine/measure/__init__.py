"""One measured step: every allocation with its role and block, FLOPs, times."""
