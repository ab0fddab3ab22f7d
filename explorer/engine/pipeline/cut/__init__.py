"""A model's forward written down once and cut into stages."""
