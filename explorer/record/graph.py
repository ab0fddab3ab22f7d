"""The structure of a model: its blocks, the data between blocks, legal cuts, and hazards.

A `ModelGraph` is the document. `Hazard` and the autograd drawings name its blocks.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from functools import cached_property
from typing import Annotated, Literal

import msgspec

from explorer.record.base import MOST, Count, Record

Trait = Literal[
    "uses_rng",  # draws from torch's default generators
    "own_generator",  # draws from a private generator object of torch, Python or numpy
    "python_rng",  # moves Python's `random`
    "numpy_rng",  # moves numpy's global generator
    "running_statistics",  # BatchNorm, or InstanceNorm that tracks
    "moves_buffers",  # changes a buffer that is not a running statistic
    "moves_attributes",  # changes a plain Python attribute (counter, cache, router loss)
    "keeps_graph",  # leaves a tensor with its autograd graph in an attribute or buffer
    "changes_inputs",  # writes into a tensor that it was given
    "keeps_cache",  # reads a list, dict or cache that it was handed and that changes while or after it runs
    "fills_inputs",  # changes such a thing without reading it
    "takes_stored",  # removes a tensor from an object that blocks share, which another call put there
    "stores_tensors",  # puts a tensor there that a later block removes
    "hidden_state",  # moves buffers of a module that is not registered
    "reads_statistics",  # computes with the running statistics that it moves
    "inputs_need_no_grad",  # no tensor among its arguments requires grad: reentrant checkpointing trains nothing
    "strided_inputs",  # in files of earlier versions: is given a dense tensor that does not lie row after row
    "nested_inputs",  # takes tensors that require grad inside a tuple, list or dict: reentrant does not see them
    "keyword_inputs",  # is called with keyword arguments, which torch's reentrant checkpointing refuses
    "nested_outputs",  # returns a dict, dataclass or nested structure
    "checkpoints_itself",  # the model runs it again for backward by its own means
    "replay_draws_again",  # torch_remat runs it again and sets no generator back
    "kept_region",  # in files of earlier versions: torch_remat keeps what it saves
    "replayed",  # in files of earlier versions: torch_remat runs it again, with the block around
    "checkpointing_layer",  # a layer that transformers can recompute by a flag of the layer
    "departs",  # run again after the forward, on equal arguments, it returns something else or fails
    "reads_late",  # its code reads a value that is another one after the forward: `late_reads`
    "moves_shared",  # changes data outside of all modules whenever it runs: `moved_shared`
    "rng_last",  # its last operation draws random numbers: early stop may skip what it stored
]


RECORDED = "recorded:"
Whole = Annotated[int, msgspec.Meta(ge=-MOST, le=MOST)]
Real = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]


class ModelRef(Record):
    """A reference to a model: `sample_models/gpt.py`, `path/file.py:factory`, `pkg.mod:factory` or `hf:CONFIG`."""

    target: str
    size: str | None = None
    """Name in the file's SIZES (`small`, `gpu`); None takes `small` where the file has sizes."""
    arguments: dict[str, Whole | Real | str | bool] = {}
    """Keyword arguments of the factory, over those of the size."""
    weights: str = ""
    """File with the weights to begin from; empty: those that the factory gives."""

    @property
    def is_recorded(self) -> bool:
        """`recorded:train.py:42`: the model of a step in a user's script. It cannot be loaded."""
        return self.target.startswith(RECORDED)


Autocast = Literal["none", "bfloat16", "float16"]
Mode = Literal["train", "eval"]
Dtype = Literal["own", "float32", "float64", "bfloat16", "float16"]
"""`own`: the model runs in the types that the factory builds, without a cast."""


class Lora(Record):
    """Low-rank adapters: the model is frozen, and each Linear that `targets` matches trains two thin matrices."""

    targets: str
    """Regular expression that matches whole fqns, as `target_modules` of peft."""
    rank: Count = 8
    quantize: Literal["none", "nf4"] = "none"
    """nf4: the frozen Linear layers but the last are held in four bits, as QLoRA does."""


class Conditions(Record):
    """The options of a step that decide what a forward saves for backward, and where a recompute stops."""

    mode: Mode = "train"
    dtype: Dtype = "own"
    """Type of parameters, buffers and floating inputs."""
    autocast: Autocast = "none"
    frozen: tuple[str, ...] = ()
    """fqns of blocks whose parameters need no gradient, blocks inside included."""
    lora: Lora | None = None
    chunked_layer: str = ""
    """fqn of the last layer, if it and the loss run over chunks of the batch."""


IN_TRAINING = Conditions()
"""The conditions of a usual training step."""


