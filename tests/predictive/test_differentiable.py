"""Gradients in x and y: against finite differences (gradcheck, float64), with the values of the
plain answers.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

import ssla
from ssla import Marginal, priors
from ssla import likelihoods as L
from ssla.maths import linalg
from ssla.maths.quadrature import grid, normal
from ssla.predictive import affine, from_marginal, mixture
from ssla.predictive.implicit import GraphDensity, add_graph, log_density_with_graph
from ssla.refit.increments import evaluate_at_mode
from support.networks import SCOPES, STRUCTURES, TwoInputs, data, fitted_mlp, mlp

X, Y = data(40)
AT = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
TARGETS = {
    "gaussian": (L.Gaussian(noise=0.3), Y),
    "two targets": (L.Gaussian(noise=torch.tensor([0.3, 0.4])), torch.stack([Y, -Y], 1)),
    "bernoulli": (L.Bernoulli(), (Y > 0).long()),
    "two classes": (L.Categorical(), (Y > 0).long()),
    "three classes": (L.Categorical(), (Y > 0).long() + (Y > 0.5).long()),
    "five classes": (L.Categorical(), (Y * 2).round().long().clamp(-2, 2) + 2),
    "counts": (L.Poisson(), Y.abs().round()),
    "dispersed counts": (L.NegativeBinomial(2.0), (3 * Y.abs()).round()),
    "outliers": (L.StudentT(4.0, 0.3), Y),
    "noise by x": (L.HeteroscedasticGaussian(), Y),
    "own": (L.custom(lambda y, f: -((y - f[..., 0]) ** 2)), Y),
}
OUTPUTS = {
    "noise by x": 2,
    "two targets": 2,
    "two classes": 2,
    "three classes": 3,
    "five classes": 5,
}
CLASSES = ["bernoulli", "two classes", "three classes", "five classes"]


@cache
def fitted(target="gaussian", scope="last layer", structure="dense", gaussian=None):
    likelihood, y = TARGETS[target]
    return fitted_mlp((X, y), likelihood, OUTPUTS.get(target, 1), scope, structure, gaussian)


def at():
    return AT.clone().requires_grad_(True)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("gaussian", ["laplace", "variational"])
def test_marginals_have_gradients_in_x(scope, structure, gaussian):
    post = fitted("three classes", scope, structure, gaussian)
    assert gradcheck(lambda x: tuple(post.marginal(x, differentiable=True)), at())
    for found, plain in zip(
        post.marginal(at(), differentiable=True), post.marginal(AT), strict=True
    ):
        assert found.requires_grad
        assert torch.allclose(found, plain, rtol=1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("scope", SCOPES)
def test_joint_gaussians_and_draws_have_gradients_in_x(scope, structure):
    post = fitted("two targets", scope, structure)
    draws = post.draw_functions(3, torch.Generator().manual_seed(0))
    assert gradcheck(lambda x: tuple(post.joint(x, differentiable=True)), at())
    assert gradcheck(lambda x: draws(x, differentiable=True), at())
    assert gradcheck(lambda x: draws[1](x, differentiable=True), at())


def gaussian_answers(predictive, y):
    answers = [
        predictive.mean,
        predictive.variance,
        predictive.stddev,
        predictive.epistemic,
        predictive.aleatoric,
    ]
    answers += [
        predictive.log_prob(y),
        predictive.cdf(y),
        predictive.icdf([0.1, 0.7]),
        predictive.interval(0.9),
        predictive.mass,
    ]
    return (*answers, predictive.covariance, predictive.sample(2, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("target", ["gaussian", "two targets"])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("refit", ["output", "newton", "none", "plug_in"])
def test_gaussian_predictives_have_gradients_in_x_and_y(target, scope, refit):
    post = fitted(target, scope)
    y = TARGETS[target][1][:3].clone().requires_grad_(True)
    ask = lambda x, y: gaussian_answers(post.predict(x, refit, differentiable=True), y)
    assert gradcheck(
        lambda x, y: tuple(part for part in ask(x, y) if part.requires_grad), (at(), y)
    )
    for found, plain in zip(
        ask(at(), y), gaussian_answers(post.predict(AT, refit), y.detach()), strict=True
    ):
        assert torch.allclose(found, plain, rtol=1e-12)


def class_answers(predictive):
    parts = (
        predictive.probs,
        predictive.mean,
        predictive.variance,
        predictive.epistemic,
        predictive.aleatoric,
    )
    return (*parts, predictive.log_prob([0, 1, 1]))


@pytest.mark.parametrize("target", CLASSES)
@pytest.mark.parametrize("structure", ["dense", "kfac", "diag"])
def test_probabilities_of_classes_have_gradients_in_x(target, structure):
    post = fitted(target, structure=structure)
    assert gradcheck(lambda x: class_answers(post.predict(x, differentiable=True)), at())
    for found, plain in zip(
        class_answers(post.predict(at(), differentiable=True)),
        class_answers(post.predict(AT)),
        strict=True,
    ):
        assert torch.allclose(found, plain, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("target", ["bernoulli", "three classes"])
def test_probabilities_have_gradients_through_all_weights(target):
    post = fitted(target, "all", "kfac")
    assert gradcheck(lambda x: post.predict(x, differentiable=True).probs, at())


def pointwise_answers(predictive, y):
    parts = [
        predictive.mean,
        predictive.variance,
        predictive.stddev,
        predictive.log_prob(y),
        predictive.mass,
    ]
    parts += [predictive.epistemic, predictive.aleatoric]
    if predictive.kind == "count":
        return parts
    return [*parts, predictive.cdf(y), predictive.icdf(0.3), *predictive.interval(0.9).mT]


@pytest.mark.parametrize("target", ["counts", "dispersed counts", "outliers", "noise by x"])
@pytest.mark.parametrize("scope", ["last layer", "all"])
def test_other_predictives_have_gradients_in_x(target, scope):
    """Implicit differentiation of the refit, and through the quadrature."""
    post = fitted(target, scope, gaussian="laplace" if scope == "all" else None)
    y = TARGETS[target][1][:3]
    ask = lambda x: pointwise_answers(post.predict(x, differentiable=True), y)
    plain = lambda x: pointwise_answers(post.predict(x.detach()), y)
    for found, value in zip(ask(at()), plain(AT), strict=True):
        assert torch.allclose(found, value, rtol=1e-12)
    # central differences of the plain answers
    step, direction = (
        1e-4,
        torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    )
    up, down = plain(AT + step * direction), plain(AT - step * direction)
    x = at()
    for found, a, b in zip(ask(x), up, down, strict=True):
        slopes = torch.stack(
            [(torch.autograd.grad(one, x, retain_graph=True)[0] * direction).sum() for one in found]
        )
        # nodes move with x in the differences: the error of the quadrature, and with it of its
        # slope, is about 1e-4
        rtol, atol = (1e-4, 1e-6) if "counts" in target else (1e-3, 5e-5)
        assert torch.allclose(slopes, (a - b) / (2 * step), rtol=rtol, atol=atol)


LIKELIHOODS = {
    "poisson": (L.Poisson(), 1),
    "negative binomial": (L.NegativeBinomial(2.0), 1),
    "student t": (L.StudentT(4.0, 0.7), 1),
    "log variance": (L.HeteroscedasticGaussian(), 2),
    "natural": (L.HeteroscedasticGaussian(parameters="natural"), 2),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_log_density_of_the_refit_has_the_derivative_of_its_mode(name):
    """No quadrature: gradcheck of the refit itself, in f̂, K and (where it is continuous) y."""
    likelihood, size = LIKELIHOODS[name]
    generator = torch.Generator().manual_seed(2)
    f, A = (
        0.3 * torch.randn(2, *shape, size, dtype=torch.float64, generator=generator)
        for shape in ((), (size,))
    )
    f = f - 2.0 * torch.tensor([0.0, 1.0], dtype=torch.float64) if name == "natural" else f
    y = torch.tensor([[0.0, 2.0, 5.0], [1.0, 3.0, 4.0]], dtype=torch.float64)
    y = y if likelihood.support_for(size).kind == "count" else y / 4 - 0.5
    spd = lambda A: A @ A.mT + 0.1 * torch.eye(size, dtype=torch.float64)
    spread = (part.repeat_interleave(3, 0) for part in (f, linalg.covariance_root(spd(A))))
    found = log_density_with_graph(likelihood, y, f, spd(A))
    assert torch.allclose(
        found.flatten(), evaluate_at_mode(likelihood, y.flatten(), *spread).total, atol=1e-7
    )  # of the ascent
    free = [part.clone().requires_grad_(True) for part in (f, A)]
    assert gradcheck(lambda f, A: log_density_with_graph(likelihood, y, f, spd(A)), free)
    if likelihood.support_for(size).kind != "count":
        given = y.clone().requires_grad_(True)
        assert gradcheck(lambda y: log_density_with_graph(likelihood, y, f, spd(A)), given)


@pytest.mark.parametrize(("mean", "sd"), [(7.0, 3.0), (9.0, 2.0), (40.0, 2.0), (3.0, 0.0)])
def test_counts_of_a_rate_have_gradients_also_at_its_boundary(mean, sd):
    """The mode of y = 0 is at a rate of zero for 7 ± 3, and inside for the others."""
    likelihood = L.Poisson(link="identity")
    y = torch.tensor([[0.0, 1.0, 5.0]], dtype=torch.float64)
    f, K = (torch.tensor(value, dtype=torch.float64) for value in ([[mean]], [[[sd**2]]]))
    assert torch.allclose(
        log_density_with_graph(likelihood, y, f, K).flatten(),
        evaluate_at_mode(likelihood, y.flatten(), f.expand(3, 1), K.sqrt().expand(3, 1, 1)).total,
        atol=1e-7,
    )
    free = [part.requires_grad_(True) for part in (f, K)]
    if sd > 0:
        assert gradcheck(lambda f, K: log_density_with_graph(likelihood, y, f, K), free)
    slopes = torch.autograd.grad(log_density_with_graph(likelihood, y, f, K).sum(), free)
    assert all(bool(torch.isfinite(slope).all()) for slope in slopes)


@pytest.mark.parametrize("target", ["outliers", "noise by x"])
def test_log_densities_have_gradients_in_y(target):
    post = fitted(target)
    y = Y[:3].clone().requires_grad_(True)
    assert gradcheck(lambda y: post.predict(AT, differentiable=True).log_prob(y), y)


def masses_of_wide_doubt(K, likelihood, top=60.0):
    """∫ p dy and ∫ y² p dy of an output refit at f̂ = 0, in two pieces: the density jumps where the
    refit changes its mode.

    K (1, 1, 1). The jump is where the pull jumps, the pieces are integrated by 400 nodes each.
    """
    root = K.sqrt()
    refit = lambda y: evaluate_at_mode(
        likelihood, y, torch.zeros(len(y), 1).double(), root.expand(len(y), 1, 1)
    )
    low, high = 0.0, top
    for _ in range(3):
        y = torch.linspace(low, high, 1001, dtype=torch.float64)
        jumps = refit(y).pull.diff(dim=0).abs().flatten()
        low, high = y[int(jumps.argmax()) :][:2].tolist()
    assert float(jumps.max()) > 0.5
    t, weights = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(400))
    total = torch.zeros(2, dtype=torch.float64)
    for start, end in ((0.0, low), (high, top)):
        nodes = (start + end) / 2 + (end - start) / 2 * t
        p = weights * (end - start) * refit(nodes).total.exp()  # both sides of zero
        total += torch.stack([p.sum(), (p * nodes**2).sum()])
    return total


@pytest.mark.parametrize("K", [1.5, 3.0])
def test_gradients_follow_the_jump_where_the_refit_changes_its_mode(K):
    """Student's t with a doubt that is wider than the noise: the slope of the mass was 1.9% off
    at K = 1.5.
    """
    likelihood, step = L.StudentT(4.0, 0.3), 1e-4
    f, wide = torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 1, 1), K, dtype=torch.float64)
    up, down = (masses_of_wide_doubt(wide + e, likelihood) for e in (step, -step))
    expected = torch.stack([up[0] - down[0], up[1] / up[0] - down[1] / down[0]]) / (2 * step)
    plain = from_marginal(likelihood, f, wide)
    wide.requires_grad_(True)
    found = add_graph(plain, GraphDensity(plain.law.log_density, Marginal(f, wide)))
    slopes = torch.stack(
        [
            torch.autograd.grad(one.sum(), wide, retain_graph=True)[0].sum()
            for one in (found.mass, found.variance)
        ]
    )
    assert torch.allclose(
        slopes, expected, rtol=1.5e-3
    )  # of the 41 nodes: a derivative jumps between two of them


def test_gradients_in_x_follow_the_jump_over_all_weights_with_kfac():
    """d mass/dx = d mass/dK · dK/dx, from the integral above and the gradient of the marginal.

    It was 1.6% off.
    """
    likelihood = L.StudentT(4.0, 0.3)
    post = ssla.fit(
        mlp(),
        (X[:3], Y[:3]),
        likelihood=likelihood,
        prior=priors.Gaussian(0.5),
        weights="all",
        structure="kfac",
        gaussian="laplace",
    )
    x = at()[:1]
    K = post.marginal(x, differentiable=True).covariance
    (slope_of_K,) = torch.autograd.grad(K.sum(), x)
    K, step = K.detach(), 1e-4
    up, down = (masses_of_wide_doubt(K + e, likelihood)[0] for e in (step, -step))
    (found,) = torch.autograd.grad(post.predict(x, differentiable=True).mass.sum(), x)
    assert 1.5 < float(K) < 4
    assert torch.allclose(found, (up - down) / (2 * step) * slope_of_K, rtol=1.5e-3)


class Pictures(nn.Module):
    """Convolution, norm and a strided window: positions that share weights, and parameters
    without a Kronecker form.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv1d(1, 2, 3, padding=1),
            nn.GroupNorm(1, 2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(6, 2),
        )

    def forward(self, x):
        return self.body(x[:, None])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_convolutions_and_norms_have_gradients(structure):
    post = ssla.fit(
        Pictures().double().eval(),
        (X, torch.stack([Y, -Y], 1)),
        likelihood=TARGETS["two targets"][0],
        prior=priors.Gaussian(2.0),
        weights="all",
        structure=structure,
    )
    assert gradcheck(lambda x: tuple(post.marginal(x, differentiable=True)), at())


