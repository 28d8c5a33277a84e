"""Refits of large last layers by products with the features, against the dense engine, closed
forms and their own errors.
"""

import math

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.refit.weights import last_layer_curvature, last_layer_products
from ssla.refit.weights import weight_refit as weights
from ssla.refit.weights.last_layer_probing import (
    NewRow,
    compute_gauss_nodes,
    compute_remainder_from_moments,
)
from ssla.refit.weights.last_layer_products import ProductsRefit
from support.refits import FAMILIES, all_classes, class_problem, inputs, last_layer, seeded

TRACES, EXACT = ssla.WeightRefit(logdet="traces"), ssla.WeightRefit(logdet="exact")


def both(post, new, y, **options):
    """The tasks solved by products and by the dense engine."""
    solved = [
        ssla.WeightRefit(logdet=logdet, **options)(post, new).solve(y)
        for logdet in ("traces", "exact")
    ]
    assert all(part.converged.all() for part in solved)
    return solved


# --- exact cases -----------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [1, 3])
def test_gaussian_noise_has_the_analytic_predictive(outputs):
    """Fact 1 of the method: un-normalised, to rounding. ΔΛ is zero, so nothing is estimated."""
    x = inputs(60, 1, 5)
    y = x[:, :outputs] + 0.3 * inputs(60, 2, outputs)
    y = y if outputs > 1 else y[:, 0]
    torch.manual_seed(0)
    model = nn.Linear(5, outputs).double()
    post = ssla.fit(model, (x, y), likelihood=L.Gaussian(noise=0.3), prior=priors.Gaussian(0.7))
    new = inputs(6, 4, 5)
    values = y[:6] + 0.5
    log_density = TRACES(post, new)
    assert isinstance(log_density._engine, ProductsRefit)
    assert torch.allclose(
        log_density(values).total, post.predict(new).log_prob(values), rtol=0, atol=1e-9
    )
    assert not log_density.solve(values).error.any()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_equals_the_dense_engine(name):
    """With all probes the traces are exact but for the quadrature over eigenvalues."""
    post, new, candidates, _, _ = last_layer(name)
    traces, exact = both(post, new, candidates.expand(len(new), -1), tolerance=1e-9)
    assert torch.allclose(traces.likelihood, exact.likelihood, rtol=0, atol=1e-8)
    assert torch.allclose(traces.prior, exact.prior, rtol=0, atol=1e-8)
    assert torch.allclose(traces.curvature, exact.curvature, rtol=0, atol=1e-3)
    assert ((traces.curvature - exact.curvature).abs() <= 4 * traces.error + 1e-6).all()


