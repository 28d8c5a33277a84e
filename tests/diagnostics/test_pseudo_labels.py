"""Pseudo-labels: scores are those of the predictive at its own mode, and the order follows them."""

import math
import warnings

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.diagnostics.pseudo_labels import PseudoLabels

G = torch.Generator().manual_seed(3)
X = torch.randn(30, 3, dtype=torch.float64, generator=G)
Y = X @ torch.tensor([0.8, -0.4, 0.1], dtype=torch.float64) + 0.3 * torch.randn(
    30, dtype=torch.float64, generator=G
)
POOL = 2 * torch.randn(12, 3, dtype=torch.float64, generator=G)
COUNTS = torch.poisson(torch.exp(0.5 + 0.3 * X[:, 0]), generator=G)
CASES = {
    "gaussian": (L.Gaussian(noise=0.3), Y, 1),
    "targets": (L.Gaussian(noise=0.3), torch.stack([Y, Y.sin()], 1), 2),
    "student": (L.StudentT(4.0, 0.4), Y, 1),
    "counts": (L.Poisson(), COUNTS, 1),
    "two": (L.Bernoulli(), (Y > 0).long(), 1),
    "classes": (L.Categorical(), (Y > 0).long() + (Y > 1).long(), 3),
}


def fit(likelihood, y, outputs, **options):
    torch.manual_seed(0)
    model = nn.Linear(3, outputs, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ssla.fit(model, (X, y), likelihood=likelihood, prior=priors.Gaussian(), **options)


@pytest.mark.parametrize("refit", ["output", "none", "plug_in"])
@pytest.mark.parametrize("case", CASES)
def test_scores_are_the_predictives_log_density_at_its_mode(case, refit):
    posterior = fit(*CASES[case])
    found = ssla.pseudo_label(posterior, POOL, refit)
    predictive = posterior.predict(POOL, refit)
    assert torch.equal(found.labels, predictive.mode)
    assert torch.equal(found.scores, predictive.log_prob(predictive.mode))
    # Without doubt about f, constant noise has one density at every mode.
    constant = posterior.likelihood.quadratic and refit != "output"
    assert bool((found.scores.diff().abs() > 1e-12).any()) != constant


@pytest.mark.parametrize("case", ["two", "classes"])
def test_classes_have_their_integrated_probability_and_not_the_softmax(case):
    posterior = fit(*CASES[case])
    found = ssla.pseudo_label(posterior, POOL)
    assert not found.labels.is_floating_point()
    # The integral over f ~ N(f̂, K) is computed by random draws.
    f, K = posterior.marginal(POOL)
    noise = torch.randn(len(f), 200_000, f.shape[1], dtype=torch.float64, generator=G)
    draws = f[:, None] + noise @ torch.linalg.cholesky(K).mT
    p = posterior.likelihood.mean(draws).mean(1)
    p = torch.stack([1 - p, p], 1) if case == "two" else p
    torch.testing.assert_close(found.scores.exp(), p.amax(1), rtol=0, atol=5e-3)
    assert torch.equal(found.labels, p.argmax(1))
    plug_in = ssla.pseudo_label(posterior, POOL, "plug_in")
    assert (plug_in.scores > found.scores).all()  # the doubt makes it less sure


def test_numbers_of_one_noise_are_ranked_by_the_width_of_the_predictive():
    posterior = fit(*CASES["gaussian"])
    found = ssla.pseudo_label(posterior, POOL)
    sd = posterior.predict(POOL).stddev
    assert torch.equal(found.order, sd.argsort(stable=True))
    expected = -sd.log() - 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(found.scores, expected)


def test_the_order_is_best_first_and_keeps_ties_in_place():
    scores = torch.tensor([-1.0, -0.5, -1.0, -0.1, -0.5])
    found = PseudoLabels(torch.arange(5), scores)
    assert found.order.tolist() == [3, 1, 4, 0, 2]
    best = found.take(3)
    assert best.rows.tolist() == [3, 1, 4]
    assert best.labels.tolist() == [3, 1, 4]
    assert torch.equal(best.scores, scores[best.rows])
    assert found.take(5).rows.tolist() == found.order.tolist()
    assert repr(found) == "PseudoLabels(5 rows, scores from -1 to -0.1)"


def test_equal_rows_of_a_pool_have_equal_scores_in_their_order():
    posterior = fit(*CASES["classes"])
    found = ssla.pseudo_label(posterior, POOL[:4].repeat(3, 1))
    assert torch.equal(found.scores[:4], found.scores[4:8])
    order = found.order.tolist()
    assert [row for row in order if row % 4 == order[0] % 4] == sorted(order[:3])


def test_several_targets_have_rows_of_labels():
    best = ssla.pseudo_label(fit(*CASES["targets"]), POOL).take(4)
    assert best.labels.shape == (4, 2)
    assert best.scores.shape == (4,)


def test_nothing_changes_and_labels_can_be_fitted():
    posterior = fit(*CASES["classes"])
    theta, pool = posterior.theta.clone(), POOL.clone()
    best = ssla.pseudo_label(posterior, POOL).take(5)
    assert torch.equal(posterior.theta, theta)
    assert torch.equal(POOL, pool)
    grown = posterior.update((POOL[best.rows], best.labels))
    assert grown.report.n == 35


def test_arrays_tuples_and_float32():
    posterior = fit(*CASES["classes"])
    found = ssla.pseudo_label(posterior, POOL.numpy())
    assert torch.equal(found.scores, ssla.pseudo_label(posterior, POOL).scores)
    with torch.inference_mode():
        again = ssla.pseudo_label(posterior, POOL)
    assert torch.equal(found.scores, again.scores)


POSTERIOR = fit(*CASES["classes"])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ssla.pseudo_label(POSTERIOR, POOL[:0]), ValueError, "pool has no rows"),
        (
            lambda: ssla.pseudo_label(POSTERIOR, POOL * math.nan),
            ValueError,
            "must be finite|must hold finite",
        ),
        (lambda: ssla.pseudo_label(POSTERIOR, POOL[:, :2]), ValueError, "columns"),
        (lambda: ssla.pseudo_label(nn.Linear(3, 3), POOL), TypeError, "needs a Posterior"),
        (lambda: ssla.pseudo_label(POSTERIOR, POOL, "outputs"), ValueError, "Unknown refit"),
        (
            lambda: ssla.pseudo_label(POSTERIOR, POOL).take(0),
            ValueError,
            "k must be a whole number from 1 to 12",
        ),
        (lambda: ssla.pseudo_label(POSTERIOR, POOL).take(13), ValueError, "but is 13"),
        (lambda: ssla.pseudo_label(POSTERIOR, POOL).take(2.0), ValueError, "but is 2.0"),
        (lambda: ssla.pseudo_label(POSTERIOR, POOL).take(True), ValueError, "but is True"),
    ],
)
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_rows_without_an_answer_are_refused(monkeypatch):
    """Refits of the weights that fail under on_failure="nan" give NaN."""

    class Failed:
        mode = torch.tensor([-1, 0])

        def log_prob(self, y):
            return torch.tensor([math.nan, -0.1])

    monkeypatch.setattr(ssla.predictive, "predict", lambda *arguments: Failed())
    with pytest.raises(ValueError, match="1 of 2 rows have no score: their refits failed"):
        ssla.pseudo_label(POSTERIOR, POOL[:2])
