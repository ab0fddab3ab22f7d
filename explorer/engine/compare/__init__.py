"""Is it still the same step? What two runs leave behind, held against each other bit by bit."""