def test_gradients_climb_to_the_largest_variance():
    """Optimisation by the gradient: the standard deviation of f grows at every step."""
    post, x, seen = fitted("gaussian", "all", "kfac"), at(), []
    for _ in range(5):
        sd = post.marginal(x, differentiable=True).covariance.sum()
        seen.append(sd.item())
        with torch.no_grad():
            x += 0.05 * torch.autograd.grad(sd, x)[0]
    assert seen == sorted(seen)


def test_inputs_without_a_gradient_give_the_plain_answer():
    post = fitted("gaussian", "all")
    assert not post.marginal(AT, differentiable=True).mean.requires_grad
    with torch.no_grad():
        assert not post.predict(at(), differentiable=True).variance.requires_grad
    assert torch.equal(post.predict(AT, differentiable=True).variance, post.predict(AT).variance)
    assert post.predict(AT[:0], differentiable=True).mean.shape == (0,)
    assert fitted("three classes").predict(AT[:0], differentiable=True).probs.shape == (0, 3)


@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_one_part_of_the_inputs_may_require_a_gradient(weights):
    rows = {"a": X[:, :1], "b": X[:, 1:]}
    post = ssla.fit(
        TwoInputs(),
        [(rows, Y)],
        likelihood=L.Gaussian(0.3),
        prior=priors.Gaussian(2.0),
        weights=weights,
    )
    ask = lambda b: post.predict({"a": AT[:, :1], "b": b}, differentiable=True).variance
    assert gradcheck(ask, AT[:, 1:].clone().requires_grad_(True))


