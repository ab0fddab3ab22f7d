"""A pipeline plan for other programs: stage lists, torch's schedule CSV, and the torchrun command with its script."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from explorer.errors import InvalidPlan
from explorer.plan.schedule_text import to_csv
from explorer.plan.schedules import rows_of
from explorer.record.base import to_json
from explorer.record.plan import PipelinePlan
from explorer.record.policy_file import PolicyFile
from explorer.record.run import RunSpec

SPEC_FILE = "run_spec.json"
SCRIPT_FILE = "run.sh"
CSV_FILE = "schedule.csv"
RESULTS = "results"
CHECKOUT = Path(__file__).resolve().parents[2]
"""Where the explorer is imported from, also where nobody installed it."""


def to_stages(file: PolicyFile) -> str:
    """JSON: one list of fqns a stage, in execution order. Raises InvalidPlan where the file has no plan."""
    return json.dumps([list(blocks) for blocks in _plan(file).stages], indent=2) + "\n"


def to_schedule_csv(file: PolicyFile) -> str:
    """One line of actions a rank, as torch's runtime loads it. Raises InvalidPlan where the file has no plan."""
    return to_csv(rows_of(_plan(file)))


def torchrun_command(spec: RunSpec, folder: Path) -> str:
    """For one machine; `run.sh` takes torchrun's options for several. Raises InvalidPlan."""
    start, program = _command(spec, folder)
    return f"{start} {program}"


def _command(spec: RunSpec, folder: Path) -> tuple[str, str]:
    """How torchrun starts ranks, and what each of them runs."""
    n_ranks, here = len(rows_of(_planned(spec))), folder.resolve()
    program = ["-m", "explorer.engine.pipeline.rank_main", str(here / SPEC_FILE), "--out", str(here / RESULTS)]
    return f"torchrun --nproc-per-node {n_ranks}", shlex.join(program)


def run_files(spec: RunSpec, folder: Path) -> dict[str, str]:
    """By name, the files that a torchrun run needs. Raises InvalidPlan."""
    start, program = _command(spec, folder)
    script = (
        "#!/bin/sh\n"
        "# One rank a process. On several machines, run it on each with this folder in place, and tell torchrun more:\n"
        "#   sh run.sh --nnodes N --node-rank R --nproc-per-node RANKS_HERE --master-addr FIRST_MACHINE\n"
        "# Afterwards copy the results of all machines into one folder.\n"
        "set -e\n"
        f"cd {shlex.quote(str(Path.cwd()))}\n"
        f'export PYTHONPATH={shlex.quote(str(CHECKOUT))}"${{PYTHONPATH:+:$PYTHONPATH}}"\n'
        f'{start} "$@" {program}\n'
    )
    return {
        SPEC_FILE: to_json(spec).decode() + "\n",
        SCRIPT_FILE: script,
        CSV_FILE: to_csv(rows_of(_planned(spec))),
    }


def _planned(spec: RunSpec) -> PipelinePlan:
    if spec.plan is None:
        raise InvalidPlan("The run has no pipeline plan.", hint="Choose stages, microbatches and a schedule.")
    return spec.plan


def _plan(file: PolicyFile) -> PipelinePlan:
    if file.pipeline is None:
        raise InvalidPlan("The policy file holds no pipeline plan.", hint="Write it with `pipeline --out policy.yaml`.")
    return file.pipeline
