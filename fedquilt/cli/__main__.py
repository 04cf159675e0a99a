"""`python -m fedquilt.cli` is the `fedquilt` command."""

import sys

from fedquilt.cli import main

if __name__ == "__main__":
    sys.exit(main())
