"""The same verbs without a browser."""
