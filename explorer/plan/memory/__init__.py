"""Bytes by tick, role and block: what is alive when.

In comes a measurement with its allocations, out come series, a Ledger, and the words for a moment.
"""
