"""Arguments of estimators: parameters, targets, weights, and the models of other libraries."""

from datetime import date
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.neighbors import KNeighborsRegressor
from sklearn.tree import DecisionTreeRegressor

from ssla.tables.estimators.bases import (
    check_methods,
    fit_clone,
    fit_column_scaling,
    is_fitted,
    predict_numbers,
)
from ssla.tables.estimators.estimator import (
    copy_to_tensors,
    is_auto,
    read_flag,
    read_hidden_widths,
    read_number,
)
from ssla.tables.estimators.file_parts import check_class_count, check_scaling
from ssla.tables.estimators.regressor import varies_by_factors
from ssla.tables.estimators.row_weights import read_row_weights
from ssla.tables.estimators.targets import (
    check_labels_known,
    check_target_size,
    read_labels,
    read_numeric_target,
    refuse_masked_or_dates,
    refuse_masked_target,
)
from ssla.tables.estimators.whole_fits import restore_on_failure
from ssla.tables.networks.scaling import Scaling

X = np.arange(12.0).reshape(6, 2)
Y = X @ np.array([1.0, 2.0])


def parameters(**values):
    return SimpleNamespace(**values)


def test_auto_is_a_text_and_not_an_array():
    assert is_auto(parameters(members="auto"), "members")
    assert not is_auto(parameters(members=np.array(["auto", "auto"])), "members")


def test_flags_are_true_or_false():
    assert read_flag(parameters(tune=np.bool_(True)), "tune") is True
    with pytest.raises(ValueError, match="tune must be True or False, but is 'no'"):
        read_flag(parameters(tune="no"), "tune")


def test_widths_are_positive_whole_numbers():
    assert read_hidden_widths(8) == (8,)
    assert read_hidden_widths(np.array([4, 2])) == (4, 2)
    for wrong in (0, (4, -1), (True,), "50", (2.0,)):
        with pytest.raises(ValueError, match="hidden must be positive widths"):
            read_hidden_widths(wrong)


def test_numbers_are_finite_and_within_their_bound():
    assert read_number(parameters(a=2), "a", int, 2) == 2
    assert read_number(parameters(a=True), "a", int, 0, allow_bool=True) == 1
    for value, number_type, strict in [(2.5, int, False), (0, float, True), (np.inf, float, False)]:
        with pytest.raises(ValueError, match="a must be"):
            read_number(parameters(a=value), "a", number_type, 0, strict=strict)
    with pytest.raises(ValueError, match="a whole number of at least 0, but is True"):
        read_number(parameters(a=True), "a", int, 0)


def test_tensors_are_copies():
    values = np.zeros(2)
    (tensor,) = copy_to_tensors(values)
    tensor += 1
    assert not values.any()


def test_targets_vary_by_factors_if_none_is_negative_and_few_are_large():
    small = np.ones(100)
    assert varies_by_factors(np.append(small, 3.1))
    assert not varies_by_factors(np.append(small, 2.9))
    assert not varies_by_factors(np.append(small, [10.0, -1.0]))


def test_one_weight_is_that_of_every_row():
    assert read_row_weights(None, 3).tolist() == [1, 1, 1]
    assert read_row_weights(2, 3).tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match=r"must have shape \(3,\)"):
        read_row_weights([1.0, 2.0], 3)


def test_masked_targets_and_dates_are_refused():
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    with pytest.raises(ValueError, match="target y"):
        refuse_masked_target(masked)
    for y in (np.array(["2024-01-01"], dtype="M8[D]"), [date(2024, 1, 1)]):
        with pytest.raises(TypeError, match="holds dates, times or durations"):
            refuse_masked_or_dates(y)
    refuse_masked_or_dates(["a", "b"])


def test_targets_have_squares_that_are_normal_numbers():
    check_target_size(np.array([1e-140, 0.0]))
    for y in ([1e160, 1.0], [1e-160, 0.0]):
        with pytest.raises(ValueError, match="in another unit"):
            check_target_size(np.array(y))


