"""Parts of a visitor's session: address, values, window, job, and the repository of runs. Read repository.py first."""
