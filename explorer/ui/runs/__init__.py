"""The Runs page: stored runs and files come in; opened, compared and exported runs go out. Read page.py first."""
