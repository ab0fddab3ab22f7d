"""The command line: a verb is a function in a file of verbs/, its answer goes to stdout, its progress to stderr.

Read command.py first, then a verb.
"""
