"""A pipeline plan for other programs: stage lists, and the torchrun command with its script."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from pathlib import Path

from msgspec.structs import replace

from explorer.errors import InvalidPlan, UnreadableFile, message_of
from explorer.pipeline.plan.actions import to_csv
from explorer.pipeline.plan.schedules import rows_of
from explorer.plan.catalogue import source_path
from explorer.plan.export.target import ExportFormat
from explorer.record.base import from_json, to_json
from explorer.record.files import Export, PolicyFile
from explorer.record.graph import ModelRef
from explorer.record.run import PipelinePlan, RunSpec

SPEC_FILE = "run_spec.json"
SCRIPT_FILE = "run.sh"
RESULTS = "results"
NEEDS = (
    "A training script applies the policy before it splits the model, or to each stage with "
    "apply_policy(stage, policy, part=True). except_last, dropout keyed by microbatch, running statistics once a batch "
    "and the sum over tied weights are done by the explorer's engines; torch.distributed.pipelining does none of them."
)
"""Parts of a plan that lists of stages do not carry. The list has torchtitan's shape (module_fqns_per_model_part)."""
CHECKOUT = Path(__file__).resolve().parents[3]
"""The folder that the explorer is imported from, which works without an installation."""


def torchrun_command(spec: RunSpec, folder: Path) -> str:
    """The command for one machine; `run.sh` takes torchrun's options for several. Raises InvalidPlan."""
    _planned(spec)
    return f"sh {shlex.quote(str(folder / SCRIPT_FILE))}"


def run_files(spec: RunSpec) -> dict[str, str]:
    """By name, the files that a torchrun run needs, wherever they are unpacked. Raises InvalidPlan.

    A model that is a file goes with them, and the spec in the folder names it there.
    """
    plan, packed = _planned(spec), packed_model(spec.model)
    rows, files = rows_of(plan), {}
    if packed is not None:
        try:
            files[packed.name] = packed.read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = f"The model's file {packed} cannot be read: {message_of(error)}."
            raise InvalidPlan(why, hint="Ranks need its text.") from error
        _, colon, factory = spec.model.target.partition(".py:")
        target = f"{packed.name}:{factory}" if colon else packed.name
        spec = replace(spec, model=replace(spec.model, target=target))
    return {
        **files,
        SPEC_FILE: to_json(spec).decode() + "\n",
        SCRIPT_FILE: _script(len(rows), packed),
        "schedule.csv": to_csv(rows),
    }


def packed_model(model: ModelRef) -> Path | None:
    """The file of a model that is one; None for a package's module and a configuration."""
    path = source_path(model.target)
    return path if path.suffix == ".py" and path.is_file() else None


def _script(n_ranks: int, model: Path | None) -> str:
    # The imports of the model's file are found in its folder.
    beside = "" if model is None else f'\nexport PYTHONPATH="$PYTHONPATH:"{shlex.quote(str(model.resolve().parent))}'
    return f"""#!/bin/sh
# One rank a process, from wherever this folder lies. On several machines, copy it to each and tell torchrun more:
#   sh run.sh --nnodes N --node-rank R --nproc-per-node RANKS_HERE --master-addr FIRST_MACHINE
# Afterwards copy the results of all machines into one folder, and open it: pipeline MODEL --results FOLDER
#
# PYTHON=...               the interpreter, with torch and the explorer installed
# EXPLORER=...             the explorer's checkout, where it is not installed
# GLOO_SOCKET_IFNAME=...   the network interface (ip addr); left alone, the one that leads to the first machine
set -e
cd "$(dirname "$0")"
PYTHON="${{PYTHON:-{sys.executable}}}"
[ -x "$(command -v "$PYTHON")" ] || PYTHON=python
export PYTHONPATH="$PWD:${{EXPLORER:-{CHECKOUT}}}${{PYTHONPATH:+:$PYTHONPATH}}"{beside}
"$PYTHON" -c 'import sys, importlib.util as u; sys.exit(not (u.find_spec("torch") and u.find_spec("explorer")))' || {{
  echo "Error: $PYTHON has no torch or no explorer. Name others: PYTHON=python3 EXPLORER=/checkout sh run.sh" >&2
  exit 2
}}
exec "$PYTHON" -m torch.distributed.run --nproc-per-node {n_ranks} "$@" \\
  -m explorer.pipeline.engine.torchrun_rank {SPEC_FILE} --out {RESULTS}
"""


def report_file(folder: Path, rank: int | str) -> Path:
    """The RankReport of a rank in the folder of results."""
    return folder / f"rank-{rank}.msgpack"


def tensor_file(folder: Path, rank: int) -> Path:
    """Gradients and buffers of a rank's stages in the folder of results."""
    return folder / f"rank-{rank}.pt"


def run_key(spec: RunSpec) -> str:
    """The same for equal specs, wherever their model's file lies: ranks leave it in their results."""
    anywhere = replace(spec, model=replace(spec.model, target=""))
    return hashlib.sha256(to_json(anywhere)).hexdigest()[:16]


def read_spec(path: Path) -> RunSpec:
    """A run_spec.json. Raises UnreadableFile."""
    try:
        return from_json(path.read_bytes(), RunSpec)
    except OSError as error:
        raise UnreadableFile(
            f"{path} cannot be read: {error.strerror}.", hint="Write it with `pipeline --engine torchrun`."
        ) from error


def spec_beside(results: Path) -> RunSpec:
    """The spec of the run whose results lie in `results`. Raises UnreadableFile."""
    for folder in (results, results.parent):
        if (folder / SPEC_FILE).is_file():
            return read_spec(folder / SPEC_FILE)
    raise UnreadableFile(
        f"Neither {results} nor the folder above it holds {SPEC_FILE}: what ran there is not known.",
        hint=f"Copy the {SPEC_FILE} that lay beside run.sh to the results.",
    )


def _planned(spec: RunSpec) -> PipelinePlan:
    if spec.plan is None:
        raise InvalidPlan("The run has no pipeline plan.", hint="Choose stages, microbatches and a schedule.")
    return spec.plan


def to_stages(file: PolicyFile) -> Export:
    """JSON: one list of fqns a stage, in execution order. Raises InvalidPlan where the file has no plan."""
    text = json.dumps([list(blocks) for blocks in plan_in(file).stages], indent=2) + "\n"
    written_for = "torch.distributed.pipelining 2.13"
    return Export(target="stages", written_for=written_for, text=text, notes=(NEEDS,))


def plan_in(file: PolicyFile) -> PipelinePlan:
    """The pipeline plan of a policy file. Raises InvalidPlan where it has none."""
    if file.pipeline is None:
        raise InvalidPlan(
            "The policy file holds no pipeline plan.",
            hint="`python -m explorer pipeline MODEL --stages 4 --out FILE` writes one.",
        )
    return file.pipeline


ROWS = (ExportFormat(name="stages", title="stages, as lists of blocks", write=to_stages, suffix=".json"),)
