"""Sentences that say why, computed from what was measured."""
