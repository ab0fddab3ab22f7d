"""Parts of every picture: colours, units, axes, rows. Read figure.py first."""
