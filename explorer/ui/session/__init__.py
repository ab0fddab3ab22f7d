"""Parts of a visitor's session: backend, address, widgets, window, known runs. Read kept.py first."""
