"""Options of model, policy and step, and the RunSpec made from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
from msgspec.structs import replace
from rich.markup import escape

from explorer.cli.command import say
from explorer.cli.worker import ask
from explorer.errors import BadInput, nearest
from explorer.jobs.client import Worker
from explorer.jobs.protocol import Describe
from explorer.jobs.run_file import step_in
from explorer.plan.budget_text import check_budget
from explorer.plan.card.cards import parse_card
from explorer.plan.catalogue import default_size, sizes_of
from explorer.plan.memory.next_step import next_step
from explorer.plan.names import listed
from explorer.plan.policy import read_policy
from explorer.plan.policy.presets import PRESETS
from explorer.plan.recognize import LORA_EXAMPLE, argument_value, lora_of, set_pairs
from explorer.plan.sizes import parse_bytes
from explorer.record.base import Record, limits
from explorer.record.card import Card
from explorer.record.files import PolicyFile, Reading
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.measurement import Measurement
from explorer.record.plan import Wish
from explorer.record.policy import KEEP_ALL
from explorer.record.run import N_REPEATS, Ranks, RunSpec

in_model, in_step, in_ranks, in_limits, in_output = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("Model", "Step", "Ranks", "Limits", "Output")
)
"""Options by their panel of `--help`."""


def bounded(kind: type[Record], name: str, *flags: str, panel: str | None = None, **options: Any) -> object:
    """An option within the limits of a record's field."""
    low, high = limits(kind, name)
    return typer.Option(*flags, min=low, max=high, rich_help_panel=panel, **options)


_number = partial(bounded, RunSpec, panel="Step")
_FORMS = f"A policy file, a pattern, or {', '.join(PRESETS)}."

Model = Annotated[
    str, typer.Argument(help="sample_models/gpt.py, path/file.py:factory, package.module:factory or hf:CONFIG.")
]
PolicyPath = Annotated[str, typer.Argument(metavar="policy.yaml", help="A policy file.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write to a file instead of stdout.")]
PolicyOut = Annotated[Path | None, in_output("--out", metavar="FILE", help="Write the policy file.")]
Predict = Annotated[bool, in_step("--predict", help="Predict every figure; allocate and run nothing.")]
PolicyName = Annotated[str, typer.Option("--policy", metavar="FILE|PRESET", help=_FORMS)]
Names = list[str] | None
"""Values of an option that may be repeated."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which variant of the model."""

    size: Annotated[str | None, in_model(help="Name in the file's SIZES; small where it has one.")] = None
    arguments: Annotated[Names, in_model("--set", metavar="NAME=VALUE", help="Argument of the factory.")] = None
    weights: Annotated[Path | None, in_model(metavar="FILE", help="Weights to begin from.")] = None
    seed: Annotated[int, bounded(RunSpec, "seed", panel="Model", help="Of parameters, batch and dropout.")] = 0

    def ref(self, target: str) -> ModelRef:
        """Reference of the model. Also a default size is named, so that runs refer to the same model as in the app.

        Raises BadInput for a `--set` that is not NAME=VALUE.
        """
        arguments = {name: argument_value(text) for name, text in set_pairs(self.arguments).items()}
        weights = "" if self.weights is None else str(self.weights.resolve())
        size = self.size or default_size(sizes_of(target))
        return ModelRef(target=target, size=size, arguments=arguments, weights=weights)


@dataclass(frozen=True, kw_only=True)
class ConditionOptions(ModelOptions):
    """The model, and the conditions of the run that hazards depend on."""

    device: Annotated[Literal["cpu", "cuda"], in_step()] = "cpu"
    autocast: Annotated[Literal["none", "bfloat16", "float16"], in_step()] = "none"
    mode: Annotated[Literal["train", "eval"], in_step()] = "train"
    frozen: Annotated[Names, in_step(metavar="BLOCK", help="Block whose parameters need no gradient.")] = None
    lora: Annotated[
        str | None,
        in_step(metavar="r=N,targets=A+B", help="Freeze the model and train LoRA adapters beside these Linear layers."),
    ] = None

    quantize: Annotated[
        str | None, in_step(metavar="nf4", help="With --lora: frozen Linear layers in four bits, as QLoRA does.")
    ] = None

    def spec(self, target: str) -> RunSpec:
        """The step with everything kept. Raises BadInput for options that say nothing, or nothing together."""
        conditions = {name: getattr(self, name) for name in ("seed", "device", "autocast", "mode")}
        if self.quantize and self.lora is None:
            raise BadInput("--quantize is about the frozen layers beside adapters.", hint=f"Add --lora. {LORA_EXAMPLE}")
        lora = None if self.lora is None else lora_of(self.lora, self.quantize or "none")
        return RunSpec(model=self.ref(target), frozen=tuple(self.frozen or ()), lora=lora, **conditions)


