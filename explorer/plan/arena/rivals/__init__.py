"""One file a rival; nothing else names it. Its file's name, with hyphens, is what it is called."""
