"""The policy without a model in memory: presets, names of blocks, and the policy file.

In comes a model graph or a text, out comes a Policy or a PolicyFile. Begin with `presets`.
"""
