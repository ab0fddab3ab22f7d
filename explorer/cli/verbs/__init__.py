"""The verbs of the command line, one verb per file. Options come in; an exit code, text or JSON go out."""
