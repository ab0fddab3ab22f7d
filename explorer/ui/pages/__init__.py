"""One file a page: what stands on it, in which order."""
