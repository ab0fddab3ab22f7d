"""Processes of our own that begin clean and leave nothing behind."""
