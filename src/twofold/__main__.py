"""`python -m twofold` is the command `twofold`."""

import sys

from twofold.cli import main

if __name__ == "__main__":
    sys.exit(main())
