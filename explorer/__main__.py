"""`python -m explorer`."""

import gc
import sys

gc.set_threshold(100_000)  # the search of imported modules for garbage took a quarter of the process's time
try:
    try:
        from explorer.cli.main import main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "explorer":
            raise
        sys.exit(
            f"The command line needs {error.name}: in a clone of Checkpoint Explorer, pip install '.[app]' or make app."
        )
    main()
except KeyboardInterrupt:  # before a verb begins; a verb answers Ctrl-C by itself
    sys.stderr.write("Error: Cancelled.\n")
    sys.exit(2)
