from .mlp_mixer import Mixer

__all__ = ["Mixer"]