class Block(Record):
    """A module a person can toggle. Bytes and calls are those of one observed forward of the unwrapped model."""

    fqn: str
    """Dotted path; the empty string is the model itself."""
    kind: str
    """Class name."""
    n_calls: Count
    """Forward calls in one step; 0 means never called."""
    parameter_bytes: Count
    """Parameters at or below, each counted once."""
    buffer_bytes: Count
    output_bytes: Count
    """Bytes of the tensors one step's calls return, each storage once."""
    saved_bytes: Count
    """Bytes made in the block that autograd keeps for backward, saved by any operation, each storage once. Recomputing
    the block can free these bytes, and a measurement charges them to the block."""
    forward_flops: Count
    rerun_flops: Count
    """Part of `forward_flops` until the last tensor is saved: recompute with early stop runs no further."""
    op_flops: dict[str, int] = {}
    """`forward_flops` by operator; empty where there are FLOPs: operators were not observed."""
    late_op_flops: dict[str, int] = {}
    """The part of `op_flops` after the last saved tensor."""
    rewritten_ops: tuple[str, ...] = ()
    """Operators in the block whose results are written in place later: torch refuses to keep these (save_ops)."""
    last_saved_in: str = ""
    """The block, this block or a block inside, in which a call saves its last tensor; the empty string: unknown."""
    flops_before: Count | None = None
    """FLOPs of the model before the last call of this block; None: not called, or not observed."""
    outputs_saved_outside: tuple[bool, ...] = ()
    """For each storage that a call returns: true if operations outside the block save it. Empty: calls differ."""
    outputs_saved_in: tuple[tuple[str, ...], ...] = ()
    """The innermost blocks whose operations save each returned storage; the empty string is the model, or the loss."""
    inputs_saved_in: tuple[tuple[str, ...], ...] = ()
    """The innermost blocks whose operations save each storage among the inputs of a call."""
    inputs_in_containers: tuple[bool, ...] = ()
    """For each storage among the inputs of a call: true if it comes inside a tuple, list or object alone. Checkpoints
    hold these objects themselves. Empty: none does, or calls differ."""
    follows: str | None = None
    """The sibling before this block in a chain. Only this block uses the sibling's output, and its other inputs are
    inputs of the sibling. Both may be recomputed as one segment. Empty string: no sibling; None: not observed."""
    traits: tuple[Trait, ...] = ()
    late_reads: tuple[str, ...] = ()
    """Values that the code of the block reads and that differ once the forward is over, each with both values."""
    moved_shared: tuple[str, ...] = ()
    """Names of data outside of all modules that change whenever the block runs."""
    shares_parameters_with: tuple[str, ...] = ()
    repeat_of: str | None = None
    """First of a run of equal siblings in a container; None for the first itself and for the unique."""
    own_parameters: tuple[str, ...] = ()
    """Full names of the parameters registered on this very module."""

    @property
    def uses_rng(self) -> bool:
        return not {"uses_rng", "own_generator", "python_rng", "numpy_rng"}.isdisjoint(self.traits)

    @property
    def running_statistics(self) -> bool:
        return "running_statistics" in self.traits

    @property
    def parent(self) -> str | None:
        return None if not self.fqn else self.fqn.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.fqn.rpartition(".")[2]


class Join(Record):
    """A place where a block with children joins data itself: a residual addition, a gate, a concatenation."""

    id: str
    """Never an fqn: `blocks.0:add`."""
    block: str
    """fqn of the block that does it."""
    op: str


INPUT = ":input"
"""Source of edges that carry what the model is given. No fqn has a colon, no operator is called so."""


class Edge(Record):
    """Data that `source` made and `target` reads: fqns of blocks without operating children, ids of joins, or INPUT.

    What a block with children does to data from one place alone (an activation function) is no join: the data goes on.
    """

    source: str
    target: str
    n_bytes: Count
    n_tensors: Count = 1
    data: int | None = None
    """Edges of equal number carry the same tensors to several readers."""
    back: bool = False
    """Carried to a later call of a block that began earlier (a recurrent state)."""


class CutPoint(Record):
    """A place between two consecutive units of the model's block list where a pipeline could be split."""

    after: str
    """fqn of the last block before the cut."""
    before: str
    """fqn of the first block behind it."""
    n_bytes: Count
    """Bytes that cross, for the whole batch."""
    n_tensors: Count
    refusal: str | None = None
    """Why this cut cannot be made (a shared module, a skip of unknown form); None: it can."""