@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_single_precision_has_nearly_the_same_gradient(weights):
    slopes = []
    for dtype in (torch.float32, torch.float64):
        post = ssla.fit(
            mlp().to(dtype),
            (X.to(dtype), Y),
            likelihood=L.Gaussian(0.3),
            prior=priors.Gaussian(2.0),
            weights=weights,
        )
        x = AT.to(dtype).requires_grad_(True)
        slopes.append(
            torch.autograd.grad(post.predict(x, differentiable=True).variance.sum(), x)[0]
        )
    assert slopes[0].dtype == torch.float32
    assert torch.allclose(slopes[0].double(), slopes[1], rtol=1e-3, atol=1e-5)


def test_chunks_of_rows_give_the_same_gradient():
    post = fitted("three classes", "all", "kfac")
    small = replace(post, memory_budget=post.network.bytes_per_row)
    slopes = []
    for one in (post, small):
        x = at()
        slopes.append(
            torch.autograd.grad(one.predict(x, differentiable=True).probs[:, 0].sum(), x)[0]
        )
    assert torch.allclose(*slopes, atol=1e-12)


def test_another_unit_keeps_the_gradient():
    post = fitted()
    assert gradcheck(
        lambda x: affine(post.predict(x, differentiable=True), 1.0, 2.0).log_prob(Y[:3]), at()
    )


