"""What a policy would do, played through a measured timeline."""
