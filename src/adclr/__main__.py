"""`python -m adclr` is the command `adclr`."""

from adclr.cli import main

main()
