"""The determinant of many weights in the space of the outputs, against the P×P one."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import ssla
from ssla import likelihoods as L
from ssla.refit.weights.all_weights_dual import Dual
from ssla.refit.weights.all_weights_jacobians import compute_jacobians_on_same_rows
from support.refits import T, inputs, seeded, small_network


@pytest.mark.parametrize("kind", ["observed", "fisher"])
@pytest.mark.parametrize(
    "name", ["gaussian", "heteroscedastic", "poisson", "categorical", "student"]
)
def test_the_dual_determinant_is_the_dense_one(name, kind):
    """Observed precisions of rows may be indefinite; where the dense curvature is not positive
    definite, neither is the dual.
    """
    post, new, candidates, *_ = small_network(name, n=150)
    determinants = ssla.WeightRefit(curvature=kind)(post, new)._engine.determinants
    dual = Dual(post, determinants.network_outputs, determinants.rows)
    point = 0.02 * torch.randn(4, post.theta.numel(), dtype=torch.float64, generator=seeded(1))
    y, x = (
        candidates[[0, 1, -1, 0]].to(torch.long if name == "categorical" else torch.float64),
        new[[0, 1, 0, 1]],
    )
    dense, positive = determinants._compute_exact_increments(point, y, x, kind)
    found, exists = dual(point, y, x, kind)
    assert torch.equal(positive, exists)
    assert positive.any()
    assert (found - dense)[positive].abs().max() < 1e-10


def wide_network(n=60, weights=None):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)
    ).double()
    x = inputs(n, 1)
    x[1] = x[0]  # the kernel of the rows is singular
    y = x[:, 0].sin() + 0.3 * torch.randn(n, dtype=torch.float64, generator=seeded(2))
    optimiser = torch.optim.LBFGS(
        net.parameters(), max_iter=300, line_search_fn="strong_wolfe", tolerance_grad=1e-9
    )

    def loss():
        optimiser.zero_grad()
        value = ((net(x)[:, 0] - y) ** 2).sum() / 0.18 + 5 * sum(
            (p**2).sum() for p in net.parameters()
        )
        value.backward()
        return value

    optimiser.step(loss)
    data = (x, y) if weights is None else (x, y, weights)
    prior = ssla.priors.Gaussian(precision=10.0)
    return (
        net,
        ssla.fit(net.eval(), data, likelihood=L.Gaussian(noise=0.3), prior=prior, weights="all"),
        x,
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_many_weights_on_few_rows_have_an_exact_determinant(weighted):
    """501 weights, 60 rows (two of them the same): against log|Σ JᵀJ/σ² + Π| of 501 × 501 by
    one Jacobian of all rows.
    """
    w = (
        0.5 + torch.rand(60, dtype=torch.float64, generator=seeded(3))
        if weighted
        else torch.ones(60, dtype=torch.float64)
    )
    net, post, x = wide_network(weights=w if weighted else None)
    new = T([0.5, -0.2])
    y = post.predict(new).icdf(T(0.05, 0.8))
    log_density = ssla.WeightRefit(tolerance=1e-6, logdet="exact")(post, new)
    solved, modes = log_density.solve(y), log_density.find_weights_at_modes(y)[0]
    assert solved.converged.all()

    def logdet(theta, rows, weight):
        run = lambda t: torch.func.functional_call(net, post.network.layout.unpack(t), (rows,))[
            :, 0
        ]
        J = torch.func.jacrev(run)(theta)
        return torch.linalg.slogdet((J.mT * weight) @ J / 0.09 + 10.0 * torch.eye(len(theta)))[1]

    for found, theta in zip(solved.curvature, modes, strict=True):
        after = logdet(theta, torch.cat([x, new]), torch.cat([w, T(1.0)]))
        assert float(found) == pytest.approx(
            float(-0.5 * (after - logdet(post.theta, x, w))), abs=1e-8
        )
    frozen = ssla.WeightRefit(tolerance=1e-6, logdet="frozen")(post, new).solve(y).curvature
    assert not torch.allclose(frozen, solved.curvature, atol=1e-4)


def test_an_exact_determinant_that_does_not_fit_is_refused(monkeypatch):
    _, post, _ = wide_network()
    monkeypatch.setattr("ssla.refit.weights.all_weights_dual.MOST_OUTPUTS", 50)
    with pytest.raises(ValueError, match=r"501 weights, 60 rows and 1 outputs.*logdet='frozen'"):
        ssla.ssla(post, T([0.5, -0.2]), T(0.0), ssla.WeightRefit(logdet="exact"))


def test_an_exact_determinant_beyond_the_memory_budget_is_refused_before_it_is_tried():
    """61 rows of 501 weights, three times, and six 61 × 61 matrices: 0.9 MB."""
    _, post, _ = wide_network()
    new, y, exact = T([0.5, -0.2]), T(0.0), ssla.WeightRefit(tolerance=1e-6, logdet="exact")
    enough = dataclasses.replace(post, memory_budget=1 << 20)
    assert torch.allclose(
        ssla.ssla(enough, new, y, exact).curvature,
        ssla.ssla(post, new, y, exact).curvature,
        atol=1e-9,
    )
    with pytest.raises(
        ValueError, match=r"logdet='exact' for 501 weights needs .* GiB.*logdet='frozen'"
    ):
        ssla.ssla(dataclasses.replace(post, memory_budget=800_000), new, y, exact)


def test_the_work_for_jacobians_grows_with_the_rows_not_with_their_square():
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    theta = torch.cat([p.detach().flatten() for p in net.parameters()])
    shapes = [(name, p.shape, p.numel()) for name, p in net.named_parameters()]

    def run(weights, x):
        parts = weights.split([size for *_, size in shapes])
        return torch.func.functional_call(
            net, {n: v.reshape(s) for (n, s, _), v in zip(shapes, parts, strict=True)}, (x,)
        )

    thetas = torch.stack([theta, 2 * theta])
    x = inputs(80, 1)
    J, f = compute_jacobians_on_same_rows(run, thetas, x)
    whole = torch.stack([torch.func.jacrev(lambda t: run(t, x))(t) for t in thetas])
    assert torch.allclose(J, whole, atol=1e-12)
    assert torch.allclose(f, torch.stack([run(t, x) for t in thetas]), atol=1e-12)
    work = []
    for rows in (20, 80):
        with FlopCounterMode(display=False) as counter:
            compute_jacobians_on_same_rows(run, thetas, x[:rows])
        work.append(counter.get_total_flops())
    assert 0 < work[1] <= 4 * work[0]
