"""The Pipeline page."""
