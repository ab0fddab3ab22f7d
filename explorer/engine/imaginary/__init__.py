"""The imaginary card: torch's own CUDA build on a machine without a GPU, over stub libraries.

In: a card of `explorer.plan.card.cards` and a command line of Python.
Out: the command in a process of its own, in which torch finds the card. The dispatcher, the allocator and the errors
are torch's. Kernels write nothing, so there are no values and no times.

`stubs/` has the libraries, `build.py` compiles them for the installed torch, `run.py` starts the process: read that one
first.
"""
