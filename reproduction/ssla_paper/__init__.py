"""Reproduction of the paper: each study by the procedure that produced the published number, beside
the correct computation.

    python -m ssla_paper precision sine
    python -m ssla_paper --all [--quick]

A study is a list of tasks, each seeded and independent, and a report over their records. A record
is written when its task is done, so an interrupted run continues and ends with the same tables.
"""
