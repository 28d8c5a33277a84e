"""Sampling and mean-field inference on a linear model, whose predictive is known."""

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from ssla_paper.peers.programs import Program

pytest.importorskip("numpyro")

NEW = torch.tensor([[-2.0], [0.0], [1.5], [4.0]])


def rows():
    """Inputs with mean zero: slope and offset are then independent a posteriori, as mean field
    assumes.
    """
    x = torch.linspace(-1, 1, 12)[:, None]
    noise = torch.randn(12, generator=torch.Generator().manual_seed(1))
    return x, 0.8 * x[:, 0] + 0.3 + 0.5 * noise


def exact(prior_sd=1.0):
    """Mean and deviation of y at NEW: conjugate given σ, then a sum over a fine grid of σ ~
    HalfNormal(1).
    """
    x, y = (part.double().numpy() for part in rows())
    design, new = np.column_stack([x, np.ones(12)]), np.column_stack([NEW.numpy(), np.ones(4)])
    sigmas = np.linspace(0.05, 4, 2000)
    log_weights, means, variances = [], [], []
    for sigma in sigmas:
        marginal = stats.multivariate_normal(
            np.zeros(12), prior_sd**2 * design @ design.T + sigma**2 * np.eye(12)
        )
        log_weights.append(marginal.logpdf(y) - sigma**2 / 2)
        covariance = np.linalg.inv(design.T @ design / sigma**2 + np.eye(2) / prior_sd**2)
        means.append(new @ covariance @ design.T @ y / sigma**2)
        variances.append(np.einsum("ni,ij,nj->n", new, covariance, new) + sigma**2)
    weights = (
        np.exp(np.array(log_weights) - max(log_weights))[:, None]
        / np.exp(np.array(log_weights) - max(log_weights)).sum()
    )
    means, variances = np.array(means), np.array(variances)
    mean = (weights * means).sum(0)
    return mean, np.sqrt((weights * (variances + (means - mean) ** 2)).sum(0))


def test_nuts_finds_the_predictive_of_a_linear_model():
    from ssla_paper.peers.sampling import chain

    x, y = rows()
    found = chain(x, y, NEW, hidden=(), heteroscedastic=False, warmup=300, draws=800)
    mean, sd = exact()
    assert found.divergent == 0
    assert found.r_hat == pytest.approx(1, abs=0.02)
    assert found.effective > 300
    spread = found.answer.means.std(0).numpy()
    np.testing.assert_allclose(
        found.answer.mean.numpy(), mean, atol=5 * float((spread / found.effective**0.5).max())
    )
    np.testing.assert_allclose(found.answer.stddev.numpy(), sd, rtol=0.08)


def exact_mean_field(prior_sd):
    """Mean and deviation of y at NEW under the best q(w) q(b) q(log σ), all Gaussian; the bound is
    in closed form.

    With log σ ~ N(m, s²): E σ⁻² = e^(2s²−2m), E σ² = e^(2s²+2m), and the weights' covariance is
    (XᵀX E σ⁻² + I/τ²)⁻¹.
    """
    x, y = (part.double().numpy() for part in rows())
    design, new = np.column_stack([x, np.ones(12)]), np.column_stack([NEW.numpy(), np.ones(4)])

    def weights(m, s):
        rate = np.exp(2 * s * s - 2 * m)
        covariance = np.linalg.inv(rate * design.T @ design + np.eye(2) / prior_sd**2)
        return rate, covariance, rate * covariance @ design.T @ y

    def negative_bound(at):
        m, s = at[0], np.exp(at[1])
        rate, covariance, centre = weights(m, s)
        misfit = np.sum((y - design @ centre) ** 2) + np.trace(design @ covariance @ design.T)
        likelihood = -12 * m - 0.5 * rate * misfit
        prior = (
            m
            - 0.5 * np.exp(2 * s * s + 2 * m)
            - 0.5 * (centre @ centre + np.trace(covariance)) / prior_sd**2
        )
        return -(likelihood + prior + np.log(s) + 0.5 * np.linalg.slogdet(covariance)[1])

    m, log_s = optimize.minimize(
        negative_bound, [-0.5, -1.5], method="Nelder-Mead", options={"xatol": 1e-8}
    ).x
    s = np.exp(log_s)
    _, covariance, centre = weights(m, s)
    return new @ centre, np.sqrt(
        np.einsum("ni,ij,nj->n", new, covariance, new) + np.exp(2 * s * s + 2 * m)
    )


@pytest.mark.parametrize(("prior_sd", "batch_size"), [(1.0, None), (0.3, 6)])
def test_mean_field_finds_the_best_independent_gaussians(prior_sd, batch_size):
    from ssla_paper.peers.variational import mean_field

    x, y = rows()
    found = mean_field(
        x,
        y,
        NEW,
        hidden=(),
        heteroscedastic=False,
        steps=3000,
        draws=4000,
        prior_sd=prior_sd,
        batch_size=batch_size,
    )
    mean, sd = exact_mean_field(prior_sd)
    np.testing.assert_allclose(found.mean.numpy(), mean, atol=0.03)
    np.testing.assert_allclose(found.stddev.numpy(), sd, rtol=0.04)


def test_the_program_is_the_network_with_the_priors_scales():
    import jax.numpy as jnp

    program = Program(2, (3,), "tanh", True, prior_sd=2.0)
    generator = np.random.default_rng(0)
    values = {name: generator.normal(size=shape) for name, (shape, _) in program.parts().items()}
    x = generator.normal(size=(5, 2))
    mean, sd = program.outputs({name: jnp.asarray(v) for name, v in values.items()}, jnp.asarray(x))
    inner = np.tanh(x @ values["w0"] * 2 / np.sqrt(2) + 2 * values["b0"])
    f = inner @ values["w1"] * 2 / np.sqrt(3) + 2 * values["b1"]
    np.testing.assert_allclose(mean, f[:, 0], atol=1e-5)
    np.testing.assert_allclose(sd, np.exp(f[:, 1] / 2), rtol=1e-5)


def test_an_unknown_activation_names_the_nearest():
    with pytest.raises(ValueError, match=r"Unknown activation 'tan'. Did you mean 'tanh'\?"):
        Program(1, (2,), "tan", False, 1.0).outputs({}, None)
