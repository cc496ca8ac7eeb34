"""``python -m asyncloader``: the command ``asyncloader``."""

from asyncloader.cli import main

main()
