"""Agreement with laplace-torch on the covariance of the outputs, float64. Run by `make bench`.

Conventions that are matched: our likelihoods are log densities, laplace-torch's curvature is that
of ½‖y − f‖² (scaled by 1/σ²) or of the cross entropy; both priors are isotropic; both posteriors
are at the trained weights (mode="as_is").

Kronecker factors for a *last layer*: laplace-torch (curvlinops) separates weight and bias, ours
treats the bias as an input, so with a bias the two are different approximations. Without a bias, or
with a column of ones in the features, they are the same.
"""

import pytest
import torch
from torch import nn

import ssla

laplace = pytest.importorskip("laplace")
pytestmark = pytest.mark.filterwarnings("ignore")

SIGMA, TAU = 0.6, 2.5


def setting(task, bias=True, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3, bias=bias)).double().eval()
    x = torch.randn(40, 3, dtype=torch.float64)
    y = torch.randn(40, 3, dtype=torch.float64) if task == "regression" else torch.randint(3, (40,))
    return model, x, y, torch.randn(7, 3, dtype=torch.float64)


def theirs(task, subset, structure, bias=True):
    model, x, y, new = setting(task, bias)
    extra = {"sigma_noise": SIGMA} if task == "regression" else {}
    la = laplace.Laplace(
        model,
        task,
        subset_of_weights=subset,
        hessian_structure=structure,
        prior_precision=TAU,
        **extra,
    )
    la.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=40))
    return la._glm_predictive_distribution(new)


def ours(task, weights, structure, bias=True):
    model, x, y, new = setting(task, bias)
    likelihood = (
        ssla.likelihoods.Gaussian(noise=SIGMA)
        if task == "regression"
        else ssla.likelihoods.Categorical()
    )
    prior = ssla.priors.Gaussian(precision=TAU)
    return ssla.fit(
        model,
        (x, y),
        likelihood=likelihood,
        prior=prior,
        gaussian="laplace",
        weights=weights,
        structure=structure,
        mode="as_is",
    ).marginal(new)


@pytest.mark.parametrize("task", ["regression", "classification"])
@pytest.mark.parametrize(
    ("subset", "their_structure", "our_structure", "bias"),
    [
        ("last_layer", "full", "dense", True),
        ("last_layer", "diag", "diag", True),
        ("last_layer", "kron", "kfac", False),
        ("all", "full", "dense", True),
        ("all", "diag", "diag", True),
    ],
)
def test_covariance_of_the_outputs(task, subset, their_structure, our_structure, bias):
    mean, covariance = theirs(task, subset, their_structure, bias)
    f, K = ours(task, subset, our_structure, bias)
    assert torch.allclose(f, mean, atol=1e-10)
    assert (K - covariance).abs().max() <= 1e-6 * covariance.abs().max()
