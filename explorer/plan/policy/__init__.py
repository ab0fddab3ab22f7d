"""The policy: presets, its file, its evidence, its marks in the graph."""
