"""``python -m asyncloader.cli``."""

from asyncloader.cli import main

main()
