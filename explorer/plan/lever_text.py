"""Rows of levers in words: cells of a table, the answer as text, and the lines for the user's script.

levers.py has the levers and their order. Terminal, page and notebook print the same cells.
"""

from __future__ import annotations

import math

from explorer.plan.card.cards import capacity_bytes
from explorer.plan.levers import BY_KEY, RECOMPUTE, price
from explorer.plan.names import in_columns, outermost, some
from explorer.plan.sizes import mib
from explorer.record.fit import Fit, LeverRow, PlayedStep
from explorer.record.plan import PCIE_4
from explorer.record.policy import Policy
from explorer.record.run import RunSpec

MINUS = "\N{MINUS SIGN}"
_OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(model.parameters(), lr=lr{form})",
    "sgd": "torch.optim.SGD(model.parameters(), lr=lr, momentum={momentum:g}{form})",
    "adamw8bit": "bitsandbytes.optim.AdamW8bit(model.parameters(), lr=lr)",
}
_FORMS = {"for-loop": ", foreach=False", "foreach": ", foreach=True", "fused": ", fused=True"}
_FOUR_BITS_OF_HUB = (
    "model = {factory}quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=True, "
    'bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16))'
)
_FOUR_BITS = """\
for name, layer in [*model.named_modules()]:
    if isinstance(layer, torch.nn.Linear) and re.fullmatch(r"{targets}", name):
        four_bits = bitsandbytes.nn.Linear4bit(
            layer.in_features, layer.out_features, layer.bias is not None, torch.bfloat16, quant_type="nf4"
        )
        four_bits.load_state_dict(layer.state_dict())
        model.set_submodule(name, four_bits)
model = model.to("{device}")  # packs them"""


def title(row: LeverRow) -> str:
    """`SGD instead of AdamW + recompute h.0, h.1`."""
    return " + ".join(_title(key, row.step.spec) for key in row.levers)


def _title(key: str, spec: RunSpec) -> str:
    if key != RECOMPUTE:
        return BY_KEY[key].title
    return f"recompute {some(outermost(spec.policy.blocks)) or 'no block'}"


def row_cells(row: LeverRow, as_is: PlayedStep) -> dict[str, str]:
    """The row of a table: figures by their heading."""
    step = row.step
    on_card = {} if step.reserved_bytes is None else {"reserved": mib(step.reserved_bytes)}
    ratio = price(step, as_is)
    return {
        "lever": title(row),
        "peak": mib(_peak_bytes(step)),
        **on_card,
        "saved": mib(as_is.needed_bytes - step.needed_bytes),
        "FLOPs": "not counted" if ratio == math.inf else f"{ratio - 1:+.1%}".replace("%", " %").replace("-", MINUS),
        "fits": "yes" if step.fits else "no",
        "gradients": _effect_text(row),
    }


def _peak_bytes(step: PlayedStep) -> int:
    return step.step_peak_bytes if step.allocated_bytes is None else step.allocated_bytes


def _effect_text(row: LeverRow) -> str:
    judgement = row.judgement
    if judgement.effect in ("bitwise", "not judged") or judgement.distance is None:
        return judgement.effect
    share = f"{judgement.distance:.0%}".replace("%", " %")
    if judgement.distance < 0.01:
        share = f"{judgement.distance:.0e}"
    return f"{judgement.effect} by {share}"


def table_text(fit: Fit) -> str:
    """The step as it is, the rows in columns, and the line of each row for the user's script."""
    lines = [f"As it is: {as_is_text(fit)}"]
    lines += in_columns([row_cells(row, fit.as_is) for row in fit.rows])
    lines += [line for row in fit.rows for line in script_lines(row)]
    return "\n".join([*lines, *(f"Left out: {each.lever}. {each.reason}" for each in fit.left_out)])


