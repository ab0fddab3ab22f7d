"""Programs whose memory any card shows, real or imaginary: single operators, optimizers, whole steps, a refusal.

python -m tests.gpu.programs OUT.jsonl.gz                 every program, in a few processes
python -m tests.gpu.programs OUT.jsonl.gz --only steps    one part, in this process

A line is one program: the peaks of each of its steps and the allocator's events of the last one. Where two cards give
different lines, one of them is not what it says. Events are `[letter, bytes, address - base, stream]`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = "gpt mlp resnet unet recurrent tied_lm vit"
"""All samples but the mixture of experts, whose way depends on values."""
LETTERS = {
    "alloc": "a", "free_requested": "r", "free_completed": "f", "segment_alloc": "s", "segment_free": "u",
    "segment_map": "m", "segment_unmap": "n", "oom": "o", "snapshot": "p",
}  # fmt: skip
SETTINGS = {
    "default": "",
    "expandable": "expandable_segments:True",
    "max_split": "max_split_size_mb:20",
    "roundup": "roundup_power2_divisions:4",
    "collect": "garbage_collection_threshold:0.6",
}
Line = dict[str, Any]
Program = Callable[[], None]


def events_of(program: Program) -> list[list[Any]]:
    """What the allocator did while `program` ran."""
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, context=None, stacks="python")
    try:
        program()
        torch.cuda.synchronize()
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    addresses = [event.get("addr", 0) for event in trace]
    base = min([address for address in addresses if address], default=0)
    streams: dict[int, int] = {}
    return [
        [LETTERS.get(event["action"], event["action"]), event["size"], event.get("addr", base) - base,
         streams.setdefault(event["stream"], len(streams))]
        for event in trace
    ]  # fmt: skip


def counted(program: Program) -> dict[str, int]:
    """Peaks above what was there before, and what the program left behind."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    program()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    return {
        "allocated": after["allocated_bytes.all.peak"] - before["allocated_bytes.all.current"],
        "requested": after["requested_bytes.all.peak"] - before["requested_bytes.all.current"],
        "reserved": after["reserved_bytes.all.peak"],
        "left": after["allocated_bytes.all.current"] - before["allocated_bytes.all.current"],
    }


