"""Two models of x-transformers for zoo.txt: the library has no factory that takes plain arguments."""

from __future__ import annotations

from torch import nn
from x_transformers import Decoder, Encoder, TransformerWrapper


def decoder(depth: int = 4, rotary: bool = True) -> nn.Module:
    layers = Decoder(dim=32, depth=depth, heads=4, attn_dim_head=8, rotary_pos_emb=rotary, ff_glu=True)
    return TransformerWrapper(num_tokens=128, max_seq_len=64, attn_layers=layers)


def encoder(depth: int = 4) -> nn.Module:
    layers = Encoder(dim=32, depth=depth, heads=4, attn_dim_head=8, use_rmsnorm=True, attn_dropout=0.1)
    return TransformerWrapper(num_tokens=128, max_seq_len=64, attn_layers=layers)