def as_is_text(fit: Fit) -> str:
    """`217.0 MiB, which does not fit in 150.0 MiB`."""
    step, card = fit.as_is, fit.as_is.spec.card
    peak = mib(_peak_bytes(step))
    if step.reserved_bytes is not None:
        peak += f" of tensors, {mib(step.reserved_bytes)} reserved"
    rooms = [] if fit.budget_bytes is None else [mib(fit.budget_bytes)]
    rooms += [] if card is None else [f"{card.name} ({mib(capacity_bytes(card))} for the allocator)"]
    return f"{peak}, which {'fits' if step.fits else 'does not fit'} in {' and '.join(rooms) or 'this machine'}"


def judged_text(fit: Fit) -> str:
    """The step that was run to judge."""
    if fit.as_is.spec.model.is_recorded:
        return "nothing: a recorded step is not run again"
    if fit.judged_on is None:
        return "nothing: no size of the model can be run here in a few seconds"
    model = fit.judged_on.model
    size = f" of size {model.size}" if model.size else ""
    arguments = "".join(f", {name}={value}" for name, value in model.arguments.items())
    same = fit.judged_on.model == fit.as_is.spec.model
    judged = "the same model" if same else f"{model.target}{size}{arguments}"
    return f"two real steps of {judged} on this CPU; a difference is a share of the gradient's norm"


def script_lines(row: LeverRow) -> tuple[str, ...]:
    """The lines of the user's script that switch the levers of a row on."""
    spec = row.step.spec
    optimizer = _OPTIMIZERS.get(spec.optimizer, "").format(
        momentum=spec.momentum, form=_FORMS.get(spec.optimizer_form, "")
    )
    device = "cuda" if spec.card is not None else spec.device
    target = spec.model.target
    of_hub = target.startswith("hf:")
    factory = "type(model).from_pretrained(name, " if of_hub else f"{target.partition(':')[2] or 'build'}("
    words = {"optimizer": optimizer, "device": device, "n": spec.n_accumulation, "factory": factory}
    words["options"] = spec.card.options if spec.card is not None else ""
    words["last"] = spec.chunked_layer
    words["frozen"] = tuple(f"{name}." for name in spec.frozen)
    words["policy"] = _policy_code(spec.policy)
    words["host"] = _host_text(row.step)
    if spec.lora is not None:
        words |= {"rank": spec.lora.rank, "targets": spec.lora.targets}
        words["four_bits"] = (_FOUR_BITS_OF_HUB if of_hub else _FOUR_BITS).format_map(words)
    lines = []
    for key in row.levers:
        if key == RECOMPUTE:
            lines.append(f"explorer.apply_policy(model, {words['policy']})")
        else:
            lines += BY_KEY[key].line.format_map(words).splitlines()
    return tuple(lines)


def _host_text(step: PlayedStep) -> str:
    """`12.0 MiB on the host; copies take 0 (beside the step) to 0.8 ms at 31.5 GB/s, the rate of PCIe 4.0 x16`."""
    most_ms = 1e3 * (step.moved_bytes or 0) / PCIE_4
    on_cpu = ""
    if step.spec.card is None and step.spec.device == "cpu":
        on_cpu = "On a GPU: "
    return (
        f"{on_cpu}{mib(step.host_peak_bytes or 0)} on the host; copies take 0 (beside the step) to {most_ms:.2g} ms at "
        f"{PCIE_4 / 1e9:g} GB/s, the published rate of PCIe 4.0 x16"
    )


def _policy_code(policy: Policy) -> str:
    """The policy as an expression of Python; a plan changes no option of a policy."""
    if all(unit.action == "recompute" for unit in policy.units):
        names = [unit.blocks[0] if len(unit.blocks) == 1 else unit.blocks for unit in policy.units]
        return f"explorer.Policy.recompute({names})"
    units = [f"explorer.Unit(blocks={u.blocks}, action={u.action!r}, save_ops={u.save_ops})" for u in policy.units]
    return f"explorer.Policy(units=[{', '.join(units)}])"