@pytest.mark.filterwarnings("ignore:The network is not at the mode")
@pytest.mark.parametrize("mode", ["polish", "tilt", "as_is"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_classes_equal_the_dense_engine(mode, dtype):
    weights = 0.5 + torch.rand(150, generator=seeded(8))
    post, new = class_problem(dtype=dtype, mode=mode, weights=weights.to(dtype))
    traces, exact = both(post, new, all_classes(post, new))
    assert torch.allclose(traces.total, exact.total, rtol=0, atol=1e-3)
    assert torch.allclose(traces.prior, exact.prior, rtol=0, atol=3e-4)
    assert (exact.curvature.amax() - exact.curvature.amin()) > 0.5  # not all the same


@pytest.mark.parametrize(
    "likelihood",
    [L.Categorical(temperature=2.5), L.Tempered(L.Categorical(), 0.5)],
    ids=["temperature", "tempered"],
)
def test_dispersed_classes_equal_the_dense_engine(likelihood):
    post, new = class_problem(likelihood=likelihood)
    traces, exact = both(post, new, all_classes(post, new))
    assert torch.allclose(traces.total, exact.total, rtol=0, atol=1e-3)


def test_a_prior_that_differs_by_class_equals_the_dense_engine():
    """Then there are no contrasts: all C outputs have their curvature."""
    precision = torch.linspace(0.5, 2.0, 4).double().repeat_interleave(13)
    post, new = class_problem(prior=priors.Gaussian(precision))
    traces, exact = both(post, new, all_classes(post, new))
    assert torch.allclose(traces.total, exact.total, rtol=0, atol=1e-3)


def test_the_modes_are_those_of_the_dense_engine():
    post, new = class_problem()
    y = all_classes(post, new)
    options = {"tolerance": 1e-9}
    found = ssla.WeightRefit(logdet="traces", **options)(post, new).find_weights_at_modes(y)
    expected = ssla.WeightRefit(logdet="exact", **options)(post, new).find_weights_at_modes(y)
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)


# --- estimates and their errors --------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:On the training rows the predictive is worse")
def test_the_stated_error_is_honest_with_few_probes(monkeypatch):
    """Of 8 of 252 probes: deviations are as large as stated, neither ten times smaller nor
    larger.
    """
    post, new = class_problem(n=300, width=62, classes=5, noise=2.5)
    monkeypatch.setattr(last_layer_curvature, "FEW_PROBES", 8)
    monkeypatch.setattr(last_layer_curvature, "WORK", 0.0)
    traces, exact = both(post, new, all_classes(post, new))
    used = traces.error > 1e-4
    assert used.sum() > 10
    relative = ((traces.curvature - exact.curvature) / traces.error)[used]
    assert relative.abs().max() < 6
    assert 0.1 < relative.square().mean().sqrt() < 2.5


@pytest.mark.filterwarnings("ignore:No matrix of")
def test_the_fitted_structure_stands_in_where_no_factor_fits(monkeypatch):
    """A dense structure is H itself: the answers are those of the dense engine, within the
    stated error.
    """
    post, new = class_problem(n=300, width=20, classes=4)
    monkeypatch.setattr(last_layer_products, "count_factor_bytes", lambda *_: 1 << 60)
    monkeypatch.setattr(last_layer_products, "count_vectors_that_fit", lambda *_: 0)
    y = all_classes(post, new)
    with pytest.warns(
        RuntimeWarning, match=r"No matrix of 84 × 84 fits.*an error that is not known"
    ):
        engine = TRACES(post, new)._engine
    assert isinstance(engine.shared, last_layer_curvature.SharedStructure)
    traces, exact = both(post, new, y)
    assert torch.allclose(traces.likelihood, exact.likelihood, rtol=0, atol=1e-3)
    assert ((traces.curvature - exact.curvature).abs() <= 6 * traces.error + 2e-3).all()


@pytest.mark.filterwarnings("ignore:No matrix of")
def test_kronecker_factors_steer_to_the_same_modes(monkeypatch):
    """They are not H: the determinant is theirs, likelihood and prior increments are exact."""
    post, new = class_problem(n=300, width=20, classes=4, noise=2.5, structure="kfac")
    monkeypatch.setattr(last_layer_products, "count_factor_bytes", lambda *_: 1 << 60)
    monkeypatch.setattr(last_layer_products, "count_vectors_that_fit", lambda *_: 0)
    traces, exact = both(post, new, post.predict(new).probs.topk(2).indices.double())
    assert torch.allclose(traces.likelihood, exact.likelihood, rtol=0, atol=1e-3)
    assert torch.allclose(traces.prior, exact.prior, rtol=0, atol=1e-3)
    assert (traces.curvature - exact.curvature).abs().max() < 0.5


def test_gauss_nodes_are_those_of_the_distribution():
    nodes, shares = (
        torch.tensor([-0.4, 0.1, 1.5], dtype=torch.float64),
        torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64),
    )
    moments = torch.stack([3 * (shares * nodes**k).sum() for k in range(8)])
    found, weights = compute_gauss_nodes(moments[:6])
    assert torch.allclose(found, nodes, atol=1e-9)
    assert torch.allclose(weights, shares, atol=1e-9)
    fewer, _ = compute_gauss_nodes(moments)  # of three atoms there are no four nodes
    assert torch.allclose(fewer, nodes, atol=1e-6)