def driver_bytes() -> int:
    """What driver and context hold beside torch's segments; other processes on the card are in it."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def line_of(name: str, program: Program, n_steps: int = 0) -> Line:
    """A program that fails says why in its line. Without a number of steps, the one counted step is the second."""
    try:
        if not n_steps:
            program()
        steps = [counted(program) for _ in range(n_steps or 1)]
        return {"name": name, "steps": steps, "events": events_of(program)}
    except Exception as error:
        return {"name": name, "error": f"{type(error).__name__}: {error}"[:400]}


def backward_of(function: Callable[..., Tensor], *tensors: Tensor) -> Program:
    """A program: forward and backward of a function. Its first call makes the gradient of ones."""
    leaves = [tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in tensors]
    upstream: list[Tensor] = []

    def program() -> None:
        for leaf in leaves:
            leaf.grad = None
        out = function(*leaves)
        if not upstream:
            upstream.append(torch.ones_like(out))
        out.backward(upstream[0])

    return program


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def randint(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, device="cuda")


def reductions() -> Iterator[tuple[str, Program]]:
    shapes = (
        (512, 1024),
        (2048, 1024),
        (2560, 2048),
        (8192, 4096),
        (16384, 16384),
        (32768, 768),
        (100_000, 64),
        (64, 100_000),
    )
    for (rows, columns), dtype in product(shapes, (torch.float32, torch.bfloat16)):
        x = randn(rows, columns, dtype=dtype)
        kind = f"{rows}x{columns} {str(dtype)[6:]}"
        yield f"sum(0) {kind}", lambda x=x: x.sum(0)
        yield f"sum(1) {kind}", lambda x=x: x.sum(1)
        yield f"sum() {kind}", lambda x=x: x.sum()
    x = randn(8192, 4096)
    for name in ("mean", "amax", "argmax", "norm", "var", "std", "logsumexp", "cumsum", "softmax", "log_softmax"):
        yield f"{name}(0)", lambda x=x, name=name: getattr(x, name)(dim=0)
        yield f"{name}(1)", lambda x=x, name=name: getattr(x, name)(dim=1)
    yield "max()", lambda: x.max()
    yield "sort", lambda: x.sort()
    yield "sort(0)", lambda: x.sort(0)
    yield "topk", lambda: x.topk(8)
    yield "any", lambda: (x > 0).any()
    yield "prod(0)", lambda: x.prod(0)


def layers() -> Iterator[tuple[str, Program]]:
    for dtype, rows in product((torch.float32, torch.bfloat16), (256, 4096)):
        kind = f"{rows} {str(dtype)[6:]}"
        x = randn(rows, 1024, dtype=dtype)
        weight, bias = randn(2048, 1024, dtype=dtype), randn(2048, dtype=dtype)
        gain, shift = randn(1024, dtype=dtype), randn(1024, dtype=dtype)
        yield f"linear {kind}", backward_of(F.linear, x, weight, bias)
        yield f"linear without bias {kind}", backward_of(F.linear, x, weight)
        yield f"layer_norm {kind}", backward_of(lambda x, w, b: F.layer_norm(x, (1024,), w, b), x, gain, shift)
        yield f"rms_norm {kind}", backward_of(lambda x, w: F.rms_norm(x, (1024,), w), x, gain)
        for name in (
            "gelu",
            "relu",
            "silu",
            "softplus",
            "tanh",
            "sigmoid",
            "dropout",
            "hardswish",
            "elu",
            "leaky_relu",
        ):
            yield f"{name} {kind}", backward_of(getattr(F, name) if hasattr(F, name) else getattr(torch, name), x)
        yield f"softmax {kind}", backward_of(lambda x: x.softmax(-1), x)
        yield f"add bias {kind}", backward_of(lambda x, b: x + b, x, shift)
        ids = randint(1024, rows)
        yield f"cross_entropy {kind}", backward_of(F.cross_entropy, x, ids)
        yield f"nll {kind}", backward_of(lambda x, i: F.nll_loss(x, i), x, ids)
        for name in (
            "mse_loss",
            "smooth_l1_loss",
            "l1_loss",
            "huber_loss",
            "binary_cross_entropy_with_logits",
            "kl_div",
        ):
            yield f"{name} {kind}", backward_of(getattr(F, name), x, randn(rows, 1024, dtype=dtype))
        table = randn(50257, 256, dtype=dtype)
        many = randint(50257, rows)
        yield f"embedding {kind}", backward_of(lambda t, i: F.embedding(i, t), table, many)
        yield f"index_select {kind}", backward_of(lambda t, i: t.index_select(0, i), table, many)
        yield f"index {kind}", backward_of(lambda t, i: t[i], table, many)
        yield f"gather {kind}", backward_of(lambda x, i: x.gather(1, i[:, None]), x, ids)
        yield f"batched {kind}", backward_of(torch.bmm, x.view(16, -1, 1024), randn(16, 1024, 64, dtype=dtype))
        yield f"scatter_add {kind}", lambda x=x, i=ids: torch.zeros_like(x).scatter_add(1, i[:, None], x)
        yield f"cat {kind}", backward_of(lambda a, b: torch.cat((a, b), 1), x, randn(rows, 1024, dtype=dtype))
        yield f"masked_fill {kind}", backward_of(lambda x: x.masked_fill(x > 9, 0.0), x)
        yield f"where {kind}", backward_of(lambda x: torch.where(x > 9, x, x * 2), x)


def pictures() -> Iterator[tuple[str, Program]]:
    for dtype, last in product((torch.float32, torch.bfloat16), (False, True)):
        kind = f"{str(dtype)[6:]}{' channels_last' if last else ''}"
        memory = torch.channels_last if last else torch.contiguous_format
        x = randn(16, 64, 56, 56, dtype=dtype).to(memory_format=memory)
        for name, weight, options in (
            ("1x1", (128, 64, 1, 1), {}), ("3x3", (64, 64, 3, 3), {"padding": 1}),
            ("7x7 strided", (64, 64, 7, 7), {"padding": 3, "stride": 2}),
            ("depthwise", (64, 1, 3, 3), {"padding": 1, "groups": 64}),
            ("dilated", (64, 64, 3, 3), {"padding": 2, "dilation": 2}),
        ):  # fmt: skip
            run = backward_of(lambda x, w, options=options: F.conv2d(x, w, **options), x, randn(*weight, dtype=dtype))
            yield f"conv2d {name} {kind}", run
        yield f"conv2d bias {kind}", backward_of(F.conv2d, x, randn(64, 64, 3, 3, dtype=dtype), randn(64, dtype=dtype))
        yield f"conv_transpose2d {kind}", backward_of(F.conv_transpose2d, x, randn(64, 64, 2, 2, dtype=dtype))
        gain, shift = randn(64), randn(64)
        mean, variance = randn(64), randn(64).abs()
        norm = lambda x, w, b, m=mean, v=variance: F.batch_norm(x, m, v, w, b, training=True)  # noqa: E731
        yield f"batch_norm {kind}", backward_of(norm, x, gain, shift)
        groups = lambda x, w, b: F.group_norm(x, 8, w, b)  # noqa: E731
        yield f"group_norm {kind}", backward_of(groups, x, gain.to(dtype), shift.to(dtype))
        yield f"max_pool2d {kind}", backward_of(lambda x: F.max_pool2d(x, 2), x)
        yield f"avg_pool2d {kind}", backward_of(lambda x: F.avg_pool2d(x, 2), x)
        yield f"adaptive_avg_pool2d {kind}", backward_of(lambda x: F.adaptive_avg_pool2d(x, 1), x)
        for mode in ("nearest", "bilinear"):
            yield (
                f"interpolate {mode} {kind}",
                backward_of(lambda x, m=mode: F.interpolate(x, scale_factor=2.0, mode=m), x),
            )


def recurrent() -> Iterator[tuple[str, Program]]:
    x = randn(64, 32, 256)
    for kind, n_layers, both in product((nn.LSTM, nn.GRU, nn.RNN), (1, 2), (False, True)):
        module = kind(256, 256, n_layers, bidirectional=both).cuda()
        yield (
            f"{kind.__name__} {n_layers} layers{' both ways' if both else ''}",
            backward_of(lambda x, m=module: m(x)[0], x),
        )


def attentions() -> Iterator[tuple[str, Program]]:
    attend = F.scaled_dot_product_attention
    for dtype, width, length in product(
        (torch.float32, torch.bfloat16, torch.float16), (32, 64, 96, 128, 192, 256), (128, 1024)
    ):
        q, k, v = (randn(2, 8, length, width, dtype=dtype) for _ in range(3))
        kind = f"{length}x{width} {str(dtype)[6:]}"
        yield f"sdpa {kind}", backward_of(attend, q, k, v)
        yield f"sdpa causal {kind}", backward_of(lambda q, k, v: attend(q, k, v, is_causal=True), q, k, v)
        yield f"sdpa dropout {kind}", backward_of(lambda q, k, v: attend(q, k, v, dropout_p=0.1), q, k, v)
        mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
        yield f"sdpa mask {kind}", backward_of(lambda q, k, v, m=mask: attend(q, k, v, attn_mask=m), q, k, v)
        few = randn(2, 2, length, width, dtype=dtype), randn(2, 2, length, width, dtype=dtype)
        yield f"sdpa grouped {kind}", backward_of(lambda q, k, v: attend(q, k, v, enable_gqa=True), q, *few)


def optimizers() -> Iterator[tuple[str, Program]]:
    choices: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
        "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
        "AdamW for loop": lambda p: torch.optim.AdamW(p, foreach=False),
        "AdamW amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
        "Adam decay": lambda p: torch.optim.Adam(p, weight_decay=0.1),
        "SGD": lambda p: torch.optim.SGD(p, 0.1),
        "SGD momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        "SGD nesterov decay": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        "SGD fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
        "RMSprop": lambda p: torch.optim.RMSprop(p),
        "Adagrad": lambda p: torch.optim.Adagrad(p),
        "Adadelta": lambda p: torch.optim.Adadelta(p),
        "NAdam": lambda p: torch.optim.NAdam(p),
        "Adafactor": lambda p: torch.optim.Adafactor(p),
    }
    for (name, choice), clip in product(choices.items(), (False, True)):
        parameters = [nn.Parameter(randn(*shape)) for _ in range(6) for shape in ((700, 512), (512,), (33,))]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = choice(parameters)

        def step(optimizer: Any = optimizer, parameters: Any = parameters, clip: bool = clip) -> None:
            if clip:
                nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()

        yield f"{name}{' clipped' if clip else ''}", step


def steps(
    samples: str = "gpt mlp resnet unet recurrent tied_lm vit", size: str = "small"
) -> Iterator[tuple[str, Program]]:
    """Whole steps of the sample models, as the product runs them."""
    from explorer.engine.bench.step import prepare, run_step
    from explorer.engine.model.describe import describe
    from explorer.plan.policy.presets import preset
    from explorer.record import ModelRef, RunSpec

    for sample in samples.split():
        ref = ModelRef(target=f"sample_models/{sample}.py", size=size)
        graph = describe(ref)
        for policy, autocast, optimizer in product(
            ("keep-all", "all", "every-2"), ("none", "bfloat16"), ("adamw", "sgd", "none")
        ):
            spec = RunSpec(
                model=ref, policy=preset(policy, graph), device="cuda", autocast=autocast, optimizer=optimizer
            )
            trainee = prepare(spec)
            yield f"{sample} {size} {policy} {autocast} {optimizer}", lambda trainee=trainee: run_step(trainee)


def large_steps() -> Iterator[tuple[str, Program]]:
    return steps("gpt tied_lm vit resnet unet mlp", "gpu")


PARTS: dict[str, Callable[[], Iterator[tuple[str, Program]]]] = {
    "reductions": reductions, "layers": layers, "pictures": pictures, "recurrent": recurrent,
    "attentions": attentions, "optimizers": optimizers, "steps": steps, "large": large_steps,
}  # fmt: skip
N_STEPS = {"steps": 3, "large": 2, "optimizers": 3}


def part_lines(part: str) -> Iterator[Line]:
    """Each program starts with an empty cache, so that its segments are its own."""
    import gc

    for name, program in PARTS[part]():
        gc.collect()
        torch.cuda.empty_cache()
        yield {"part": part, **line_of(name, program, N_STEPS.get(part, 0))}


def first_lines() -> Iterator[Line]:
    """What the first product, the first product with a bias and the driver take, in a process that has done nothing."""
    yield {"part": "driver", "name": "context", "driver": driver_bytes()}
    x, weight, bias = randn(64, 64), randn(64, 64), randn(64)
    yield {"part": "first", **line_of("product", lambda: torch.mm(x, weight), n_steps=1)}
    yield {"part": "first", **line_of("product with bias", lambda: F.linear(x, weight, bias), n_steps=1)}
    yield {"part": "driver", "name": "products", "driver": driver_bytes()}
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512)) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for name in ("first", "second"):
        loss = model(randn(64, 512)).square().mean()
        yield {"part": "driver", "name": f"{name} forward", "driver": driver_bytes()}
        loss.backward()
        yield {"part": "driver", "name": f"{name} backward", "driver": driver_bytes()}
        optimizer.step()
        yield {"part": "driver", "name": f"{name} optimizer", "driver": driver_bytes()}
    with torch.autocast("cuda", torch.bfloat16):
        model(randn(64, 512)).square().mean().backward()
    yield {"part": "driver", "name": "autocast", "driver": driver_bytes()}
    backward_of(F.conv2d, randn(8, 16, 32, 32), randn(16, 16, 3, 3))()
    yield {"part": "driver", "name": "convolution", "driver": driver_bytes()}
    q = randn(2, 8, 256, 64, dtype=torch.bfloat16)
    backward_of(F.scaled_dot_product_attention, q, q.clone(), q.clone())()
    yield {"part": "driver", "name": "attention", "driver": driver_bytes()}


def refusal_lines() -> Iterator[Line]:
    """A step that grows until a request is refused, under a limit of 2 GiB: the message, and the events before it."""
    limit = 2 << 30
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    words: list[str] = []
    held: list[Tensor] = []

    def grow() -> None:
        try:
            for index in range(1000):
                held.append(randn(1 + index % 7, 1 << 20))
                if index % 3 == 2:
                    held.pop(index % len(held))
        except torch.OutOfMemoryError as error:
            words.append(str(error))

    yield {"part": "refusal", "name": "growing", "events": events_of(grow), "said": words, "limit": limit}


HISTORIES = {
    "gpt-kept": ("gpt", "small", "keep-all", {}),
    "gpt-recomputed": ("gpt", "small", "all", {}),
    "gpt-autocast": ("gpt", "small", "every-2", {"autocast": "bfloat16"}),
    "unet-kept": ("unet", "small", "keep-all", {}),
    "unet-recomputed": ("unet", "small", "all", {}),
    "vit-accumulated": ("vit", "small", "every-2", {"n_accumulation": 2, "optimizer": "sgd"}),
}
"""Whole processes from their first request: sample, size, policy, options of the step."""
REFUSED_LIMIT = 180 << 20
"""Bytes of the card that the refused history may use: above what the GPT recomputed needs, below what it needs kept."""


def write_history(name: str, out: Path, limit_bytes: int = 0) -> None:
    """A process that builds a sample and takes three steps, in the form of tests/golden/cuda_histories."""
    from explorer.engine.bench.step import prepare, run_step
    from explorer.engine.model.describe import describe
    from explorer.plan.policy.presets import preset
    from explorer.record import ModelRef, RunSpec

    sample, size, policy, options = HISTORIES[name]
    ref = ModelRef(target=f"sample_models/{sample}.py", size=size)
    spec = RunSpec(model=ref, policy=preset(policy, describe(ref)), device="cuda", holds_output=False, **options)
    if limit_bytes:
        torch.cuda.set_per_process_memory_fraction(limit_bytes / torch.cuda.get_device_properties(0).total_memory)
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, context=None, stacks="python")
    said, peaks = "", list[list[int]]()
    try:
        trainee = prepare(spec)
        for _ in range(3):
            peaks.append(peaks_of(lambda: run_step(trainee)))
    except torch.OutOfMemoryError as error:
        said = str(error)
    write_document(name, out, limit_bytes=limit_bytes, said=said, step_peaks=peaks)


def peaks_of(step: Callable[[], object]) -> list[int]:
    """What torch itself counts at most in a step: requested, allocated and reserved bytes."""
    torch.cuda.reset_peak_memory_stats()
    step()
    stats = torch.cuda.memory_stats()
    return [stats[f"{kind}_bytes.all.peak"] for kind in ("requested", "allocated", "reserved")]


def write_document(name: str, out: Path, **beside: object) -> None:
    """The history of the current device so far, in the form of tests/golden/cuda_histories."""
    torch.cuda.synchronize()
    snapshot = torch.cuda.memory._snapshot()
    document = {
        "source": f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {name}",
        "allocator_settings": snapshot["allocator_settings"],
        **beside,
        "devices": [history_device(snapshot)],
    }
    with gzip.open(out, "wt") as file:
        json.dump(document, file, separators=(",", ":"))


def history_device(snapshot: dict[str, Any]) -> dict[str, Any]:
    """A device whose history is whole: nothing was there before the first event."""
    device = torch.cuda.current_device()
    trace = snapshot["device_traces"][device]
    kinds = sorted({event["action"] for event in trace})
    keys = "address", "total_size", "allocated_size", "active_size", "stream"
    segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
    events = [[kinds.index(event["action"]), event.get("addr", 0), event["size"], event["stream"]] for event in trace]
    return {
        "device": 0, "first_segments": [], "first_blocks": [], "kinds": kinds, "events": events,
        "last_segments": [[segment[key] for key in keys] for segment in segments],
    }  # fmt: skip


def run_part(part: str, out: Path) -> None:
    if part in HISTORIES:
        write_history(part, out)
        return
    if part == "refused":
        write_history("gpt-kept", out, REFUSED_LIMIT)
        return
    lines = {"first": first_lines, "refusal": refusal_lines}.get(part, lambda: part_lines(part))
    capability = "{}.{}".format(*torch.cuda.get_device_capability())
    where = {
        "torch": torch.__version__, "card": torch.cuda.get_device_name(), "capability": capability,
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "total": torch.cuda.get_device_properties(0).total_memory,
        "settings": os.environ.get("PYTORCH_ALLOC_CONF", ""),
    }  # fmt: skip
    with gzip.open(out, "wt") as file:
        file.write(json.dumps({"where": where}) + "\n")
        for line in lines():
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
            file.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder, or with --only a file")
    parser.add_argument("--only", choices=["first", "refusal", "refused", *HISTORIES, *PARTS])
    parser.add_argument("--parts", nargs="*", default=[], help="these parts alone, each in a process")
    asked = parser.parse_args()
    if asked.only:
        run_part(asked.only, asked.out)
        return 0
    asked.out.mkdir(parents=True, exist_ok=True)
    ended = [run_child(asked.out, "first", "default").wait()] if not asked.parts else []  # alone: the driver's share
    jobs = [(part, "default") for part in ("refusal", "refused", *HISTORIES, *PARTS)]
    jobs += [(part, setting) for setting in SETTINGS if setting != "default" for part in ("steps", "refusal")]
    jobs += [(part, "expandable") for part in ("refused", "gpt-kept", "gpt-recomputed")]
    jobs = [job for job in jobs if not asked.parts or job[0] in asked.parts]
    ended += [child.wait() for child in [run_child(asked.out, *job) for job in jobs]]
    print(f"{len(ended) - ended.count(0)} of {len(ended)} parts ended early")
    return int(any(ended))


def run_child(out: Path, part: str, setting: str) -> subprocess.Popen[bytes]:
    end = "json.gz" if part in HISTORIES or part == "refused" else "jsonl.gz"
    command = [sys.executable, "-m", "tests.gpu.programs", str(out / f"{part}-{setting}.{end}"), "--only", part]
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": SETTINGS[setting]} if SETTINGS[setting] else None
    return subprocess.Popen(command, cwd=ROOT, env=environment)


if __name__ == "__main__":
    sys.exit(main())