class ModelGraph(Record, rename={"chain": "spine"}):  # its name in documents
    """The block graph of one observed run. Blocks come in module order, the model itself first."""

    model: ModelRef
    blocks: tuple[Block, ...]
    edges: tuple[Edge, ...]
    joins: tuple[Join, ...] = ()
    cuts: tuple[CutPoint, ...] = ()
    chain: tuple[str, ...] = ()
    """The consecutive blocks that together are the model, in execution order: what presets and stages count."""
    input_shapes: tuple[tuple[Count, ...], ...] = ()
    batch: str = ""
    """Types and shapes of the batch, and whether the explorer made it; the empty string: not recorded."""
    dtype: str = "float32"
    n_parameters: Count = 0
    device: str = ""
    """Device of the observed forward; the empty string: not recorded."""
    note: str = ""
    """A remark if the forward was observed differently than requested, because memory was short."""
    conditions: Conditions = IN_TRAINING
    """Conditions of the observed forward. Of a recorded step they are not noted: its graph is observed in the step."""

    @cached_property
    def checkpointed_by_itself(self) -> tuple[str, ...]:
        """Blocks that the model runs again for backward."""
        return tuple(block.fqn for block in self.blocks if "checkpoints_itself" in block.traits)

    @cached_property
    def by_fqn(self) -> dict[str, Block]:
        return {block.fqn: block for block in self.blocks}

    @cached_property
    def children(self) -> dict[str, tuple[Block, ...]]:
        """Children of each fqn, in module order."""
        by_holder: dict[str, list[Block]] = {block.fqn: [] for block in self.blocks}
        for block in self.blocks:
            if block.parent is not None and block.parent in by_holder:
                by_holder[block.parent].append(block)
        return {fqn: tuple(blocks) for fqn, blocks in by_holder.items()}

    @property
    def outside_bytes(self) -> int:
        """Part of the model's saved bytes that its own operations make, outside of any block."""
        return max(0, self.by_fqn[""].saved_bytes - sum(block.saved_bytes for block in self.children[""]))

    @cached_property
    def saves_nothing(self) -> frozenset[str]:
        """Called blocks that save no tensor for backward: dropout of rate 0, or what runs without gradients.

        Empty if no block says where it saves: graphs of earlier versions do not.
        """
        any_saved = any(block.last_saved_in for block in self.blocks)
        return frozenset(
            block.fqn for block in self.blocks if any_saved and block.fqn and block.n_calls and not block.last_saved_in
        )

    @cached_property
    def norms(self) -> tuple[str, ...]:
        """Blocks without children that have running statistics."""
        return tuple(block.fqn for block in self.blocks if block.running_statistics and not self.children[block.fqn])

    @cached_property
    def next_in_turn(self) -> dict[str, str]:
        """The next sibling that can be recomputed with a block as one segment, by block."""
        followers = {
            block.follows: block.fqn for block in self.blocks if block.follows and not self._is_chain(block.parent)
        }
        for fqn, children in self.children.items():
            if self._is_chain(fqn) and self.by_fqn[fqn].n_calls:
                followers.update((before.fqn, after.fqn) for before, after in zip(children, children[1:]))
        return followers

    def _is_chain(self, fqn: str | None) -> bool:
        return fqn in self.by_fqn and self.by_fqn[fqn].kind == "Sequential"

    @cached_property
    def repeats(self) -> tuple[str, ...]:
        """The blocks that presets count: numbered blocks of the chain with a sibling of the same kind. Without such
        blocks: blocks of the chain that a step calls several times, or else the whole chain."""
        numbered = [self.by_fqn[fqn] for fqn in self.chain if self.by_fqn[fqn].name.isdigit()]
        kinds = Counter((block.parent, block.kind) for block in numbered)
        kin = tuple(block.fqn for block in numbered if kinds[block.parent, block.kind] > 1)
        called_often = tuple(fqn for fqn in self.chain if self.by_fqn[fqn].n_calls > 1)
        return kin or called_often or self.chain

    @cached_property
    def repeated(self) -> frozenset[str]:
        """`repeats`, to look up one block among thousands."""
        return frozenset(self.repeats)

    @cached_property
    def fingerprint(self) -> str:
        """Changes when names, kinds or parameters change; does not depend on the batch. 16 hex digits."""
        shape = [(block.fqn, block.kind, block.parameter_bytes, block.buffer_bytes) for block in self.blocks]
        return hashlib.sha256(msgspec.json.encode(shape)).hexdigest()[:16]


class AutogradPicture(Record):
    """A graph of grad_fn nodes."""

    dot: str
    n_nodes: int
    n_saved_tensors: int
    saved_bytes: int


class AutogradPictures(Record):
    """The same block kept and recomputed."""

    block: str
    kept: AutogradPicture
    recomputed: AutogradPicture


class Hazard(Record):
    """A hazard found by a rule. `check` prints the hazard, the page draws it as a badge on its blocks."""

    rule: str
    """Short name, such as `running-statistics`."""
    severity: Literal["error", "warning", "note"]
    """error: wrong or refused for certain. warning: wrong under some conditions. note: worth knowing."""
    blocks: tuple[str, ...]
    sentence: str
    remedy: str
