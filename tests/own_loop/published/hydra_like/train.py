"""Everything is made from a configuration by a decorator."""

import functools
import importlib
import sys
from pathlib import Path

import torch
import yaml


def main(config_path, config_name):
    def decorate(task):
        @functools.wraps(task)
        def wrapped():
            cfg = yaml.safe_load((Path(__file__).parent / config_path / f"{config_name}.yaml").read_text())
            for override in sys.argv[1:]:
                keys, value = override.split("=", 1)
                *path, last = keys.split(".")
                functools.reduce(dict.__getitem__, path, cfg)[last] = yaml.safe_load(value)
            return task(cfg)

        return wrapped

    return decorate


def instantiate(node, *args):
    module, _, name = node["_target_"].rpartition(".")
    kwargs = {key: value for key, value in node.items() if key != "_target_"}
    return getattr(importlib.import_module(module), name)(*args, **kwargs)


@main(config_path="conf", config_name="config")
def run(cfg):
    torch.manual_seed(cfg["seed"])
    model = instantiate(cfg["model"])
    print("parameters:", sum(p.numel() for p in model.parameters()))
    optimizer = instantiate(cfg["optimizer"], model.parameters())
    for _ in range(cfg["trainer"]["steps"]):
        tokens, labels = torch.randint(0, 64, (cfg["trainer"]["batch_size"], 20)), torch.randint(0, 4, (8,))
        loss = torch.nn.functional.cross_entropy(model(tokens), labels[: len(tokens)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    run()
