"""The verbs of the command line, by topic. Options come in; an exit code, text or JSON go out."""
