"""``python -m manyheads``: the same as the ``manyheads`` command."""

import sys

from manyheads.cli import main

if __name__ == "__main__":
    sys.exit(main())
