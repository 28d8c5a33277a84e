"""The paper, reproduced: each study by the procedure that produced the published number, beside the method computed right.

    python -m ssla_paper precision sine
    python -m ssla_paper --all [--quick]

A study is a list of tasks, each seeded and independent, and a report over their records. A record is written when its task is
done, so a killed run goes on where it stopped and ends with the same tables.
"""
