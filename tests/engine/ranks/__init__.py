"""Steps that several ranks share."""
