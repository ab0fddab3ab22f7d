"""A file that nets import: a class that nobody makes an instance of, and a global that a function moves."""


class Registry:
    n_calls = 0


N_CALLS = 0


def bump() -> None:
    global N_CALLS
    N_CALLS += 1