def test_the_model_collects_no_gradient():
    model = mlp()
    post = ssla.fit(
        model, (X, Y), likelihood=L.Gaussian(0.3), prior=priors.Gaussian(2.0), weights="all"
    )
    post.predict(at(), differentiable=True).variance.sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is None for p in post.network.frozen.module.parameters())


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        return self.body(x.detach())


@pytest.mark.filterwarnings("ignore:`torch.jit")  # of torch.func.jacfwd itself
def test_what_has_no_gradient_is_refused():
    counts, gaussian = fitted("counts"), fitted()
    with pytest.raises(
        ValueError, match=r"not yet for Custom\(\) with refit='output'. posterior.marginal"
    ):
        fitted("own").predict(at(), differentiable=True)
    with pytest.raises(
        ValueError, match=r"not yet for Poisson\(\) with refit='newton'. Use refit='output'"
    ):
        counts.predict(at(), "newton", differentiable=True)
    free = counts.predict(at(), differentiable=True)
    for ask in (
        lambda: free.cdf(1),
        lambda: free.icdf(0.5),
        lambda: free.interval(0.9),
        lambda: free.mode,
        lambda: free.sample(1),
    ):
        with pytest.raises(ValueError, match="carries no gradient yet"):
            ask()
    for refit in ("weights", "auto"):
        with pytest.raises(ValueError, match=rf"not yet for refit='{refit}'. Use refit='output'"):
            gaussian.predict(at(), refit, differentiable=True)
    with pytest.raises(
        ValueError, match=r"not yet for Categorical\(\) with refit='none'. Use refit='output'"
    ):
        fitted("three classes").predict(at(), "none", differentiable=True)
    with pytest.raises(ValueError, match=r"not yet for Gaussian\(\) with refit='none'"):
        gaussian.predict(at(), ssla.NoRefit(curvature="empirical"), differentiable=True)
    with pytest.raises(ValueError, match="not yet for convention='paper'"):
        gaussian.with_prior(priors.Gaussian(1.0), convention="paper").predict(
            at(), differentiable=True
        )
    free = gaussian.predict(at(), differentiable=True)
    with pytest.raises(ValueError, match="Increments carry no gradient"):
        free.increments(Y[:3])
    with pytest.raises(ValueError, match="Mixtures carry no gradients"):
        mixture([free, free])
    with pytest.raises(ValueError, match=r"forward-mode tangent"):
        torch.func.jacfwd(lambda x: gaussian.marginal(x, differentiable=True).mean)(AT)
    with pytest.raises(
        ValueError, match=r"gradient would be zero here. Gradients need differentiable=True"
    ):
        gaussian.draw_functions(2)(at())


