"""A table -> a predictive: columns to numbers, networks and trees, estimators, the command, the
report.

The second floor of the library. The core, from a trained network to a predictive, never imports it.
"""