@dataclass(frozen=True, kw_only=True)
class StepOptions(ConditionOptions):
    """Options of the model and its step, named as in RunSpec."""

    dtype: Annotated[
        Literal["own", "float32", "float64", "bfloat16", "float16"],
        in_step(help="Of parameters and floating inputs; own: as the model is built."),
    ] = "own"
    optimizer: Annotated[Literal["adamw", "sgd", "adamw8bit", "none"], in_step(help="none: backward only.")] = "adamw"
    optimizer_form: Annotated[
        Literal["default", "for-loop", "foreach", "fused"], in_step(help="How torch computes it, as by foreach=True.")
    ] = "default"
    n_accumulation: Annotated[int, _number("n_accumulation", "--accumulate", help="Microbatches of a step.")] = 1
    holds_output: Annotated[
        bool | None,
        in_step("--hold-output/--drop-output", help="Whether the output is held to the end; by default on a GPU."),
    ] = None
    n_repeats: Annotated[int, _number("n_repeats", "--repeats", help="Timed steps.")] = N_REPEATS
    n_threads: Annotated[int, _number("n_threads", "--threads", help="CPU threads.")] = 1
    memory_limit: Annotated[str | None, in_limits(metavar="SIZE", help="Such as 1.5GiB; more is out of memory.")] = None
    time_limit_s: Annotated[
        float, bounded(RunSpec, "time_limit_s", "--time-limit", metavar="SECONDS", panel="Limits")
    ] = 600.0

    def spec(self, target: str) -> RunSpec:
        equal = ("dtype", "optimizer", "optimizer_form", "n_accumulation", "holds_output", "n_repeats", "n_threads")
        limit_bytes = None if self.memory_limit is None else parse_bytes(self.memory_limit)
        fields = {name: getattr(self, name) for name in (*equal, "time_limit_s")}
        return replace(super().spec(target), memory_limit_bytes=limit_bytes, **fields)


@dataclass(frozen=True, kw_only=True)
class CardStepOptions(StepOptions):
    """Options of a step that may be predicted without a run, for a GPU."""

    predict: Predict = False
    card: Annotated[
        str | None, in_step(metavar="NAME|SIZE", help="With --predict: what this GPU holds. Such as b200 or 24GiB.")
    ] = None
    allocator: Annotated[str, in_step(metavar="OPTIONS", help="PYTORCH_CUDA_ALLOC_CONF of the card.")] = ""
    torch: Annotated[
        str, in_step(metavar="VERSION", help="Torch of the card, such as 2.11; by default the installed one.")
    ] = ""
    n_steps: Annotated[
        int | None, bounded(Card, "n_steps", "--steps", panel="Step", help="Steps on the card, if they do not repeat.")
    ] = None

    def spec(self, target: str) -> RunSpec:
        spec = super().spec(target)
        if self.card is None and not (self.allocator or self.torch or self.n_steps):
            return spec
        if self.card is None or not self.predict:
            raise BadInput(
                "--card, --allocator, --torch and --steps are of a GPU, and this run does not predict for one.",
                hint="Add --predict --card b200, or leave them out.",
            )
        return replace(spec, card=self.parsed_card())

    def parsed_card(self) -> Card | None:
        """The card with its settings; None: none is named. Raises BadInput for a text that cannot be read."""
        if self.card is None:
            return None
        card = parse_card(self.card, self.allocator, self.torch)
        return card if self.n_steps is None else replace(card, n_steps=self.n_steps)


@dataclass(frozen=True, kw_only=True)
class RankStepOptions(CardStepOptions):
    """Options of a step that ranks may share."""

    n_ranks: Annotated[
        int | None, bounded(Ranks, "n_ranks", "--ranks", panel="Ranks", help="Processes, each with this batch.")
    ] = None
    fsdp: Annotated[bool, in_ranks("--fsdp", help="FSDP2. --fsdp 64 also says --ranks 64.")] = False
    ddp: Annotated[bool, in_ranks("--ddp", help="DistributedDataParallel.")] = False
    reshard: Annotated[
        bool | None,
        in_ranks("--reshard/--no-reshard", help="Free gathered parameters after forward (default), or keep them."),
    ] = None
    n_tensor: Annotated[int, bounded(Ranks, "n_tensor", "--tp", panel="Ranks", help="Ranks of a product.")] = 1
    parallelize: Annotated[
        str, in_ranks(metavar="FILE.py:FUNCTION", help="function(model, mesh) that splits it, instead of its own plan.")
    ] = ""

    def spec(self, target: str) -> RunSpec:
        spec = super().spec(target)
        if self.n_ranks is None and self.n_tensor == 1:
            if self.fsdp or self.ddp or self.parallelize:
                raise BadInput("--fsdp, --ddp and --parallelize split a step over ranks.", hint="Add --ranks 8.")
            return spec
        if self.fsdp and self.ddp:
            raise BadInput("A model is wrapped by --fsdp or by --ddp, not by both.", hint="Leave one of them out.")
        data: Literal["fsdp", "ddp", "none"] = "ddp" if self.ddp else "none"
        if self.fsdp:
            data = "fsdp"
        ranks = Ranks(
            n_ranks=self.n_ranks or self.n_tensor,
            data=data,
            reshard=self.reshard is not False,
            n_tensor=self.n_tensor,
            parallelize=self.parallelize,
        )
        return replace(spec, ranks=ranks)

    def with_policy(self, spec: RunSpec, file: PolicyFile) -> RunSpec:
        """`spec` under the policy of a file, and with its choice of resharding unless the command line makes one."""
        ranks = spec.ranks
        if ranks is not None and file.ranks is not None and self.reshard is None:
            ranks = replace(ranks, reshard=file.ranks.reshard)
        return replace(spec, policy=file.policy, ranks=ranks)


