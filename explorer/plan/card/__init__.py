"""What a GPU will hold: the caching allocator played with numbers, and the figures of a card.

In: allocations and frees in their order, from a recorded, predicted or simulated step. Out: allocated, reserved and
stranded bytes, and the request that a card refuses. Read `caching_allocator.py` first.
"""
