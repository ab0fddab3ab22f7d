"""A policy or a plan in the form that somebody else needs."""