def test_missing_labels_are_counted():
    check_labels_known(None)
    check_labels_known(["a", "b"])
    with pytest.raises(ValueError, match=r"1 labels of y are missing \(first: row 1\)"):
        check_labels_known(np.array(["a", None], dtype=object))


def test_a_numeric_target_is_one_column_of_numbers():
    assert read_numeric_target([1, 2]).dtype == np.float64
    with pytest.raises(ValueError, match="requires y to be passed"):
        read_numeric_target(None)
    with pytest.raises(ValueError, match="must be one target"):
        read_numeric_target(np.ones((3, 2)))


def test_labels_are_whole_numbers_or_texts():
    assert read_labels(["b", "a"]).tolist() == ["b", "a"]
    with pytest.raises(ValueError):
        read_labels([0.5, 1.5])


def test_a_failed_fit_leaves_the_attributes_as_they_were():
    class Model:
        @restore_on_failure
        def fit(self, fails):
            self.columns = 2
            self.classes = "new"
            if fails:
                raise KeyboardInterrupt
            return self

    model = Model()
    model.columns = 1
    with pytest.raises(KeyboardInterrupt):
        model.fit(True)
    assert vars(model) == {"columns": 1}
    assert model.fit(False).columns == 2


def test_models_are_recognised_as_fitted():
    assert not is_fitted(LinearRegression())
    assert is_fitted(LinearRegression().fit(X, Y))
    assert is_fitted(SimpleNamespace(is_fitted=lambda: True))
    assert not is_fitted("a text")


def test_a_base_needs_its_methods():
    check_methods("base", Ridge(), ("fit", "predict"))
    with pytest.raises(TypeError, match="base must have the methods fit and predict_proba"):
        check_methods("base", Ridge(), ("fit", "predict_proba"))


def test_a_clone_is_fitted_to_the_chosen_rows_with_a_drawn_seed():
    base = DecisionTreeRegressor()
    model = fit_clone(base, X, Y, np.ones(6), np.array([0, 1]), np.random.RandomState(0))
    assert not is_fitted(base)
    assert model.get_params()["random_state"] is not None
    assert set(model.predict(X)) == set(Y[:2])
    with pytest.raises(ValueError, match="does not take it"):
        fit_clone(KNeighborsRegressor(), X, Y, np.ones(6), None, np.random.RandomState(0))


def test_one_column_of_predictions_is_flat():
    one_target = LinearRegression().fit(X, Y[:, None])
    assert predict_numbers(one_target, X).shape == (6,)
    two_targets = LinearRegression().fit(X, np.stack([Y, -Y], 1))
    assert predict_numbers(two_targets, X).shape == (6, 2)


def test_columns_are_scaled_without_their_gaps():
    table = np.array([[0.0, 5.0, np.nan], [2.0, 5.0, np.nan], [np.nan, 5.0, np.nan]])
    scaling = fit_column_scaling(table, np.ones(3))
    assert scaling.shift.tolist() == [1, 5, 0]
    assert scaling.scale.tolist() == [1, 1, 1]
    assert fit_column_scaling(np.array([["a"]]), np.ones(1)) is None


def test_scalings_and_classes_of_files_are_checked():
    ones = torch.ones(2, dtype=torch.float64)
    check_scaling(Scaling(0 * ones, ones), 2)
    for scaling in (Scaling(ones, 0 * ones), Scaling(ones * torch.inf, ones)):
        with pytest.raises(ValueError, match="a scaling does not fit"):
            check_scaling(scaling, 2)
    check_class_count(np.array([0, 1]), 1)
    for classes, outputs in [([0, 1, 2], 1), ([0, 0], 1), ([0, 1], 3)]:
        with pytest.raises(ValueError, match="do not fit"):
            check_class_count(np.array(classes), outputs)
