"""A process on the imaginary card: what torch's CUDA build sees there, allocates, refuses and reads."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re

import pytest
from msgspec.structs import replace

from explorer.engine.imaginary.build import SOURCES, WANTS_MEMORY
from explorer.engine.imaginary.run import run_on
from explorer.engine.imaginary.torch_build import needs_of, torch_build
from explorer.errors import BadInput
from explorer.plan.card.cards import CARDS, capacity_bytes, parse_card
from explorer.record.card import Card


def has_cuda() -> bool:
    try:
        torch_build()
    except BadInput:
        return False
    return True


has_cuda_build = pytest.mark.skipif(not has_cuda(), reason="needs a CUDA build of torch: make card")


def values_on(card: Card, code: str, n_cards: int = 1, **variables: str) -> dict[str, object]:
    """The dictionary `out` that `code` fills on the card."""
    script = f"import json, torch\nout = {{}}\n{code}\nprint(json.dumps(out))"
    ran = run_on(card, ["-c", script], variables, n_cards=n_cards, capture=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "imaginary" not in ran.stderr and "no version information" not in ran.stderr, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.skipif(has_cuda(), reason="needs a CPU build of torch")
def test_a_build_without_cuda_is_refused_with_the_command_that_installs_the_other() -> None:
    with pytest.raises(BadInput) as refused:
        run_on(CARDS["h100"], ["-c", "pass"])
    release = importlib.metadata.version("torch").partition("+")[0]
    assert "built without CUDA" in str(refused.value) and f"torch=={release} --index-url" in str(refused.value)


@has_cuda_build
@pytest.mark.parametrize("name", ["t4", "rtx4090", "h100"])  # a process takes seconds, and the table is data
def test_torch_sees_the_card_of_the_table(name: str) -> None:
    card = CARDS[name]
    seen = values_on(
        card,
        "p = torch.cuda.get_device_properties(0)\n"
        "out.update(name=p.name, n_bytes=p.total_memory, capability=f'{p.major}.{p.minor}',"
        "free=torch.cuda.mem_get_info()[0], multiprocessors=p.multi_processor_count, count=torch.cuda.device_count())\n"
        "torch.sort(torch.randn(5000, device='cuda')); torch.cuda.synchronize()",  # cub asks for the kernel's version
    )
    assert (seen["name"], seen["n_bytes"], seen["capability"]) == (
        f"{card.name} (imaginary)",
        card.total_bytes,
        card.capability,
    )
    assert (seen["multiprocessors"], seen["count"]) == (card.multiprocessors, 1)
    assert seen["free"] == capacity_bytes(card)


@has_cuda_build
@pytest.mark.parametrize("options", ["", "expandable_segments:True"])
def test_a_card_refuses_what_it_has_not(options: str) -> None:
    card = replace(parse_card("24GiB"), options=options)
    seen = values_on(
        card,
        "def taken(gib): return torch.empty(gib << 30, dtype=torch.uint8, device='cuda')\n"
        "a, b = taken(8), taken(8)\n"
        "try: taken(8)\n"
        "except torch.OutOfMemoryError as error: out['text'] = str(error)\n"
        "del a\n"
        "c = taken(9)\n"
        "out['reserved'] = torch.cuda.memory_reserved(); del b, c; torch.cuda.empty_cache()\n"
        "out['free'], out['total'] = torch.cuda.mem_get_info()",
    )
    assert "Tried to allocate 8.00 GiB" in str(seen["text"]) and "total capacity of 24.00 GiB" in str(seen["text"])
    page_bytes = 20 << 20  # of an expandable segment
    assert 17 << 30 <= int(str(seen["reserved"])) < (17 << 30) + page_bytes
    assert seen["free"] == card.total_bytes - (800 << 20)


@has_cuda_build
def test_addresses_rise_and_reads_give_zeros_but_what_was_copied() -> None:
    seen = values_on(
        parse_card("h100"),
        "held = [torch.empty(24 << 20, dtype=torch.uint8, device='cuda') for _ in range(8)]\n"
        "addresses = [tensor.data_ptr() for tensor in held]\n"
        "out['rise'] = addresses == sorted(addresses)\n"
        "out['copied'] = torch.tensor([3, 1, 4]).cuda().cpu().tolist()\n"
        "computed = torch.ones(5, device='cuda') * 3\n"
        "out['computed'] = computed.cpu().tolist()\n"
        "out['nonzero'] = torch.nonzero(computed).shape[0]\n"
        "out['item'] = computed.sum().item()\n"
        "x = torch.tensor([2.5], device='cuda')\n"
        "for _ in range(300): x.mul_(2)\n"
        "out['much_later'] = x.item()",
    )
    assert seen == {
        "rise": True, "copied": [3, 1, 4], "computed": [0.0] * 5, "nonzero": 0, "item": 0.0, "much_later": 0.0
    }  # fmt: skip


@has_cuda_build
def test_two_cards_have_memory_of_their_own() -> None:
    seen = values_on(
        parse_card("t4"),
        "first = torch.empty(8 << 30, dtype=torch.uint8, device='cuda:0')\n"
        "second = torch.empty(8 << 30, dtype=torch.uint8, device='cuda:1')\n"
        "moved = first[:1024].to('cuda:1')\n"
        "out.update(count=torch.cuda.device_count(), device=moved.device.index,"
        "both=[torch.cuda.memory_reserved(0), torch.cuda.memory_reserved(1)])",
        n_cards=2,
    )
    assert seen == {"count": 2, "device": 1, "both": [8 << 30, (8 << 30) + (2 << 20)]}
    hidden = values_on(parse_card("t4"), "out['n'] = torch.cuda.device_count()", n_cards=2, CUDA_VISIBLE_DEVICES="1")
    assert hidden == {"n": 1}


CHECKS = {
    "all": "(x > 1).all()", "isfinite": "torch.isfinite(x[0, 0])", "all finite": "torch.isfinite(x).all()",
    "equal": "torch.equal(x, x)", "allclose": "torch.allclose(x, x)", "any": "torch.isnan(x).any()",
    "not finite": "~torch.isfinite(x[0, 0])", "compared": "x[0, 0] == 0", "later": "(held, x + 1)[0]",
    "least": "x.min() >= 0", "least later": "(x.min(), x + 1)[0] >= 0",
}  # fmt: skip
PASS = {"all", "isfinite", "all finite", "equal", "allclose", "least"}
OF_ONE = {
    "all": "(one > 1).all()", "function": "torch.all(one > 1)", "finite": "torch.isfinite(one).all()",
    "any": "(one > 1).any()", "isnan": "torch.isnan(one).any()", "of no axis": "(one[0] > 1).all()",
    "true": "torch._is_all_true(one == one)",
}  # fmt: skip
DRAWN = (
    "Categorical(row.softmax(-1))", "Categorical(logits=row)", "Normal(row, row.exp())", "Normal(0.0, row)",
    "Normal(one, one)", "MultivariateNormal(row, torch.eye(4, device='cuda'))", "Bernoulli(row.sigmoid())",
    "Beta(row.exp(), row.exp())", "Dirichlet(row.exp())", "Gamma(one, one)", "Uniform(one, one + 1)", "Poisson(one)",
)  # fmt: skip
"""Policies and codes of one example, of `torch.distributions`: each is sampled, and the sample has a probability."""
ARE_CHECKED = (
    "torch.distributions.Normal(x, x).rsample()", "torch.distributions.Categorical(logits=x).sample()",
    "torch.distributions.Dirichlet(x).rsample()", "x.repeat_interleave(x[0].long(), 0)", "torch.linalg.eig(x)",
    "nn.utils.clip_grad_norm_([nn.Parameter(x)], 1.0, error_if_nonfinite=True)", "torch.multinomial(x, 2)",
)  # fmt: skip


@has_cuda_build
def test_checks_that_values_are_valid_pass() -> None:
    lines = ["from torch import nn", "x = torch.rand(8, 8, device='cuda')", "held = (x > 1).all()"]
    lines += [f"out[{name!r}] = bool({check})" for name, check in CHECKS.items()]
    seen = values_on(parse_card("h100"), "\n".join([*lines, *ARE_CHECKED]))
    assert {name for name, passed in seen.items() if passed} == PASS


@has_cuda_build
def test_checks_of_one_example_pass_too() -> None:
    lines = [
        "from explorer.engine.imaginary.checks_of_one import checks_of_one",
        "row, one, held = torch.rand(1, 4, device='cuda'), torch.rand(1, device='cuda'), checks_of_one()",
        "held.__enter__()",
    ]
    lines += [f"out[{name!r}] = bool({check})" for name, check in OF_ONE.items()]
    for made in DRAWN:
        lines.append(f"d = torch.distributions.{made}; out[{made!r}] = bool(d.log_prob(d.sample()).isfinite().all())")
    seen = values_on(parse_card("h100"), "\n".join(lines))
    assert {name for name, passed in seen.items() if passed} == {*OF_ONE, *DRAWN} - {"any", "isnan"}


MATRICES = (
    "cholesky", "inv", "qr", "svd", "svdvals", "eigh", "eig", "pinv", "lu_factor", "ldl_factor", "slogdet",
)  # fmt: skip
SPARSE = ("s @ x", "s @ s", "s + s", "c @ x", "c @ x[0]", "c + c", "x.to_sparse()")


@has_cuda_build
def test_closed_libraries_of_matrices_ask_for_no_memory() -> None:
    """A question for memory without an answer leaves what was on the stack: terabytes, or a process that ends."""
    lines = ["x, several = torch.rand(8, 8, device='cuda'), torch.rand(40, 8, 8, device='cuda')"]
    lines += ["s = torch.eye(8, device='cuda').to_sparse()", "c = s.to_sparse_csr()"]
    lines += [f"torch.linalg.{name}({of})" for name in MATRICES for of in ("x", "several", "x.to(torch.complex64)")]
    lines += ["torch.linalg.lstsq(x, x)", "torch.linalg.ldl_solve(*torch.linalg.ldl_factor(x)[:2], x)", *SPARSE]
    seen = values_on(parse_card("h100"), "\n".join([*lines, "out['peak'] = torch.cuda.max_memory_allocated()"]))
    assert seen["peak"] < 80 << 20


@has_cuda_build
def test_each_question_for_memory_has_an_answer() -> None:
    asks = re.compile("(?i)buffersize|getworkspace|(workspace|reservespace|states|compressed|spmatget)size")
    bodies = "".join(path.read_text() for path in SOURCES.glob("*.c"))
    asked = {name for name in needs_of(torch_build()).functions if asks.search(name) and f" {name}(" not in bodies}
    assert len(asked) > 50
    assert not [name for name in asked if not any(re.fullmatch(rule, name) for rule, _, _ in WANTS_MEMORY)]


STEPS = """
from torch import nn
def peak(model, shape):
    optimizer = torch.optim.AdamW(model.cuda().parameters())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        result = model(torch.randn(*shape, device="cuda"))
        result = result[0] if isinstance(result, tuple) else result
        result.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated() - before
