"""Training rows: checked and cast once, kept while they fit, read again where they do not."""

import pytest
import torch

from ssla.data import Batch, Rows, _split_columns, check_batch, open_source
from ssla.likelihoods.support import Classes, Real, RealVector
from support.bad_input import X as INPUTS
from support.bad_input import Y, assert_message, fit

X = torch.arange(10.0).reshape(10, 1)


class Counted:
    """Batches of 4, 0 and 6 rows, with the number of passes begun."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        for part in (slice(0, 4), slice(4, 4), slice(4, 10)):
            yield Batch(X[part], X[part, 0], None)


def rows(budget, size=lambda chunk: 8 * len(chunk)):
    return Rows(Counted(), lambda batch: 3, lambda part: 2 * part.y, size, budget)


@pytest.mark.parametrize(("budget", "passes"), [(80, 1), (79, 3), (0, 3)])
def test_chunks_are_kept_only_if_all_of_them_fit(budget, passes):
    found = rows(budget)
    for _ in range(3):
        chunks = list(found)
        assert [len(chunk) for chunk in chunks] == [3, 1, 3, 3]
        assert torch.equal(torch.cat(chunks), 2 * X[:, 0])
    assert found.source.passes == passes
    assert (found.kept is not None) == (passes == 1)


def test_a_size_of_none_keeps_nothing_and_half_a_pass_keeps_nothing():
    nothing, half = rows(80, size=lambda chunk: None), rows(80)
    assert torch.equal(torch.cat([x for _, x in nothing.read_chunks()]), X)
    next(iter(half))
    assert nothing.kept is None
    assert half.kept is None


@pytest.mark.parametrize("budget", [80, 79])
def test_a_change_applies_to_kept_and_to_read_chunks(budget):
    found = rows(budget)
    list(found)
    assert torch.equal(torch.cat(list(found.map_chunks(lambda chunk: chunk + 1))), 2 * X[:, 0] + 1)
    assert torch.equal(torch.cat(list(found)), 2 * X[:, 0])


def test_targets_are_checked_and_cast_by_their_kind():
    y, weights = torch.ones(3, 1), torch.ones(3)
    real = check_batch(Batch(X[:3], y, weights), Real(), 1)
    assert (real.y.shape, real.y.dtype, real.weights.dtype) == ((3,), torch.float64, torch.float64)
    assert real.x.dtype == torch.float32
    assert check_batch(Batch(X[:3], y, None), Classes(2), 2).y.dtype == torch.int64
    assert check_batch(Batch(X[:3], y, None), RealVector(), 1).y.shape == (3, 1)
    with pytest.raises(ValueError, match="finite"):
        check_batch(Batch(X[:3], y * torch.nan, None), Real(), 1)


def test_arrays_and_loaders_give_the_same_batches():
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, X[:, 0]), batch_size=4)
    assert torch.equal(
        torch.cat([batch.y for batch in open_source(loader)]),
        next(iter(open_source((X, X[:, 0])))).y,
    )


CASES = {
    "rows differ": (lambda: fit(data=(INPUTS, Y[:19])), r"x has 20 rows, but y has shape \(19,\)"),
    "negative weights": (
        lambda: fit(data=(INPUTS, Y, -torch.ones(20))),
        "Row weights must be finite and not negative",
    ),
    "weights of another length": (
        lambda: fit(data=(INPUTS, Y, torch.ones(3))),
        r"Row weights must have shape \(20,\)",
    ),
    "a bare tensor": (lambda: fit(data=INPUTS), "data is a Tensor.*Give a DataLoader"),
    "batches without targets": (
        lambda: fit(data=[INPUTS, INPUTS, INPUTS, INPUTS]),
        r"Each batch must be \(x, y\)",
    ),
    "text": (lambda: fit(data=([["a", "b", "c"]] * 20, Y)), "Expected numbers.*Encode text"),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case):
    assert_message(*CASES[case])


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ((1, 2), (1, 2, None)),
        ([1, 2, 3], (1, 2, 3)),
        ({"x": 1, "labels": 2}, (1, 2, None)),
        ({"a": 1, "b": 4, "y": 2, "weights": 3}, ({"a": 1, "b": 4}, 2, 3)),
    ],
)
def test_a_batch_is_split_into_inputs_targets_and_weights(item, expected):
    assert _split_columns(item) == expected
