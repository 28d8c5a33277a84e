"""The experiment as the paper's text states it, beside the correct computation."""

from ssla_paper.stated.study import Stated

__all__ = ["Stated"]
