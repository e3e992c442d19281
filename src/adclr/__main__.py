"""`python -m adclr` is the command `adclr`, and what torchrun starts."""

import os
import sys

from adclr.cli import main

if __name__ == "__main__":
    main()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Python's end can abort a process of a group ("terminate called without an active exception", in 2 of 4 runs of
        # all tests), likely by killing a thread of torch that waits for Python's lock. All is written by now.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
