"""What the command line can be asked: one verb a file."""
