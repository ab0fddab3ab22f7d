import torch
from torch import nn


class TextCNN(nn.Module):
    def __init__(self, width, kernels, n_words=64, n_classes=4):
        super().__init__()
        self.embed = nn.Embedding(n_words, width)
        self.convs = nn.ModuleList([nn.Conv1d(width, width, k) for k in kernels])
        self.head = nn.Linear(width * len(kernels), n_classes)

    def forward(self, tokens):
        x = self.embed(tokens).transpose(1, 2)
        return self.head(torch.cat([conv(x).relu().amax(-1) for conv in self.convs], dim=1))
