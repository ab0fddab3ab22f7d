"""Runs a lesson. In come its name and switches, out comes a record of what happened. Read run.py first."""
