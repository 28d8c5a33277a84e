"""`python -m ssla.cli`."""

from ssla.cli import main

main()
