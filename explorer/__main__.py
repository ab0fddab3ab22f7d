"""`python -m explorer`."""

import sys

try:
    from explorer.cli.main import main
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] == "explorer":
        raise
    sys.exit(
        f"The command line needs {error.name}: in a clone of Checkpoint Explorer, pip install '.[app]' or make app."
    )

main()
