"""A rank started by torchrun: its number comes from the environment, its plan from run_spec.json.

    torchrun --nproc-per-node 4 -m explorer.pipeline.engine.torchrun_rank run_spec.json --out results/

No process watches these ranks, so each rank keeps the time limit and writes its failure into the results.
"""

from __future__ import annotations

import argparse
import os
import socket
import struct
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from explorer.errors import Cancelled, ExplorerError, InvalidPlan
from explorer.pipeline.engine.rank import failed_report, join, run_rank, write_report
from explorer.pipeline.plan.export import SPEC_FILE, read_spec, report_file, tensor_file
from explorer.pipeline.plan.schedules import rows_of
from explorer.record.base import to_json
from explorer.record.run import RunSpec

COULD_NOT_RUN = 2
_IP_OF_INTERFACE = 0x8915
"""Linux: SIOCGIFADDR."""


def main() -> None:
    """Exit code 2 where the run could not start, 1 where this rank failed."""
    parser = argparse.ArgumentParser(description="One rank of a pipelined run.")
    parser.add_argument("spec", type=Path, help="run_spec.json, as `pipeline --engine torchrun` writes it")
    parser.add_argument("--out", type=Path, required=True, help="folder for the ranks' results")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    try:
        spec = read_spec(options.spec)
        check_world(spec, int(os.environ["WORLD_SIZE"]))
    except ExplorerError as error:
        end(error, COULD_NOT_RUN)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    for old in (report_file(out, rank), tensor_file(out, rank)):
        old.unlink(missing_ok=True)
    (out / SPEC_FILE).write_bytes(to_json(spec))
    os.environ.update(network(os.environ))
    limit = threading.Timer(spec.time_limit_s, out_of_time, (spec, rank, out))
    limit.daemon = True
    limit.start()
    announced = [""]
    """Announcements of the rank: the last entry is its action, or empty while the rank waits."""
    try:
        join(spec, int(os.environ["LOCAL_RANK"]), timeout=timedelta(seconds=spec.time_limit_s))
        run_rank(spec, out, announced.append)
    except Exception as error:
        write_report(failed_report(spec, rank, error, announced[-1]), out)
        raise
    finally:
        limit.cancel()
        with suppress(Exception):  # a group that never stood
            dist.destroy_process_group()


def check_world(spec: RunSpec, n_processes: int) -> None:
    """Raises InvalidPlan where torchrun started another number of ranks than the plan has."""
    n_ranks = len(rows_of(spec.plan)) if spec.plan is not None else 0
    if n_processes != n_ranks:
        raise InvalidPlan(
            f"The plan has {n_ranks} ranks, and torchrun started {n_processes} processes.",
            hint=f"Let --nproc-per-node of all machines add up to {n_ranks}.",
        )


def network(environment: Mapping[str, str]) -> dict[str, str]:
    """gloo's interface for ranks on several machines, unless the environment has one: the interface to the first rank.

    By default gloo takes the address of the host's name, which many machines resolve to themselves.
    """
    import fcntl  # not on every system, and this is for several machines

    several = environment["WORLD_SIZE"] != environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"])
    if not several or "GLOO_SOCKET_IFNAME" in environment:
        return {}
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((environment["MASTER_ADDR"], int(environment["MASTER_PORT"])))  # nothing is sent
        address_here = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                address = fcntl.ioctl(probe, _IP_OF_INTERFACE, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(address[20:24]) == address_here:
                    return {"GLOO_SOCKET_IFNAME": name}
    return {}


def out_of_time(spec: RunSpec, rank: int, out: Path) -> NoReturn:
    """The time limit, kept by the rank itself: a peer that is gone would let it wait for ever."""
    error = Cancelled(
        f"Rank {rank} was still at work when the limit of {spec.time_limit_s:g} s was reached.",
        hint="Raise --time-limit, or look at the other ranks: this one may have waited for them.",
    )
    write_report(failed_report(spec, rank, error), out)
    end(error, 1)


def end(error: ExplorerError, code: int) -> NoReturn:
    """Prints the error to stderr and ends the process. With sys.exit, threads of the transport would wait for ever."""
    print(f"Error: {error}", file=sys.stderr, flush=True)
    os._exit(code)


if __name__ == "__main__":
    main()
