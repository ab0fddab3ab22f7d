"""What can be decided without data: pure code over records."""
