"""What can go wrong with a policy or a plan, known before any run."""
