"""`python -m explorer.engine.imaginary h100 train.py ARGS`: a command of Python on an imaginary card.

`h100` is a card's name or its memory (`24GiB`), `h100x2` two of them. `-c CODE` and `-m MODULE` work as for Python.
"""

from __future__ import annotations

import re
import sys

from explorer.engine.imaginary.run import run_on
from explorer.errors import BadInput
from explorer.plan.card.cards import parse_card


def main(argv: list[str]) -> int:
    if len(argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    text, *command = argv
    several = re.fullmatch(r"(.+)x(\d+)", text)
    name, n_cards = (several.group(1), int(several.group(2))) if several else (text, 1)
    try:
        return run_on(parse_card(name), command, n_cards=n_cards).returncode
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
