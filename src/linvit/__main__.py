"""`python -m linvit` is `linvit`."""

import os
import sys

from linvit.cli import main

if __name__ == "__main__":
    if sys.path[0] == os.getcwd():  # as for the command, which adds the current folder itself where it is needed
        del sys.path[0]
    sys.exit(main())
