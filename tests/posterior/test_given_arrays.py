"""Arrays whose memory is not the data: masked, sparse, nested and quantised ones are refused at
every door.
"""

import numpy as np
import pytest
import scipy.sparse
import torch

import ssla
from ssla import likelihoods as L
from ssla import metrics, priors
from support.networks import data, mlp

X, Y = (part.double() for part in data(60))
MASK = np.arange(len(Y)) % 3 == 0


def fit(x, y, *weights):
    return ssla.fit(
        mlp().double(), (x, y, *weights), likelihood=L.Gaussian(noise=0.3), prior=priors.Gaussian()
    )


@pytest.fixture(scope="module")
def post():
    return fit(X, Y)


def masked(values):
    mask = MASK.reshape(-1, *[1] * (values.ndim - 1)) & np.ones(values.shape, bool)
    return np.ma.array(np.where(mask, -9999.0, values), mask=mask)


def test_masked_arrays_are_refused_everywhere(post):
    x, y, one = masked(X.numpy()), masked(Y.numpy()), masked(np.ones(len(Y)))
    questions = [
        lambda: fit(X, y),
        lambda: fit(x, Y),
        lambda: fit(X, Y, one),
        lambda: ssla.fit(
            mlp().double(), [(X, y)], likelihood=L.Gaussian(noise=0.3), prior=priors.Gaussian()
        ),
        lambda: ssla.fit(
            mlp().double(),
            [{"x": X, "y": y}],
            likelihood=L.Gaussian(noise=0.3),
            prior=priors.Gaussian(),
        ),
        lambda: post.predict(x),
        lambda: post.predict(X).log_prob(y),
        lambda: post.predict(X).cdf(y),
        lambda: metrics.summary(post.predict(X), y),
        lambda: metrics.rmse(post.predict(X), y),
        lambda: post.update((X, y)),
    ]
    for ask in questions:
        with pytest.raises(
            ValueError, match=r"must not have masked values, but (20 of 60|60 of 180) are masked"
        ):
            ask()


def test_a_mask_that_hides_nothing_changes_nothing(post):
    whole = np.ma.array(Y.numpy(), mask=np.zeros(len(Y), bool))
    same = fit(np.ma.array(X.numpy(), mask=False), whole)
    assert torch.equal(same.predict(X).mean, post.predict(X).mean)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning")
def test_other_layouts_are_refused_with_their_remedy(post):
    cases = {
        "layout sparse_coo. Give x.to_dense": X.to_sparse(),
        "layout sparse_csr": X.to_sparse_csr(),
        "sparse csr_matrix. Give value.toarray": scipy.sparse.csr_matrix(X.numpy()),
        "sparse coo_array": scipy.sparse.coo_array(X.numpy()),
        "nested tensor": torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)]),
        "masked tensor": torch.masked.masked_tensor(X, X > 0),
    }
    for message, x in cases.items():
        for ask in (lambda x=x: post.predict(x), lambda x=x: fit(x, Y)):
            with pytest.raises(TypeError, match=message):
                ask()
    for y in (Y.to_sparse(), scipy.sparse.csr_matrix(Y.numpy()[:, None])):
        with pytest.raises(TypeError, match="dense"):
            fit(X, y)
        with pytest.raises(TypeError, match="dense"):
            metrics.rmse(post.predict(X), y)
