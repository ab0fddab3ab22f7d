"""An image classifier with a registry of models, meters and a schedule."""

import argparse
import logging
from collections import OrderedDict

import torch
import torch.nn as nn

_logger = logging.getLogger("train")
_REGISTRY = {}
parser = argparse.ArgumentParser(description="ImageNet Training")
parser.add_argument("data_dir", nargs="?", metavar="DIR")
parser.add_argument("--model", default="resnet_tiny", type=str)
parser.add_argument("-b", "--batch-size", type=int, default=8)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--smoothing", type=float, default=0.1)
parser.add_argument("--workers", type=int, default=0)


def register_model(fn):
    _REGISTRY[fn.__name__] = fn
    return fn


def create_model(name, **kwargs):
    return _REGISTRY[name](**kwargs)


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1, self.act = nn.BatchNorm2d(planes), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x):
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.act(self.bn1(self.conv1(x)))
        return self.act(self.bn2(self.conv2(x)) + shortcut)


@register_model
def resnet_tiny(num_classes=10):
    layers = [("stem", nn.Conv2d(3, 8, 3, 1, 1))]
    layers += [(f"layer{i}", BasicBlock(8 * 2 ** max(0, i - 1), 8 * 2**i, 2 if i else 1)) for i in range(3)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, num_classes))
    return nn.Sequential(OrderedDict([*layers, ("head", head)]))


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, val, n=1):
        self.sum, self.count = self.sum + val * n, self.count + n


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, device):
    model.train()
    losses = AverageMeter()
    for batch_idx, (input, target) in enumerate(loader):
        input, target = input.to(device), target.to(device)
        loss = loss_fn(model(input), target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.update(loss.item(), input.size(0))
        _logger.info(f"Train: {epoch} [{batch_idx}] Loss: {losses.sum / losses.count:.3f}")
    return OrderedDict([("loss", losses.sum / losses.count)])


@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    return sum((model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in loader)


def main():
    logging.basicConfig(level=logging.INFO)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = create_model(args.model).to(device)
    print(f"Model {args.model} created, param count: {sum(m.numel() for m in model.parameters())}")
    data = torch.utils.data.TensorDataset(torch.randn(24, 3, 32, 32), torch.randint(0, 10, (24,)))
    loader = torch.utils.data.DataLoader(data, args.batch_size, shuffle=True, num_workers=args.workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=args.smoothing).to(device)
    try:
        for epoch in range(args.epochs):
            train_one_epoch(epoch, model, loader, optimizer, loss_fn, device)
            validate(model, loader, device)
            scheduler.step()
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
