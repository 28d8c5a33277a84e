"""Reads X as numbers, or as a table if it has gaps, texts, categories or dates."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils.validation import validate_data

from ssla._checks import warn
from ssla.tables.columns import Encoded, Plan, Table, make_plan
from ssla.tables.columns.frames import has_only_numbers, is_frame, make_table, replace_masked

Rows = np.ndarray | Table | Encoded
"""X after its first reading: numbers (n, d) without gaps, a table, or encoded rows."""


def read_inputs(estimator: Any, X: Any, reset: bool, least: int = 1) -> Rows:
    """Return X after its first reading: numbers without gaps, a table, or encoded rows.

    X is a data frame of pandas or polars, an array or nested lists. Masked values are gaps. A
    `Table` and `Encoded` rows are returned as they are.

    reset: True at a fit, which stores the names and the number of the columns in the estimator.
    False later, when they are compared with the stored columns.  least: the fewest rows. Raises
    ValueError for other columns, for fewer rows, and for infinite values.
    """
    # The plan compares the columns of later tables and encoded rows.
    if isinstance(X, Table | Encoded):
        if reset:
            _store_columns(estimator, X)
            _check_row_count(X, least)
        return X

    X = replace_masked(X)
    checks = {"reset": reset, "ensure_all_finite": "allow-nan", "ensure_min_samples": least}
    if is_frame(X):
        if not has_only_numbers(X):
            # scikit-learn stores or compares the columns, and this library reads the cells.
            validate_data(estimator, X, reset=reset, skip_check_array=True)
            _check_row_count(X, least)
            return make_table(X, list_column_names(estimator))
    else:
        objects = _convert_to_objects(X)
        if objects is not None:
            objects = validate_data(estimator, objects, dtype=None, **checks)
            return make_table(objects, list_column_names(estimator))

    numbers: np.ndarray = validate_data(estimator, X, dtype=np.float64, order="C", **checks)
    if not bool(np.isnan(numbers).any()):
        return numbers
    return make_table(X if is_frame(X) else numbers, list_column_names(estimator))


def _store_columns(estimator: Any, X: Table | Encoded) -> None:
    """Set the names and the number of the columns, as `validate_data` does for a data frame.

    These columns are those of a table, or those that the plan of encoded rows uses.
    """
    names = X.names if isinstance(X, Table) else [feature.name for feature in X.plan.features]
    estimator.feature_names_in_ = np.array(names, dtype=object)
    estimator.n_features_in_ = len(names)


def _check_row_count(X: Any, least: int) -> None:
    """Raise ValueError for fewer rows than `least`, with the text of scikit-learn's own error."""
    if len(X) < least:
        shape = getattr(X, "shape", (len(X),))
        raise ValueError(
            f"Found array with {len(X)} sample(s) (shape={shape}) while a minimum of {least} is "
            "required."
        )


def list_column_names(estimator: Any) -> list[str]:
    """Return the names of the training columns; x0, x1, … if they had none, as in scikit-learn."""
    names = getattr(estimator, "feature_names_in_", None)
    if names is None:
        return [f"x{i}" for i in range(estimator.n_features_in_)]
    return [str(name) for name in names]


def plan_inputs(
    estimator: Any, rows: np.ndarray | Table, kept: np.ndarray | None = None, codes: bool = False
) -> Plan:
    """Return the plan by which columns become numbers, made from the kept rows (n,) bool.

    estimator: has the names of the columns.  rows: numbers without gaps, or a table.  kept: None is
    all rows.  codes: whether categories with many levels become codes, see `make_plan`.
    The plan of numbers without gaps (n, d) encodes them as themselves. Raises TableError if no
    column is usable.
    """
    no_names: set[str] = set()  # no column is left out by its name
    if isinstance(rows, np.ndarray):
        return make_plan(
            make_table(rows, list_column_names(estimator)), no_names, kept, keep_constants=True
        )
    return make_plan(rows, no_names, kept, codes=codes)


def warn_of_unused_columns(plan: Plan) -> None:
    """Warn of columns that the plan leaves out, unless they are constant."""
    unused = {name: why for name, why in plan.left_out.items() if why != "constant"}
    if unused:
        reasons = "; ".join(f"{name!r} ({why})" for name, why in unused.items())
        warn(
            f"Some columns are not used as inputs: {reasons}. Group the values of texts, or leave "
            "these columns out."
        )


def _convert_to_objects(X: Any) -> np.ndarray | None:
    """Return X as an array of objects (n, d) if it has cells that are not numbers.

    The result is None if all cells can be read as numbers. It is also None if X is not an array of
    two dimensions, for which scikit-learn then raises its own error.
    """
    try:
        array = np.asarray(X)
        kind = array.dtype.kind
        # These kinds are objects, texts, bytes, durations and dates.
        if array.ndim != 2 or kind not in "OUSmM":
            return None
        # In microseconds they become Python's own dates; nanoseconds would become integers.
        if kind in "mM":
            return array.astype(f"{kind}8[us]").astype(object)
        if _can_be_floats(array):
            return None
        # Nested lists keep the types of their cells, which an array of texts would lose.
        return np.array(X if isinstance(X, list | tuple) else array, dtype=object)
    except (TypeError, ValueError):  # X is not an array: scikit-learn's check says why
        return None


def _can_be_floats(array: np.ndarray) -> bool:
    """Return whether all cells of an array can be converted to floats."""
    try:
        array.astype(np.float64)
    except (TypeError, ValueError):
        return False
    return True


def add_table_tags(tags: Any) -> Any:
    """Set scikit-learn's tags of an estimator that reads tables, in place, and return them.

    Such an estimator takes gaps and categories, but no sparse matrices.
    """
    tags.input_tags.allow_nan = True
    tags.input_tags.categorical = True
    tags.input_tags.sparse = False
    return tags
