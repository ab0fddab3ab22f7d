"""Bytes by tick, role and block: what is alive when."""