@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_a_network_without_a_derivative_is_refused(weights):
    post = ssla.fit(
        Detached(), (X, Y), likelihood=L.Gaussian(0.3), prior=priors.Gaussian(2.0), weights=weights
    )
    with pytest.raises(ValueError, match=r"outputs have no derivative in x. Likely causes"):
        post.marginal(at(), differentiable=True)


def test_a_singular_covariance_of_classes_is_refused():
    post = ssla.fit(
        mlp(outputs=3),
        (X, TARGETS["three classes"][1]),
        likelihood=L.Categorical(),
        prior=priors.Gaussian(2.0),
        weights=["0.bias"],
        gaussian="laplace",
    )
    zero = torch.full(
        (1, 3), 300.0, dtype=torch.float64
    )  # saturated units: no output depends on the first layer
    with pytest.raises(ValueError, match="covariance of the outputs is singular at 1 of 1 inputs"):
        post.predict(zero.requires_grad_(True), differentiable=True)


@pytest.mark.parametrize("target", [name for name in TARGETS if name != "own"])
def test_transforms_of_torch_func_give_the_same_gradients(target):
    post = fitted(target)

    def answer(row):
        p = post.predict(row[None], differentiable=True)
        return (p.probs if p.kind == "class" else p.mean + p.variance).flatten()[0]

    x = at()
    plain = torch.stack([torch.autograd.grad(answer(row), x)[0][i] for i, row in enumerate(x)])
    for transform in (torch.func.grad, torch.func.jacrev):
        assert torch.allclose(
            torch.stack([transform(answer)(row) for row in AT]), plain, atol=1e-12
        )
    variance = torch.func.vmap(
        torch.func.grad(lambda row: post.marginal(row[None], differentiable=True).covariance.sum())
    )
    (expected,) = torch.autograd.grad(post.marginal(x, differentiable=True).covariance.sum(), x)
    assert torch.allclose(variance(AT), expected, atol=1e-12)
    if target in ("three classes", "five classes"):
        assert torch.allclose(torch.func.vmap(torch.func.grad(answer))(AT), plain, atol=1e-12)
    if target in ("counts", "dispersed counts", "outliers", "noise by x"):
        with pytest.raises(ValueError, match="vmap"):
            torch.func.vmap(torch.func.grad(answer))(AT)


