"""`python -m linvit` is `linvit`."""

import sys

from linvit.cli import main

if __name__ == "__main__":
    sys.exit(main())
