"""Ten of the plainest models that a person may open: several leave a preset nothing to choose."""

import torch
from torch import nn
from torch.nn import functional as F


class Mnist(nn.Module):
    """Layers as in PyTorch's example: nothing repeats, every block is a single operation."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(8 * 6 * 6, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Pair(nn.Module):
    """A generator and a discriminator that looks at what it made."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(32, 1))

    def forward(self, x):
        return self.discriminator(self.generator(x))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.scale


class Shift(nn.Module):
    """Nothing to train."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.ones(16))

    def forward(self, x):
        return x + self.shift


def linear():
    return nn.Linear(16, 4), torch.randn(64, 16)


def convolution():
    return nn.Conv2d(3, 4, 3), torch.randn(4, 3, 16, 16)


def two_layers():
    return TwoLayers(), torch.randn(64, 16)


def mnist():
    return Mnist(), torch.randn(8, 1, 16, 16)


def lstm():
    return Reader(), torch.randn(8, 12, 8)


def gan():
    return Pair(), torch.randn(64, 8)


def without_dropout():
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), torch.randn(64, 16)


def one_parameter():
    return Scale(), torch.randn(64, 16)


def buffers_only():
    return Shift(), torch.randn(64, 16)


def three_hundred():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(300))), torch.randn(16, 8)
