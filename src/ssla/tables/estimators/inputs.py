"""X as numbers, or as a table if it has gaps, texts, categories or dates."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils.validation import validate_data

from ssla._checks import warn
from ssla.tables.columns import Encoded, Plan, Table, make_plan
from ssla.tables.columns.frames import is_frame, is_plain, table_of, with_gaps

SMALLEST_TARGET, LARGEST_TARGET = 1e-150, 1e150  # whose squares are normal numbers


def check_target_size(y: np.ndarray) -> None:
    """Refuse targets (n,) or (n, D) whose variance would be zero or infinite in double
    precision.
    """
    largest = np.atleast_1d(np.abs(y).max(0))
    wrong = largest[(largest > LARGEST_TARGET) | (largest < SMALLEST_TARGET)]
    if wrong.size:
        raise ValueError(
            f"The target y must have values between {SMALLEST_TARGET:g} and {LARGEST_TARGET:g} in "
            f"size, but its largest is {wrong.flat[0]:.3g}: its variance would be zero or infinite "
            "in double precision. Give y in another unit."
        )


Rows = np.ndarray | Table | Encoded
"""X after its first reading: numbers (n, d) without gaps, a table, or encoded rows."""


def read_inputs(estimator: Any, X: Any, reset: bool, least: int = 1) -> Rows:
    """Numbers without gaps, a table, or encoded rows.

    X is a data frame of pandas or polars, an array or nested lists; infinite values are refused,
    masked values are gaps. A `Table` has its columns by name, and `Encoded` rows have their plan:
    both are returned as they are.

    reset: whether names and number of the columns are remembered (at the fit) or compared.
    """
    if isinstance(X, Table | Encoded):
        if reset:
            _remember_columns(estimator, X)
            _check_count(X, least)
        return X
    X = with_gaps(X)
    checks = {"reset": reset, "ensure_all_finite": "allow-nan", "ensure_min_samples": least}
    rows = X if is_frame(X) else _array(X)
    if is_frame(rows) and not is_plain(rows):
        validate_data(estimator, rows, reset=reset, skip_check_array=True)
        _check_count(rows, least)
        return table_of(rows, column_names(estimator))
    if not is_frame(rows) and rows is not X and rows.dtype.kind == "O":
        return table_of(
            validate_data(estimator, rows, dtype=None, **checks), column_names(estimator)
        )
    numbers: np.ndarray = validate_data(estimator, X, dtype=np.float64, order="C", **checks)
    if not bool(np.isnan(numbers).any()):
        return numbers
    return table_of(X if is_frame(X) else numbers, column_names(estimator))


def _remember_columns(estimator: Any, X: Table | Encoded) -> None:
    """What `validate_data` remembers of a frame: the columns of a table, or those of a plan that
    are inputs.
    """
    names = X.names if isinstance(X, Table) else [feature.name for feature in X.plan.features]
    estimator.feature_names_in_ = np.array(names, dtype=object)
    estimator.n_features_in_ = len(names)


def _check_count(X: Any, least: int) -> None:
    """ValueError, in the words of scikit-learn, for fewer rows."""
    if len(X) < least:
        shape = getattr(X, "shape", (len(X),))
        raise ValueError(
            f"Found array with {len(X)} sample(s) (shape={shape}) while a minimum of {least} is "
            "required."
        )


def column_names(estimator: Any) -> list[str]:
    """Those of the training frame; x0, x1, … if it had none, as scikit-learn names them."""
    names = getattr(estimator, "feature_names_in_", None)
    return (
        [f"x{i}" for i in range(estimator.n_features_in_)]
        if names is None
        else [str(name) for name in names]
    )


def plan_of(
    estimator: Any, rows: np.ndarray | Table, kept: np.ndarray | None = None, codes: bool = False
) -> Plan:
    """The plan of the kept rows (n,) bool. That of numbers without gaps encodes them as themselves.

    codes: see `make_plan`.
    """
    if isinstance(rows, np.ndarray):
        return make_plan(table_of(rows, column_names(estimator)), set(), kept, constants=True)
    return make_plan(rows, set(), kept, codes=codes)


def warn_of_unused(plan: Plan) -> None:
    """A warning for columns that are left out, unless they are constant."""
    unused = {name: why for name, why in plan.left_out.items() if why != "constant"}
    if unused:
        reasons = "; ".join(f"{name!r} ({why})" for name, why in unused.items())
        warn(
            f"Some columns are not used as inputs: {reasons}. Group the values of texts, or leave "
            "these columns out."
        )


def _array(X: Any) -> Any:
    """An array of objects (n, d) if X has cells that are not numbers; otherwise X itself, also
    where scikit-learn refuses it.
    """
    try:
        array = np.asarray(X)
        if array.ndim != 2 or array.dtype.kind not in "OUSmM":
            return X
        if array.dtype.kind in "mM":
            return array.astype(f"{array.dtype.kind}8[us]").astype(object)
        try:
            array.astype(np.float64)
        except (TypeError, ValueError):
            return np.array(X if isinstance(X, list | tuple) else array, dtype=object)
    except (TypeError, ValueError):
        pass
    return X


def of_tables(tags: Any) -> Any:
    """scikit-learn's tags of an estimator that reads tables: gaps and categories, but nothing
    sparse.
    """
    tags.input_tags.allow_nan = tags.input_tags.categorical = True
    tags.input_tags.sparse = False
    return tags
