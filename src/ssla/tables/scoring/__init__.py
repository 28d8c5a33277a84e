"""Predictions of saved models as columns, a bounded number of rows at a time.

`ssla.Scorer` and the command share this code.
"""

from __future__ import annotations

from ssla.tables.scoring.scorer import Scorer

__all__ = ["Scorer"]
