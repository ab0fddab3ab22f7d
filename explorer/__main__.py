"""`checkpoint-explorer` and `python -m explorer`."""

import gc
import sys

from explorer.errors import brings


def main() -> None:
    """Runs the command line. A missing library and Ctrl-C are one sentence each."""
    gc.set_threshold(100_000)  # the search of imported modules for garbage took a quarter of the process's time
    try:
        try:
            from explorer.cli.main import main as run_command
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] == "explorer":
                raise
            sys.exit(f"The command line needs {error.name}: {brings(error.name)}.")
        run_command()
    except KeyboardInterrupt:  # before a verb begins; a verb answers Ctrl-C by itself
        sys.stderr.write("Error: Cancelled.\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