@pytest.mark.parametrize("target", ["three classes", "noise by x"])
def test_nodes_that_are_first_needed_inside_a_transform_are_kept_for_all(target):
    """Cached nodes are plain tensors, wherever the first call comes from."""
    post = fitted(target)

    def answer(row):
        p = post.predict(row[None], differentiable=True)
        return (p.probs if p.kind == "class" else p.mean + p.variance).flatten()[0]

    for nodes in (normal.gauss_hermite_rule, normal.normal_nodes, grid.node_pattern):
        nodes.cache_clear()
    inside = torch.func.grad(answer)(AT[0])
    for nodes in (normal.gauss_hermite_rule, normal.normal_nodes, grid.node_pattern):
        nodes.cache_clear()
    x = at()
    assert torch.allclose(inside, torch.autograd.grad(answer(x[0]), x)[0][0], atol=1e-12)


def test_vmap_over_inputs_of_all_weights_is_refused_in_words():
    post = ssla.fit(
        mlp(), (X, X[:, 0]), likelihood=L.Gaussian(0.3), prior=priors.Gaussian(2.0), weights="all"
    )
    with pytest.raises(
        ValueError,
        match=r"vmap over inputs is for posteriors of a last layer.*give all rows in one call",
    ):
        torch.func.vmap(lambda row: post.predict(row[None], differentiable=True).mean[0])(AT)
