"""The `fedquilt` command as `python -m fedquilt.cli`."""

import sys

from fedquilt.cli import main

if __name__ == "__main__":
    sys.exit(main())
