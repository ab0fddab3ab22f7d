"""Planners that are held against each other, one file a rival."""
