"""A policy put onto a model in place, and what is different while a block runs again."""
