"""Small models of transformers with their losses, and the same habits without it: dropout behind every product, a
tuple that every layer is given, a stem and a head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from explorer.record import ModelRef

NAMES = ("llama", "neox", "vit", "bart", "rotated", "convolutions")


def ref(name: str) -> ModelRef:
    return ModelRef(target=f"{Path(__file__).resolve()}:{name}")


SIZES_OF_LAYERS = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3}
LENGTH, VOCABULARY = 24, 64


def _language_model(model: nn.Module, **more: Any) -> tuple[nn.Module, Any, Any]:
    ids = torch.randint(3, VOCABULARY, (8, LENGTH))
    inputs = {"input_ids": ids, "use_cache": False} | {name: ids for name in more}
    return model, (inputs, ids), lambda output, ids: cross_entropy(output.logits.flatten(0, 1).float(), ids.flatten())


def llama() -> tuple[nn.Module, Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=VOCABULARY, intermediate_size=80, num_key_value_heads=2, **SIZES_OF_LAYERS)
    return _language_model(LlamaForCausalLM(config))


def neox() -> tuple[nn.Module, Any, Any]:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=VOCABULARY, intermediate_size=128, hidden_dropout=0.1, attention_dropout=0.1, **SIZES_OF_LAYERS
    )
    return _language_model(GPTNeoXForCausalLM(config))


def vit() -> tuple[nn.Module, Any, Any]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(intermediate_size=128, image_size=32, patch_size=8, hidden_dropout_prob=0.1, **SIZES_OF_LAYERS)
    batch = {"pixel_values": torch.randn(8, 3, 32, 32)}, torch.randint(0, 2, (8,))
    return ViTForImageClassification(config), batch, lambda output, labels: cross_entropy(output.logits.float(), labels)


def bart() -> tuple[nn.Module, Any, Any]:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return _language_model(BartForConditionalGeneration(config), decoder_input_ids=True)


class Layer(nn.Module):
    """Its products come last in evaluation: dropout then saves nothing behind them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))
        self.gate, self.dropout = nn.Linear(width, width), nn.Dropout(0.2)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.mlp(self.norm(x) * angles[0])
        return x + self.dropout(self.gate(x * angles[1]))


class Rotated(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        angle = torch.linspace(0, 1, ids.shape[1], device=x.device, dtype=x.dtype)[:, None]
        angles = angle.cos(), angle.sin()
        for layer in self.layers:
            x = layer(x, angles)
        return self.head(x)


def rotated() -> tuple[nn.Module, Any, Any]:
    ids = torch.randint(0, VOCABULARY, (8, LENGTH))
    return Rotated(32, 3), (ids, ids), lambda output, ids: cross_entropy(output.flatten(0, 1).float(), ids.flatten())


def convolutions() -> tuple[nn.Module, Any, Any]:
    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Dropout(0.1))

    model = nn.Sequential(nn.Conv2d(3, 8, 3), *(block() for _ in range(4)), nn.Flatten(), nn.LazyLinear(10))
    model(images := torch.randn(8, 3, 14, 14))
    return model, (images, torch.randint(0, 10, (8,))), lambda output, labels: cross_entropy(output.float(), labels)
