"""One lesson a file; nothing else names it."""
