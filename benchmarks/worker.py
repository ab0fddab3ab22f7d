"""From a click on Run to the first progress, with a cold and a warm worker, and what the pipe costs the worker.

cold     the worker starts and takes the job; torch loads then
warm     the process waits with torch loaded
CPU      that of a job's process, over the CPU time of the same verb called a second time in one process
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from explorer.jobs.client import Job, Worker
from explorer.jobs.protocol import Describe, Measure
from explorer.record.graph import ModelRef
from explorer.record.run import RunSpec

MODEL = ModelRef(target="sample_models/mlp.py", arguments={})
N_COLD, N_WARM = 3, 15
DIRECT = """
import time
from explorer.engine.bench.measure import measure
from explorer.record.graph import ModelRef
from explorer.record.plan import silent
from explorer.record.run import RunSpec
spec = RunSpec(model=ModelRef(target="sample_models/mlp.py"))
measure(spec, silent)
before = time.process_time()
measure(spec, silent)
print(time.process_time() - before)
"""


def first_progress_ms(worker: Worker) -> float:
    """From submit to the first event of the job, in the app's eyes."""
    began = time.perf_counter()
    job = worker.submit(Describe(model=MODEL), keep=False)
    while not (job.began or job.finished):
        time.sleep(0.001)
    elapsed_ms = (time.perf_counter() - began) * 1000
    finish(job)
    return elapsed_ms


def finish(job: Job) -> None:
    job.wait()
    if job.failure is not None:
        sys.exit(f"{job.failure.sentence}\n{job.failure.traceback}")


def jobs_cpu_s(worker: Worker) -> float:
    """User and system time of all jobs so far: the fork server counts what its dead children took."""
    assert worker._forks is not None and worker._forks.pid is not None
    fields = Path(f"/proc/{worker._forks.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Prints medians and a ratio."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "runs.sqlite"
        cold = []
        for _ in range(N_COLD):
            worker = Worker(store)
            cold.append(first_progress_ms(worker))
            worker.close()
        worker = Worker(store)
        first_progress_ms(worker)
        finish(worker.submit(Measure(spec=RunSpec(model=MODEL))))
        warm = [first_progress_ms(worker) for _ in range(N_WARM)]
        finish(worker.submit(Describe(model=MODEL)))  # the next job begins when the last one is buried
        before = jobs_cpu_s(worker)
        finish(worker.submit(Measure(spec=RunSpec(model=MODEL))))
        finish(worker.submit(Describe(model=MODEL)))
        through_pipe_s = jobs_cpu_s(worker) - before
        worker.close()
    direct = subprocess.run([sys.executable, "-c", DIRECT], capture_output=True, text=True, check=True)
    print(f"click to first progress, cold: median {statistics.median(cold):.0f} ms of {N_COLD}")
    print(f"click to first progress, warm: median {statistics.median(warm):.1f} ms of {N_WARM}, goal <= 700 ms")
    print(f"CPU time of measure through the worker / called directly: {through_pipe_s / float(direct.stdout):.2f}")


if __name__ == "__main__":
    main()
