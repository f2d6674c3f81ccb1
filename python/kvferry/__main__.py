"""``python -m kvferry`` is the ``kvferry`` command."""

import sys

from kvferry.cli import main

if __name__ == "__main__":
    sys.exit(main())
