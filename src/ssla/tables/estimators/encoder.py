"""A transformer from tables to numbers, which encodes as the estimators and the command do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import _check_feature_names_in, check_is_fitted

from ssla.tables.columns import Encoded, Plan, Table
from ssla.tables.columns.frames import make_table
from ssla.tables.estimators.inputs import (
    add_table_tags,
    list_column_names,
    plan_inputs,
    read_inputs,
    warn_of_unused_columns,
)
from ssla.tables.estimators.whole_fits import restore_on_failure


class TableEncoder(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Encodes data frames with numbers, texts, categories, booleans, dates and gaps as numbers.

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

    @restore_on_failure
    def fit(self, X: Any, y: Any = None, *, rows: np.ndarray | None = None) -> TableEncoder:
        """Make the plan of a table, and return the encoder.

        X: a data frame of pandas or polars, an array (n, d), or a `Table`.  y is ignored: it is
        part of scikit-learn's interface.  rows (n,) bool: those that decide the plan, for example
        the rows with a target; None: all rows.

        Raises TableError if no column can be used or a dropped one does not exist, ValueError for
        other unusable rows, and TypeError for rows that are encoded already.
        """
        inputs = read_inputs(self, X, reset=True)
        if isinstance(inputs, Encoded):
            raise TypeError("These rows are encoded already. Give the table that they came from.")
        if len(self.drop) or self.decimal is not None or self.thousands is not None:
            inputs = self._make_table_with_marks(inputs).drop_columns(self.drop)
        self.plan_ = plan_inputs(self, inputs, rows, self.codes)

        # A `Table` comes from the command, which shows the unused columns itself.
        if not isinstance(X, Table):
            warn_of_unused_columns(self.plan_)
        return self

    def encode(self, X: Any) -> Encoded:
        """Return the numbers of the rows, and for each row which inputs were missing or unknown.

        Rows that are encoded already are returned as they are. Raises TableError for a missing
        column or a cell of another kind, and NotFittedError before `fit`.
        """
        check_is_fitted(self, "plan_")
        inputs = read_inputs(self, X, reset=False)
        if isinstance(inputs, Encoded):
            return inputs
        return self.plan_.encode(self._make_table_with_marks(inputs))

    def _make_table_with_marks(self, inputs: np.ndarray | Table) -> Table:
        """Return the rows as a table that reads numbers with the marks of this encoder."""
        table = (
            make_table(inputs, list_column_names(self))
            if isinstance(inputs, np.ndarray)
            else inputs
        )
        return table.with_marks(self.decimal, self.thousands)

    def transform(self, X: Any) -> np.ndarray:
        """Return the numbers (n, width) of the rows X, with the errors of `encode`."""
        return self.encode(X).values

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """Return the names of the columns of numbers (width,), such as `age` and `colour=red`.

        Others are `age: missing` and `day: sine of the year`.  input_features: names of the d
        columns of X in place of those at the fit, if X had none there. Raises ValueError for names
        that differ from those of the fit, and NotFittedError before `fit`.
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
        """Return the tags of an estimator that reads tables."""
        return add_table_tags(super().__sklearn_tags__())
