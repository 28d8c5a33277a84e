"""What the appendix claims and does not show, for all methods: calibration of classes,
out-of-distribution inputs, shift, wrong labels, ablations and cost.

The paper has neither table, figure nor code for these, and all its experiments are regressions; so
data and settings are ours (scikit-learn's bundled sets, two moons, the paper's toy, a UCI table
where SSLA_DATA has it), and its statements are checked.
"""

from __future__ import annotations

from ssla_paper.robustness.study import Robustness

__all__ = ["Robustness"]
