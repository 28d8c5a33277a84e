"""`python -m ssla.tables.cli`."""

from ssla.tables.cli import main

main()
