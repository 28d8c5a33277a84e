"""How inputs reach the private copy: integers, lengths, columns, no rows."""

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from support.plain_network import FIT, Tokens, X, Y, net, numbers


class IdsAndNumbers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(7, 1)
        self.double()

    def forward(self, ids, x):
        return self.head(torch.cat([self.table(ids), x], 1))


class Scaled(nn.Module):
    """Takes integers as well as fractions."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1).double()

    def forward(self, x):
        return self.head(x.double() / 255)


@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_integers_at_predict_are_cast_to_the_models_dtype(weights):
    post = ssla.fit(net(), (X, Y), weights=weights, **FIT)
    whole = torch.arange(12).reshape(4, 3)
    expected = post.predict(whole.double())
    for x in (whole, whole.int(), whole.tolist(), whole.numpy()):
        assert torch.equal(post.predict(x).variance, expected.variance)
    assert torch.equal(
        post.predict(whole % 2 == 0).mean, post.predict((whole % 2 == 0).double()).mean
    )


def test_integers_stay_integers_where_they_were_at_fit():
    ids = torch.arange(120).reshape(30, 4) % 6
    post = ssla.fit(Tokens(), (ids, Y), **FIT)
    expected = post.predict(ids[:5]).mean
    for x in (ids[:5].int(), ids[:5].double(), ids[:5].float()):
        assert torch.equal(post.predict(x).mean, expected)
    with pytest.raises(
        ValueError,
        match=r"failed on the inputs x \(N, 4\) of torch.float64.*indices are whole numbers",
    ):
        post.predict(ids[:5] + 0.5)
    with pytest.raises(
        ValueError,
        match=r"failed on the inputs x \(N, 4\) of torch.int64: index out of range.*their emb",
    ):
        post.predict(ids[:5] + 3)
    both = ssla.fit(IdsAndNumbers(), ((ids[:, 0], X), Y), **FIT)
    mixed = both.predict((ids[:2, 0], torch.ones(2, 3, dtype=torch.long))).mean
    assert torch.equal(
        mixed, both.predict((ids[:2, 0], torch.ones(2, 3, dtype=torch.float64))).mean
    )


def test_fractions_are_kept_where_the_module_took_integers_at_fit_and_takes_both():
    post = ssla.fit(Scaled(), ((100 * X).long(), Y), **FIT)
    assert not torch.equal(post.predict(X[:2] + 0.5).mean, post.predict(X[:2].round()).mean)


class Signal(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv1d(2, 3, 3).double(), nn.Linear(3, 1).double()

    def forward(self, x):
        return self.head(torch.tanh(self.conv(x)).mean(2))


@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_signals_of_several_lengths_are_fitted_predicted_and_refitted(weights):
    likelihood, data = (
        L.StudentT(df=4.0, scale=0.5),
        [(numbers(20, 2, 9), Y[:20]), (numbers(10, 2, 6), Y[20:])],
    )
    post = ssla.fit(
        Signal(),
        data,
        weights=weights,
        mode="polish",
        likelihood=likelihood,
        prior=priors.Gaussian(precision=20.0),
        gaussian="laplace",
    )
    x = numbers(2, 2, 12, seed=4)
    assert post.predict(x, refit="weights").diagnostics.rung == ("weights", "weights")
    with pytest.raises(
        ValueError, match=r"failed on the inputs x \(N, 2, 2\).*At fit they were x \(N, 2, 9\)"
    ):
        post.predict(numbers(2, 2, 2))


def test_columns_are_no_length():
    post = ssla.fit(net(), (X, Y), **FIT)
    for columns in (1, 2, 4):
        with pytest.raises(
            ValueError, match=r"x must have shape \(N, 3\) as at fit, but one row of it is \(\d,\)"
        ):
            post.predict(numbers(2, columns))
    with pytest.raises(
        ValueError,
        match=r"must have shape \(N, 3\) as at fit.*\(N, 1, length\), the length may vary",
    ):
        ssla.fit(net(), [(X, Y), (X[:, :1], Y)], **FIT)


def test_no_rows_of_an_unusual_network_are_not_given_to_it():
    """A module need not take an empty batch: it is not called."""

    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()

        def forward(self, x):
            assert len(x), "empty"
            return self.inner(x)

    for weights in ("last_layer", "all"):
        post = ssla.fit(Picky(), (X, Y), weights=weights, **FIT)
        assert post.predict(X[:0]).interval(0.9).shape == (0, 2)
        with pytest.raises(ValueError, match=r"as at fit"):
            post.predict(X[:0, :2])