@dataclass(frozen=True, kw_only=True)
class KeepOptions:
    """Where the result is written."""

    save: Annotated[Path | None, in_output(metavar="FILE", help="Write the run to a file as well.")] = None
    no_store: Annotated[bool, in_output("--no-store", help="Keep the run out of the store of runs.")] = False


def recorded_step(name: str, options: ConditionOptions, *allowed: str) -> Measurement | None:
    """The step in a run file, or the step that follows a first one; None if `name` is no run file.

    Raises BadInput for `options` of another step than the recorded one, but for those whose fields are `allowed`.
    """
    step = step_in(name)
    if step is None:
        return None
    hints = get_type_hints(type(options), include_extras=True)
    typed = [
        _flag(field.name, hints[field.name].__metadata__[0])
        for field in fields(options)
        if field.name not in ("predict", *allowed) and getattr(options, field.name) != field.default
    ]
    if typed:
        raise BadInput(
            f"{name} is a recorded step, and {listed(typed)} would make another one.", hint="Leave that out."
        )
    return next_step(step)


def _flag(name: str, option: Any) -> str:
    """The flag of a field: Typer takes the first that an option names for its default."""
    names = [text for text in (option.default, *(option.param_decls or ())) if str(text).startswith("--")]
    return names[0].partition("/")[0] if names else f"--{name.replace('_', '-')}"


def describe(worker: Worker, spec: RunSpec, *, without_data: bool = False) -> ModelGraph:
    """The graph of the model of `spec`. Raises RunFailed."""
    n_ranks = 1 if spec.ranks is None else spec.ranks.n_ranks
    request = Describe(
        model=spec.model,
        seed=spec.seed,
        device=spec.device,
        without_data=without_data,
        n_ranks=n_ranks,
        conditions=spec.conditions,
    )
    graph = ask(worker, request)
    assert isinstance(graph, ModelGraph)
    return graph


def file_on(name: str, graph: ModelGraph) -> PolicyFile:
    """The policy of a preset, of blocks and patterns, or of a file on `graph`; a file may also bring its plan.

    Notes on the file go to stderr. Raises InvalidPolicy, UnreadableFile.
    """
    read = read_policy.named(name, graph)
    say_messages(read)
    return read.file


def say_messages(read: Reading) -> None:
    """Writes to stderr how a policy file differs from the model, and the blocks behind its patterns."""
    for sentence in read.messages:
        say(escape(sentence))


def check_frozen(frozen: Iterable[str], graph: ModelGraph) -> None:
    """Raises BadInput if a frozen name is neither a block nor a parameter."""
    names = {*graph.by_fqn, *(name for block in graph.blocks for name in block.own_parameters)}
    if strangers := [fqn for fqn in frozen if fqn not in names]:
        raise BadInput(
            f"--frozen names {', '.join(strangers)}; the model has no block or parameter of that name.",
            hint=nearest(strangers[0], names),
        )


def chosen_file(worker: Worker, name: str, spec: RunSpec, *, without_data: bool = False) -> PolicyFile:
    """The policy file by name. A model is described only if the policy depends on it; keep-all is equal on all models.

    Raises RunFailed, InvalidPolicy, UnreadableFile.
    """
    if name == "keep-all":
        return PolicyFile(policy=KEEP_ALL)
    return file_on(name, describe(worker, spec, without_data=without_data))


def size_limit(budget: str) -> int:
    """Bytes of a budget; says how it is read where that leaves room for doubt. Raises BadInput for shares and time."""
    wish = check_budget(budget)
    if not wish.budget_bytes or wish.more_time is not None:
        raise BadInput(f"The budget here is a size, and {budget!r} is none.", hint="Such as 8GiB.")
    say_how_read(budget, wish)
    return wish.budget_bytes


def say_how_read(budget: str, wish: Wish) -> None:
    """Says how --budget was read if its text leaves room for doubt."""
    if wish.understood:
        say(f"--budget {escape(budget)} is read as {escape(wish.understood)}.")