"""
LAYERS = {
    "linear": ("nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(64))", "8, 64"),
    "convolution": ("nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2))",
                    "2, 3, 16, 16"),
    "lstm": ("nn.LSTM(16, 32, 2, bidirectional=True, dropout=0.1)", "5, 2, 16"),
    "projected": ("nn.LSTM(16, 32, 2, proj_size=8)", "5, 2, 16"),
    "gru": ("nn.GRU(16, 32, batch_first=True)", "2, 5, 16"),
    "plain": ("nn.RNN(16, 32, bias=False)", "5, 2, 16"),
    "attention": ("nn.TransformerEncoderLayer(64, 4, batch_first=True)", "2, 8, 64"),
}  # fmt: skip


@has_cuda_build
def test_layers_train() -> None:
    lines = [f"out['{name}'] = peak({model}, ({shape}))" for name, (model, shape) in LAYERS.items()]
    seen = values_on(parse_card("a100-40gb"), "\n".join([STEPS, *lines]))
    assert seen.keys() == LAYERS.keys() and all(seen.values()), seen


@has_cuda_build
def test_weights_of_a_recurrent_layer_lie_in_one_buffer() -> None:
    """cuDNN says where each weight lies; torch moves the weights there, in an order that the stubs must know."""
    seen = values_on(
        parse_card("h100"),
        "layer = torch.nn.LSTM(16, 32, 2, bidirectional=True).cuda()\n"
        "storages = {p.untyped_storage().data_ptr() for p in layer.parameters()}\n"
        "n = sum(p.numel() for p in layer.parameters())\n"
        "out.update(storages=len(storages), bytes=next(layer.parameters()).untyped_storage().nbytes(), wanted=4 * n)",
    )
    assert seen["storages"] == 1 and seen["bytes"] == seen["wanted"]


@has_cuda_build
def test_a_graph_is_captured() -> None:
    seen = values_on(
        parse_card("h100"),
        "x = torch.zeros(1 << 20, device='cuda')\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph): y = x * 2\n"
        "graph.replay(); out['pools'] = len({tuple(s['segment_pool_id']) for s in torch.cuda.memory_snapshot()})",
    )
    assert seen == {"pools": 2}


@has_cuda_build
def test_the_process_that_started_it_is_left_alone() -> None:
    before = dict(os.environ)
    values_on(parse_card("h100"), "out['n'] = 1")
    assert dict(os.environ) == before
