"""What a run has to leave as found: generators, settings, what models remember."""
