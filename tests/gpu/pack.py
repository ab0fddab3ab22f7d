"""The wheels that a machine with torch and nothing else needs, into one folder: `python -m tests.gpu.pack FOLDER`.

python -m tests.gpu.pack wheels --python 3.12         here, where there is a registry
python -m pip install --no-index --find-links wheels --target site msgspec pyyaml     there
PYTHONPATH=site python -m tests.gpu
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

PACKAGES = (
    "msgspec==0.22.0",
    "pyyaml==6.0.3",
    "numpy==2.4.6",
    "graphviz==0.21",
    "torchviz==0.0.3",
    "platformdirs==4.14.5",
)
"""What the engine and the worker import besides torch; torchviz comes as a source and is packed as a wheel."""
LIMIT_BYTES = 30 * 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12")
    asked = parser.parse_args()
    pip = [sys.executable, "-m", "pip"]
    plain = [name for name in PACKAGES if not name.startswith("torchviz")]
    command = [
        *pip,
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        asked.python,
        "--dest",
        asked.folder,
    ]
    subprocess.run(
        [*command, "--platform", "manylinux2014_x86_64", "--platform", "manylinux_2_28_x86_64", *plain], check=True
    )
    viz = next(name for name in PACKAGES if name.startswith("torchviz"))
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", asked.folder, viz], check=True)
    n_bytes = sum(path.stat().st_size for path in asked.folder.glob("*.whl"))
    print(f"{asked.folder}: {n_bytes / 2**20:.1f} MiB in {len(list(asked.folder.glob('*.whl')))} wheels")
    if n_bytes > LIMIT_BYTES:
        sys.exit(
            f"The wheels take {n_bytes:,} bytes; the limit is {LIMIT_BYTES:,}. Leave numpy out where torch brought it."
        )


if __name__ == "__main__":
    main()
