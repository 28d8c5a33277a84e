"""Determinants of last-layer refits by the fitted structure: dense is the exact one, and kfac and
diag are compared with matrices that are written out from the rows.
"""

import numpy as np
import pytest
import torch

import ssla
from ssla import priors
from support.refits import FAMILIES, last_layer, seeded


def fitted(name, structure, weights=None, prior=None):
    """A last layer under a structure, kept at its mode."""
    post, new, candidates, *_ = last_layer(name, weights=weights)
    module = post.network.frozen.module
    x, y = next(iter(post.source))[:2]
    with torch.no_grad():
        for key, value in module[2].named_parameters():
            value.copy_(0.98 * post.parameters[f"2.{key}"])
    data = (x, y) if weights is None else (x, y, weights)
    again = ssla.fit(
        module,
        data,
        likelihood=post.likelihood,
        prior=prior or priors.Gaussian(0.8, mean=0.1),
        gaussian="laplace",
        structure=structure,
        mode="tilt",
    )
    phi, phi_new = (torch.cat([module[:2](a), torch.ones(len(a), 1)], 1).detach() for a in (x, new))
    return again, new, candidates, phi.numpy(), phi_new.numpy()


@pytest.mark.parametrize("name", FAMILIES)
def test_dense_is_the_exact_determinant(name):
    post, new, candidates, *_ = fitted(name, "dense")
    y = candidates.expand(len(new), -1)
    options = {"curvature": "fisher", "tolerance": 1e-8, "on_failure": "raise"}
    found = ssla.ssla(post, new, y, ssla.WeightRefit(logdet="structure", **options))
    exact = ssla.ssla(post, new, y, ssla.WeightRefit(logdet="exact", **options))
    for part in ("likelihood", "prior", "curvature"):
        assert (getattr(found, part) - getattr(exact, part)).abs().max() < 1e-8


def matrix_of(structure, phi, Lambda, weights):
    """H without its prior from features (n, F), Λ (n, C, C) and weights, in NumPy."""
    if structure == "kfac":
        A = np.einsum("n,nf,ng->fg", weights, phi, phi) / weights.sum()
        return np.kron(np.einsum("n,nab->ab", weights, Lambda), A)
    dense = np.einsum("n,nab,nf,ng->afbg", weights, Lambda, phi, phi)
    size = Lambda.shape[1] * phi.shape[1]
    return np.diag(dense.reshape(size, size).diagonal())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("structure", ["kfac", "diag"])
@pytest.mark.parametrize("name", ["heteroscedastic", "poisson", "categorical"])
def test_kfac_and_diag_by_matrices_written_out(name, structure, weighted):
    w = 0.5 + torch.rand(70, dtype=torch.float64, generator=seeded(8)) if weighted else None
    post, new, candidates, phi, phi_new = fitted(name, structure, weights=w)
    y = candidates.expand(len(new), -1)
    refit = ssla.WeightRefit(logdet="structure", tolerance=1e-10, on_failure="raise")
    log_density = refit(post, new)
    found, modes = log_density(y).curvature, log_density.find_weights_at_modes(y)
    weights = np.ones(len(phi)) if w is None else w.numpy()
    C = post.network.outputs

    def theta_matrix(theta):
        layout = post.network.layout.unpack(theta)
        return torch.cat([layout["2.weight"], layout["2.bias"][:, None]], 1).numpy()

    def logdet(theta, row=None):
        rows = phi if row is None else np.concatenate([phi, phi_new[row : row + 1]])
        counts = weights if row is None else np.append(weights, 1.0)
        f = torch.from_numpy(rows @ theta_matrix(theta).T)
        H = matrix_of(
            structure, rows, post.likelihood.fisher(f).expand(len(f), C, C).numpy(), counts
        )
        return np.linalg.slogdet(H + 0.8 * np.eye(len(H)))[1]

    for i in range(len(new)):
        for j in range(len(candidates)):
            expected = -0.5 * (logdet(modes[i, j], i) - logdet(post.theta))
            assert float(found[i, j]) == pytest.approx(expected, abs=1e-8)
    exact = ssla.ssla(post, new, y, ssla.WeightRefit(logdet="exact", curvature="fisher")).curvature
    assert (found - exact).abs().max() > 1e-3


def test_a_prior_whose_curvature_changes():
    prior = priors.StudentT(df=5.0, scale=1.5)
    post, new, candidates, *_ = fitted("poisson", "dense", prior=prior)
    y = candidates.expand(len(new), -1)
    options = {"curvature": "fisher", "tolerance": 1e-9, "on_failure": "raise"}
    found = ssla.ssla(post, new, y, ssla.WeightRefit(logdet="structure", **options)).curvature
    exact = ssla.ssla(post, new, y, ssla.WeightRefit(logdet="exact", **options)).curvature
    assert (found - exact).abs().max() < 1e-8


def test_predictives_differ_by_structure_and_no_fallback_is_counted():
    """The paper's three columns."""
    widths = []
    for structure in ("dense", "kfac", "diag"):
        post, new, *_ = fitted("heteroscedastic", structure)
        p = post.predict(new, refit=ssla.WeightRefit(logdet="structure"))
        assert not p.diagnostics.fallback.any()
        widths.append(p.stddev)
    assert (widths[0] - widths[1]).abs().max() > 1e-5
    assert (widths[1] - widths[2]).abs().max() > 1e-5
