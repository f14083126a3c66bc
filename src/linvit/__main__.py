"""Makes `python -m linvit` equivalent to `linvit`."""

import os
import sys

from linvit.cli import main

if __name__ == "__main__":
    if sys.path[0] == os.getcwd():  # as for the command, which adds the current folder itself where necessary
        del sys.path[0]
    sys.exit(main())
