"""A transformer from tables to numbers, as the estimators and the command encode them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import _check_feature_names_in, check_is_fitted

from ssla.tables.columns import Encoded, Plan, Table
from ssla.tables.columns.frames import table_of
from ssla.tables.estimators.inputs import (
    add_table_tags,
    column_names,
    plan_inputs,
    read_inputs,
    warn_of_unused,
)
from ssla.tables.estimators.whole_fits import all_or_nothing


class TableEncoder(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Data frames with numbers, texts, categories, booleans, dates and gaps -> numbers.

    The encoding is that of `ssla train` (see docs/tables.md): gaps are filled with the mean and
    marked in a second column, a category has one column for each of its 50 most frequent levels, a
    date is the number of days since the first, with sine and cosine of the year and of the day. A
    table of numbers without gaps stays as it is.

    `transform` has one answer for a gap that was not in the training table (the mean) and for an
    unknown category (zeros). The estimators of this package use the encoder themselves and average
    over such values instead: give them the data frame directly, or the rows that `encode` returns.

    Parameters
    ----------
    drop:
        Names of columns to leave out.
    codes:
        Whether a category with many levels becomes one column of codes, of which the networks of
        this package learn an effect each. Other models would read a code as a number.
    decimal, thousands:
        The marks of numbers that are texts, as in "1.234,5" with decimal="," and thousands=".".
        Without them the format is detected for each column.

    Attributes
    ----------
    plan_:
        What became of each column.  plan_.left_out: columns that are not used, with the reason.

    >>> TableEncoder().fit(frame).transform(frame)      # doctest: +SKIP
    """

    plan_: Plan

    def __init__(
        self,
        *,
        drop: Sequence[str] = (),
        codes: bool = False,
        decimal: str | None = None,
        thousands: str | None = None,
    ) -> None:
        """Store the parameters, which `fit` checks."""
        self.drop = drop
        self.codes = codes
        self.decimal = decimal
        self.thousands = thousands

    @all_or_nothing
    def fit(self, X: Any, y: Any = None, *, rows: np.ndarray | None = None) -> TableEncoder:
        """Make the plan of a table, and return the encoder.

        X: a data frame of pandas or polars, an array (n, d), or a `Table`. y is ignored.

        rows (n,) bool: those that decide the plan, for example the rows with a target; all if not
        given.
        """
        given = read_inputs(self, X, reset=True)
        if isinstance(given, Encoded):
            raise TypeError("These rows are encoded already. Give the table that they came from.")
        if len(self.drop) or self.decimal is not None or self.thousands is not None:
            given = self._table_with_marks(given).drop_columns(self.drop)
        self.plan_ = plan_inputs(self, given, rows, self.codes)
        if not isinstance(X, Table):  # who reads a file also sees what `plan_` left out
            warn_of_unused(self.plan_)
        return self

    def encode(self, X: Any) -> Encoded:
        """Return the numbers of the rows, and for each row which inputs were missing or unknown.

        Raises TableError for a missing column, or a cell of another kind.
        """
        check_is_fitted(self, "plan_")
        given = read_inputs(self, X, reset=False)
        if isinstance(given, Encoded):
            return given
        return self.plan_.encode(self._table_with_marks(given))

    def _table_with_marks(self, given: np.ndarray | Table) -> Table:
        """Return the table of the rows, read with the marks of numbers of this encoder."""
        table = table_of(given, column_names(self)) if isinstance(given, np.ndarray) else given
        return table.with_marks(self.decimal, self.thousands)

    def transform(self, X: Any) -> np.ndarray:
        """Return the numbers (n, width) of the rows X; errors are those of `encode`."""
        return self.encode(X).values

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """Return the names of the columns of numbers: `age`, `age: missing`, `colour=red`,
        `day: sine of the year`, …
        """
        check_is_fitted(self, "plan_")
        new_names = _check_feature_names_in(self, input_features)
        new_name = dict(zip(_check_feature_names_in(self), new_names, strict=True))
        names = [
            name
            for feature in self.plan_.features
            for name in replace(feature, name=str(new_name[feature.name])).encoded_names
        ]
        return np.array(names, dtype=object)

    def __sklearn_tags__(self) -> Any:
        """The tags of an estimator that reads tables."""
        return add_table_tags(super().__sklearn_tags__())
