"""Which derivatives survive which checkpointing, every cell a run in a process of its own."""
