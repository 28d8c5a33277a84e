"""Which network is refitted at an input: the network itself, or, where it has no mode, the network
linearised at θ̂.
"""

import pytest
import torch
from torch import nn

import ssla
from refit.test_linearised import digits_like, fitted
from ssla import likelihoods as L
from ssla.refit.weights import weight_log_density
from ssla.refit.weights.all_weights import AllWeightsRefit
from support.refits import inputs, seeded

# In double precision, so that answers do not depend on which inputs are solved together: products
# in single precision round otherwise on other processors.
AUTOMATIC = ssla.WeightRefit(tolerance=1e-8)
LINEARISED = ssla.WeightRefit(linearised=True, tolerance=1e-8)
NETWORK = ssla.WeightRefit(linearised=False, tolerance=1e-8)


def failing(monkeypatch, fails):
    """Refits of the network for which fails(where, y) is true end without having converged."""
    solve = AllWeightsRefit.solve

    def with_failures(self, where, y, progress=None):
        solved = solve(self, where, y, progress)
        return solved._replace(converged=solved.converged & ~fails(where, y))

    monkeypatch.setattr(AllWeightsRefit, "solve", with_failures)


@pytest.fixture(scope="module")
def classes():
    return fitted(*digits_like()), inputs(5, 7)


def test_an_input_with_a_failed_refit_is_linearised_for_every_class(classes, monkeypatch):
    post, new = classes
    network = post.predict(new, refit=NETWORK)
    linearised = post.predict(new, refit=LINEARISED)
    assert (network.probs - linearised.probs).abs().amax(1).min() > 1e-5  # the test can fail
    failing(monkeypatch, lambda where, y: (where == 2) & (y == 0))
    with pytest.warns(RuntimeWarning, match=r"At 1 of 5 inputs .* found no mode.*linearised at"):
        answer = post.predict(new, refit=AUTOMATIC)
    assert answer.diagnostics.linearised.tolist() == [False, False, True, False, False]
    assert set(answer.diagnostics.rung) == {"weights"}
    others = torch.tensor([0, 1, 3, 4])
    torch.testing.assert_close(answer.probs[2], linearised.probs[2], rtol=0, atol=1e-9)
    torch.testing.assert_close(answer.probs[others], network.probs[others], rtol=0, atol=1e-9)
    # One y at a time: the same model answers for all of them.
    with pytest.warns(RuntimeWarning, match="At 1 of 5 inputs"):
        one = ssla.ssla(post, new, torch.zeros(5, dtype=torch.long), AUTOMATIC)
    expected = ssla.ssla(post, new, torch.zeros(5, dtype=torch.long), LINEARISED)
    torch.testing.assert_close(one.total[2], expected.total[2], rtol=0, atol=1e-6)


def test_once_most_refits_failed_all_inputs_that_are_left_are_linearised(classes, monkeypatch):
    post, new = classes
    monkeypatch.setattr(weight_log_density, "MANY", 2)
    monkeypatch.setattr(AllWeightsRefit, "tasks_at_once", 3)
    monkeypatch.setattr(
        AllWeightsRefit,
        "find_stuck",
        lambda self, where, y: torch.zeros(len(where), dtype=torch.bool),
    )
    calls = []
    failing(monkeypatch, lambda where, y: calls.append(len(y)) or torch.ones_like(where) > 0)
    with pytest.warns(RuntimeWarning, match="Most of the refits of the weights that were tried"):
        answer = post.predict(new, refit=AUTOMATIC)
    assert calls == [3]  # one group, then no more
    assert bool(answer.diagnostics.linearised.all())
    expected = post.predict(new, refit=LINEARISED)
    torch.testing.assert_close(answer.probs, expected.probs, rtol=0, atol=1e-9)


def test_refits_at_the_median_are_tried_beside_the_easiest(classes, monkeypatch):
    """The three easiest make progress and those at the median do not: all are linearised."""
    post, new = classes
    monkeypatch.setattr(weight_log_density, "MANY", 2)
    tried = []

    def find_stuck(self, where, y):
        tried.append(len(y))
        return torch.full((len(where),), len(tried) == 2, dtype=torch.bool)

    monkeypatch.setattr(AllWeightsRefit, "find_stuck", find_stuck)
    with pytest.warns(RuntimeWarning, match="Most of the refits"):
        answer = post.predict(new, refit=AUTOMATIC)
    assert tried == [1, 3]  # the easiest is not stuck; then three at the median
    assert bool(answer.diagnostics.linearised.all())


def test_a_failed_refit_without_a_linearised_network_falls_back_with_the_reason(
    classes, monkeypatch
):
    post, new = classes
    failing(monkeypatch, lambda where, y: where == 2)
    monkeypatch.setattr(
        ssla.WeightRefit, "find_obstacle_to_linearising", lambda *_: "No room for it."
    )
    with pytest.warns(RuntimeWarning, match=r"1 of 5 inputs .*output rung\. No room for it\."):
        answer = post.predict(new, refit=AUTOMATIC)
    assert answer.diagnostics.rung == ("weights", "weights", "output", "weights", "weights")
    assert answer.diagnostics.linearised is None


def test_a_density_has_all_its_values_from_one_network(monkeypatch):
    """A refit fails after others of the same input succeeded: those are done again."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = inputs(200, 1)
    y = x[:, 0].sin() + 0.5 * torch.randn(200, dtype=torch.float64, generator=seeded(2))
    optimiser = torch.optim.LBFGS(net.parameters(), max_iter=500, line_search_fn="strong_wolfe")

    def loss():
        optimiser.zero_grad()
        misfit = 0.5 * ((net(x)[:, 0] - y) / 0.5).square().sum()
        total = misfit + 1.5 * sum(p.square().sum() for p in net.parameters())
        total.backward()
        return total

    optimiser.step(loss)
    post = ssla.fit(
        net.eval(),
        (x, y),
        likelihood=L.Gaussian(noise=0.5),
        prior=ssla.priors.Gaussian(precision=3.0),
        weights="all",
        structure="dense",
    )
    new = 0.5 * inputs(3, 7)
    network, linearised = (post.predict(new, refit=refit) for refit in (NETWORK, LINEARISED))
    assert (network.variance - linearised.variance).abs().min() > 1e-5  # the test can fail
    calls = []

    def after_the_first_portion(where, y):
        calls.append(len(y))
        return (where == 1) & (len(calls) > 1)

    failing(monkeypatch, after_the_first_portion)
    with pytest.warns(RuntimeWarning, match="At 1 of 3 inputs"):
        answer = post.predict(new, refit=AUTOMATIC)
    assert len(calls) > 1
    assert answer.diagnostics.linearised.tolist() == [False, True, False]
    grid = torch.linspace(-1.5, 1.5, 7, dtype=torch.float64).expand(3, 7)
    assert (answer.log_prob(grid)[1] - linearised.log_prob(grid)[1]).abs().max() < 1e-4
    assert (answer.log_prob(grid)[::2] - network.log_prob(grid)[::2]).abs().max() < 1e-9


def test_the_modes_are_those_of_the_network_that_answers(classes, monkeypatch):
    post, new = classes
    y = torch.zeros(5, dtype=torch.long)
    failing(monkeypatch, lambda where, y: where == 2)
    log_density = AUTOMATIC(post, new)
    log_density.solve(y)
    modes = log_density.find_weights_at_modes(y)
    expected = [refit(post, new).find_weights_at_modes(y) for refit in (NETWORK, LINEARISED)]
    torch.testing.assert_close(modes[2], expected[1][2].to(modes))
    torch.testing.assert_close(modes[0], expected[0][0].to(modes))
