"""X as numbers, or as a table if it has gaps, texts, categories or dates."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils.validation import validate_data

from ssla._checks import warn
from ssla.tables.columns import Encoded, Plan, Table, make_plan
from ssla.tables.columns.frames import has_only_numbers, is_frame, replace_masked, table_of

Rows = np.ndarray | Table | Encoded
"""X after its first reading: numbers (n, d) without gaps, a table, or encoded rows."""


def read_inputs(estimator: Any, X: Any, reset: bool, least: int = 1) -> Rows:
    """Return X after its first reading: numbers without gaps, a table, or encoded rows.

    X is a data frame of pandas or polars, an array or nested lists; infinite values are refused,
    masked values are gaps. A `Table` has its columns by name, and `Encoded` rows have their plan:
    both are returned as they are.

    reset: whether names and number of the columns are remembered (at the fit) or compared. least:
    the fewest rows. Raises ValueError for other columns, for fewer rows, and for infinite values.
    """
    if isinstance(X, Table | Encoded):
        if reset:
            _remember_columns(estimator, X)
            _check_row_count(X, least)
        return X
    X = replace_masked(X)
    checks = {"reset": reset, "ensure_all_finite": "allow-nan", "ensure_min_samples": least}
    if is_frame(X):
        if not has_only_numbers(X):
            # scikit-learn compares the columns; the cells are read by this library.
            validate_data(estimator, X, reset=reset, skip_check_array=True)
            _check_row_count(X, least)
            return table_of(X, column_names(estimator))
    else:
        objects = _array_of_objects(X)
        if objects is not None:
            objects = validate_data(estimator, objects, dtype=None, **checks)
            return table_of(objects, column_names(estimator))
    numbers: np.ndarray = validate_data(estimator, X, dtype=np.float64, order="C", **checks)
    if not bool(np.isnan(numbers).any()):
        return numbers
    return table_of(X if is_frame(X) else numbers, column_names(estimator))


def _remember_columns(estimator: Any, X: Table | Encoded) -> None:
    """Set the attributes that `validate_data` sets for a data frame: the columns of a table, or
    those of a plan that are inputs.
    """
    names = X.names if isinstance(X, Table) else [feature.name for feature in X.plan.features]
    estimator.feature_names_in_ = np.array(names, dtype=object)
    estimator.n_features_in_ = len(names)


def _check_row_count(X: Any, least: int) -> None:
    """Raise ValueError, in the words of scikit-learn, for fewer rows than `least`."""
    if len(X) < least:
        shape = getattr(X, "shape", (len(X),))
        raise ValueError(
            f"Found array with {len(X)} sample(s) (shape={shape}) while a minimum of {least} is "
            "required."
        )


def column_names(estimator: Any) -> list[str]:
    """Return the names of the training columns; x0, x1, … if they had none, as in scikit-learn."""
    names = getattr(estimator, "feature_names_in_", None)
    if names is None:
        return [f"x{i}" for i in range(estimator.n_features_in_)]
    return [str(name) for name in names]


def plan_inputs(
    estimator: Any, rows: np.ndarray | Table, kept: np.ndarray | None = None, codes: bool = False
) -> Plan:
    """Return the plan of the kept rows (n,) bool; all if not given. Numbers without gaps (n, d) are
    encoded as themselves.

    codes: see `make_plan`. Raises TableError if no column is usable.
    """
    if isinstance(rows, np.ndarray):
        return make_plan(table_of(rows, column_names(estimator)), set(), kept, keep_constants=True)
    return make_plan(rows, set(), kept, codes=codes)


def warn_of_unused(plan: Plan) -> None:
    """Warn of columns that the plan leaves out, unless they are constant."""
    unused = {name: why for name, why in plan.left_out.items() if why != "constant"}
    if unused:
        reasons = "; ".join(f"{name!r} ({why})" for name, why in unused.items())
        warn(
            f"Some columns are not used as inputs: {reasons}. Group the values of texts, or leave "
            "these columns out."
        )


def _array_of_objects(X: Any) -> np.ndarray | None:
    """Return an array of objects (n, d) if X has cells that are not numbers; None if X is an array
    of numbers, or nothing that scikit-learn accepts, which then raises its own error.
    """
    try:
        array = np.asarray(X)
        if array.ndim != 2 or array.dtype.kind not in "OUSmM":
            return None
        if array.dtype.kind in "mM":
            return array.astype(f"{array.dtype.kind}8[us]").astype(object)
        try:
            array.astype(np.float64)
        except (TypeError, ValueError):
            # Nested lists keep the types of their cells, which an array of texts would lose.
            return np.array(X if isinstance(X, list | tuple) else array, dtype=object)
    except (TypeError, ValueError):
        pass
    return None


def add_table_tags(tags: Any) -> Any:
    """Return scikit-learn's tags of an estimator that reads tables: gaps and categories, but
    nothing sparse.
    """
    tags.input_tags.allow_nan = tags.input_tags.categorical = True
    tags.input_tags.sparse = False
    return tags