@pytest.mark.parametrize("count", [3, 5, 7])
def test_the_remainder_of_few_eigenvalues_is_exact(count):
    eigenvalues = torch.tensor([-0.5, 0.2, 1.2], dtype=torch.float64)[: count // 2]
    moments = [float((eigenvalues**k).sum()) for k in range(1, count + 1)]
    expected = float((eigenvalues.log1p() - eigenvalues).sum())
    assert compute_remainder_from_moments(moments, moments[0]).value == pytest.approx(
        expected, abs=1e-9
    )


def test_an_eigenvalue_below_minus_one_has_no_determinant():
    assert math.isnan(compute_remainder_from_moments([-1.5, 2.25, -3.375], -1.5).value)


def test_the_new_row_turns_samples_of_one_gaussian_into_those_of_the_other():
    """B + Bᵀ − BKBᵀ = G, and K − KGK is the covariance after the new row; K may be singular."""
    root = torch.randn(5, 4, 3, dtype=torch.float64, generator=seeded(1))
    K = root @ root.mT
    precision = torch.randn(5, 4, 4, dtype=torch.float64, generator=seeded(2))
    precision = precision @ precision.mT
    new = NewRow.from_covariance(K, precision)
    eye = torch.eye(4, dtype=torch.float64)
    left = new.shrink + new.shrink.mT - new.shrink @ K @ new.shrink.mT
    assert torch.allclose(K @ left @ K, K @ new.explained @ K, atol=1e-9)
    after = K @ torch.linalg.inv(eye + precision @ K)
    assert torch.allclose(K - K @ new.explained @ K, after, atol=1e-9)


@pytest.mark.parametrize(
    "likelihood",
    [L.Categorical(temperature=1.7), L.Tempered(L.Categorical(), 0.4), L.HeteroscedasticGaussian()],
)
def test_products_with_the_curvature_are_those_with_its_matrix(likelihood):
    outputs = 2 if isinstance(likelihood, L.HeteroscedasticGaussian) else 5
    f, before, v = (inputs(3 * 7, seed, outputs).reshape(3, 7, outputs) for seed in (1, 2, 3))
    y = torch.arange(7) % outputs if outputs > 2 else inputs(7, 4, 1)[:, 0]
    root = inputs(7 * outputs, 5, outputs).reshape(7, outputs, outputs)
    K = root @ root.mT
    whole = likelihood.precision(y, f)
    assert torch.allclose(
        likelihood.precision_times(y, f, v), (whole @ v.unsqueeze(-1)).squeeze(-1)
    )
    assert torch.allclose(likelihood.precision_trace(y, f, K), (K * whole).sum((-2, -1)))
    change = likelihood.score(y, f) - likelihood.score(y, before)
    assert torch.allclose(likelihood.score_change(y, f, before), change)


# --- which engine ----------------------------------------------------------------------------


def test_it_is_chosen_where_the_dense_engine_does_not_fit():
    """52 parameters: 8·6·52² bytes are 130 kB."""
    ample, new = class_problem()
    tight, _ = class_problem(memory_budget=100_000)
    assert not isinstance(ssla.WeightRefit()(ample, new)._engine, ProductsRefit)
    assert isinstance(ssla.WeightRefit()(tight, new)._engine, ProductsRefit)
    refit = ssla.WeightRefit(rare=0)
    found, expected = tight.predict(new, refit=refit), ample.predict(new, refit=refit)
    assert torch.allclose(found.probs.log(), expected.probs.log(), rtol=0, atol=1e-3)
    assert set(found.diagnostics.rung) == {"weights"}
    auto = tight.predict(new, refit=ssla.AutoRefit(target=1e-6))
    assert "weights" in auto.diagnostics.rung
    with pytest.raises(
        ValueError, match=r"A refit of a last layer with 52 parameters needs .*logdet='traces'"
    ):
        tight.predict(new, refit=EXACT)


def test_rows_that_do_not_fit_are_read_again():
    ample, new = class_problem(n=400)
    tight, _ = class_problem(n=400, memory_budget=100_000)
    log_density = TRACES(tight, new)
    y = all_classes(ample, new)
    assert log_density._engine.rows.kept is None
    assert torch.allclose(
        log_density.solve(y).total, TRACES(ample, new).solve(y).total, rtol=0, atol=1e-3
    )


def test_priors_without_a_constant_curvature_are_refused():
    post, new = class_problem(prior=priors.StudentT(4.0))
    with pytest.raises(
        ValueError, match=r"logdet='traces' needs a Gaussian prior.*Use logdet='exact'"
    ):
        post.predict(new, refit=TRACES)


def test_a_frozen_determinant_has_the_new_rows_part_only():
    tight, new = class_problem(memory_budget=100_000)
    ample, _ = class_problem()
    y = all_classes(ample, new)
    frozen = ssla.WeightRefit(logdet="frozen")
    assert torch.allclose(
        frozen(tight, new)(y).total, frozen(ample, new)(y).total, rtol=0, atol=1e-3
    )


def test_refits_that_change_no_row_have_an_exact_determinant_too():
    """The dense engine in single precision, where the trace is enough for every task of a group."""
    post, new = class_problem(n=2000, width=30, classes=3, noise=0.2)
    likely = post.predict(new).probs.argmax(1, keepdim=True).double()
    solved = EXACT(post, new).solve(likely)
    assert solved.converged.all()


def test_without_a_shared_factor_the_default_refuses(monkeypatch):
    """Determinants of a structure may be off by .1: only who asks for them by name gets them."""
    post, new = class_problem(n=300, width=20, classes=4)
    for module, name in ((weights, "count_factor_bytes"), (weights, "count_dense_bytes")):
        monkeypatch.setattr(module, name, lambda *_: 1 << 60)
    monkeypatch.setattr(weights, "count_vectors_that_fit", lambda *_: 0)
    with pytest.raises(
        ValueError, match=r"more than the memory budget.*logdet='traces'.*may be off by 0.1"
    ):
        post.predict(new, refit="weights")
