"""A posterior as one graph from x to its answers, for programs without ssla: ONNX, or torch.export.

The graph holds the network (in its own dtype), the mean and covariance of the last layer as
constants, and the predictive of the output refit in float64. Integrals have fixed nodes, and
iterations a fixed number of steps (unrolled), because a graph cannot decide by values.
`exported_files` compares every file with the library before it is kept.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ssla.data import Inputs, as_inputs, row_count
from ssla.files.exporting.exported_files import Exported, checked_levels, write_graph
from ssla.files.exporting.graph import Graph, check_exportable
from ssla.predictive import predict

if TYPE_CHECKING:
    from ssla.posterior import Posterior

__all__ = ["LEVELS", "Exported", "export"]

LEVELS = (0.05, 0.5, 0.95)


def export(
    posterior: Posterior,
    path: str | os.PathLike[str],
    levels: Sequence[float] = LEVELS,
    example: Any = None,
) -> Exported:
    """Write the graph of a posterior to a file; see Posterior.export for arguments and errors."""
    check_exportable(posterior)
    x = posterior.network.cast(_choose_example_inputs(posterior, example))
    graph = Graph(posterior, x, checked_levels(levels))
    facts = {"likelihood": posterior.report.likelihood, "rows": posterior.report.n}
    return write_graph(path, graph, x, lambda: predict(posterior, x), facts)


def _choose_example_inputs(posterior: Posterior, example: Any) -> Inputs:
    """Return the given rows x, or those of the first batch of the training data.

    example: rows, or None. Raises ValueError if there are no rows.
    """
    if example is not None:
        x = as_inputs(example)
    elif posterior.source is not None:
        x = next(iter(posterior.source)).x
    else:
        raise ValueError(
            "export needs example inputs, because this posterior does not hold its training data "
            "(it was loaded, or fitted to a stream). Give some rows: posterior.export(path, "
            "example=x)."
        )

    if not row_count(x):
        raise ValueError("export needs at least one example row, but the example is empty.")
    return x
