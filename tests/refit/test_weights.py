"""SSLA itself against brute force, closed forms and its own theorems."""

import math

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.refit.weights import all_weights
from ssla.refit.weights import weight_log_density as weights
from ssla.refit.weights.last_layer_group import Group
from support.oracles import brute_force_refit
from support.refits import FAMILIES, T, classes_at, inputs, last_layer, seeded, small_network


@pytest.mark.parametrize("name", FAMILIES)
def test_last_layer_equals_brute_force(name):
    post, new, candidates, log_joint, log_new = last_layer(name)
    y = candidates.expand(len(new), -1)
    found = ssla.WeightRefit(tolerance=1e-9)(post, new)
    totals, solved = found(y).total, found.solve(y)
    assert solved.converged.all()
    assert not solved.fallback.any()
    for i in range(len(new)):
        for j, value in enumerate(candidates):
            expected, _ = brute_force_refit(log_joint, log_new(i, value), post.theta)
            assert abs(float(totals[i, j]) - expected) < 1e-6


@pytest.mark.filterwarnings("ignore:On the training rows the predictive is worse")
def test_classes_that_the_network_holds_for_impossible_are_refitted_too(monkeypatch):
    """Three classes far apart: p of the others is 1e-3 to 1e-9, their refits go far. By the shared
    preconditioner alone some of them do not arrive.
    """
    centres = T([4.0, 0.0], [-2.0, 3.5], [-2.0, -3.5])
    y = torch.arange(90) % 3
    x = centres[y] + 0.7 * inputs(90, 4)
    model = nn.Linear(2, 3).double()
    post = ssla.fit(
        model, (x, y), likelihood=L.Categorical(), prior=priors.Gaussian(0.02), gaussian="laplace"
    )
    new, classes = centres * 1.3, torch.arange(3).double().expand(3, -1)

    def outputs(theta, rows):  # of each class its weights and its bias
        return rows @ theta.reshape(3, 3)[:, :2].mT + theta.reshape(3, 3)[:, 2]

    def log_joint(theta):
        return outputs(theta, x).log_softmax(1)[torch.arange(90), y].sum() - 0.01 * (theta @ theta)

    log_density = ssla.WeightRefit(tolerance=1e-8)(post, new)
    solved = log_density.solve(classes)
    assert solved.converged.all()
    totals = log_density(classes).total
    assert post.predict(new, "none").probs.amin() < 1e-6
    for i in range(3):
        for k in range(3):
            expected, _ = brute_force_refit(
                log_joint, lambda t, i=i, k=k: outputs(t, new[i]).log_softmax(-1)[k], post.theta
            )
            assert abs(float(totals[i, k]) - expected) < 1e-6
    monkeypatch.setattr("ssla.refit.weights.last_layer.SHARED_STEPS", 100)
    assert not ssla.WeightRefit()(post, new).solve(classes).converged.all()


@pytest.mark.parametrize("name", ["heteroscedastic", "poisson"])
def test_row_weights_and_a_tilted_network_equal_brute_force(name):
    """A network that is not at its mode, kept as it is by the tilt; rows that count with
    weights.
    """
    weights = 0.5 + torch.rand(70, dtype=torch.float64, generator=seeded(8))
    post, new, candidates, log_joint, log_new = last_layer(name, weights=weights, mode="tilt")
    found = ssla.WeightRefit()(post, new)(candidates.expand(len(new), -1)).total
    for i, j in ((0, 0), (1, 1), (2, -1)):
        expected, _ = brute_force_refit(log_joint, log_new(i, candidates[j]), post.theta)
        assert abs(float(found[i, j]) - expected) < 1e-6


def plausible(post, new, candidates):
    """y in the body of the predictive (far outside, a network has several modes to refit to):
    (N, k).
    """
    predictive = post.predict(new)
    return (
        predictive.icdf(T(0.02, 0.3, 0.7, 0.98))
        if hasattr(predictive, "icdf")
        else candidates.expand(len(new), -1)
    )


@pytest.mark.parametrize("name", ["gaussian", "heteroscedastic", "poisson", "categorical"])
def test_all_weights_with_the_full_hessian_equal_brute_force(name):
    post, new, candidates, log_joint, log_new, _ = small_network(name)
    found = ssla.WeightRefit(curvature="hessian")(post, new)
    y = plausible(post, new, candidates)
    totals, solved = found(y).total, found.solve(y)
    assert solved.converged.all()
    assert not solved.fallback.any()
    for i in range(len(new)):
        for j, value in enumerate(y[i]):
            expected, _ = brute_force_refit(log_joint, log_new(i, value), post.theta)
            assert abs(float(totals[i, j]) - expected) < 1e-4


@pytest.mark.parametrize("structure", ["dense", "kfac", "diag"])
def test_all_weights_with_gauss_newton_equal_brute_force_for_every_structure(structure):
    """The structure preconditions; the answer does not depend on it."""
    post, new, candidates, log_joint, log_new, outputs_of = small_network(
        "gaussian", structure=structure
    )

    def logdet(t, augmented):  # Σ JᵀJ/σ² + prior, by a Jacobian of all rows at once
        J = torch.func.jacrev(lambda s: outputs_of(s, augmented))(t).flatten(0, 1)
        return float(torch.linalg.slogdet(J.mT @ J / 0.25 + 0.3 * torch.eye(len(t)))[1])

    y = plausible(post, new, candidates)
    found = ssla.WeightRefit(curvature="fisher")(post, new)(y)
    for i in range(len(new)):
        for j, value in enumerate(y[i]):
            _, end = brute_force_refit(log_joint, log_new(i, value), post.theta)
            slope = torch.func.grad(log_joint)(post.theta)
            gain = (
                log_joint(end)
                - log_joint(post.theta)
                + log_new(i, value)(end)
                - slope @ (end - post.theta)
            )
            expected = float(gain) - 0.5 * (logdet(end, i) - logdet(post.theta, None))
            assert abs(float(found.total[i, j]) - expected) < 1e-4
            assert (
                abs(float(found.prior[i, j] + 0.15 * ((end**2).sum() - (post.theta**2).sum())))
                < 1e-6
            )


def test_many_weights_at_a_true_mode_are_refitted_to_the_mode_of_the_augmented_objective():
    """Beyond the weights that get Hessians of their own: the gradient at θ̃ vanishes, the
    increments are those of direct sums.
    """
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)
    ).double()
    x = torch.randn(120, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = x[:, 0].sin() + 0.3 * torch.randn(
        120, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    shapes = {name: p.shape for name, p in net.named_parameters()}

    def objective(theta, rows, targets):
        parts = torch.split(theta, [shape.numel() for shape in shapes.values()])
        named = {
            name: part.view(shape)
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }
        f = torch.func.functional_call(net, named, (rows,))[:, 0]
        return torch.distributions.Normal(f, 0.3).log_prob(targets).sum(), -5 * (theta**2).sum()

    optimiser = torch.optim.LBFGS(
        net.parameters(),
        max_iter=2000,
        history_size=50,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-9,
    )

    def closure():
        optimiser.zero_grad()
        theta = torch.cat([p.flatten() for p in net.parameters()])
        loss = -sum(objective(theta, x, y))
        loss.backward()
        return loss

    optimiser.step(closure)
    prior = ssla.priors.Gaussian(precision=10.0)
    post = ssla.fit(
        net.eval(),
        (x, y),
        likelihood=L.Gaussian(noise=0.3),
        prior=prior,
        weights="all",
        mode="as_is",
    )
    assert post.report.parameters == 501
    new = torch.tensor([[0.5, -0.2], [1.5, 1.0]], dtype=torch.float64)
    candidates = post.predict(new).icdf(torch.tensor([0.1, 0.7], dtype=torch.float64))
    log_density = ssla.WeightRefit(tolerance=1e-7, logdet="frozen")(post, new)
    solved = log_density.solve(candidates)
    assert bool(solved.converged.all())
    modes = log_density.find_weights_at_modes(candidates).reshape(4, -1)
    base = objective(post.theta, x, y)
    for k, theta in enumerate(modes):
        row, value = new[k // 2 : k // 2 + 1], candidates.flatten()[k : k + 1]
        free = theta.clone().requires_grad_(True)
        fit, belief = objective(free, torch.cat([x, row]), torch.cat([y, value]))
        (gradient,) = torch.autograd.grad(fit + belief, free)
        assert float(gradient.norm()) < 1e-4  # in units of 1/θ; the decrement is below 1e-7
        assert float(solved.likelihood[k]) == pytest.approx(
            float((fit - base[0]).detach()), abs=1e-8
        )
        assert float(solved.prior[k]) == pytest.approx(float((belief - base[1]).detach()), abs=1e-8)


def many_features(likelihood, precision=1.0):
    torch.manual_seed(0)
    net = (
        nn.Sequential(
            nn.Linear(3, 30),
            nn.Tanh(),
            nn.Linear(30, 1 if isinstance(likelihood, L.Poisson) else 2),
        )
        .double()
        .eval()
    )
    x = torch.randn(150, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(150, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    y = (
        (x[:, 0] + 0.5).exp().round()
        if isinstance(likelihood, L.Poisson)
        else x[:, 0] + 0.4 * noise
    )
    post = ssla.fit(
        net,
        (x, y),
        likelihood=likelihood,
        prior=ssla.priors.Gaussian(precision=precision),
        gaussian="laplace",
    )
    return post, x[:5] + 0.3


@pytest.mark.parametrize(
    "likelihood", [L.HeteroscedasticGaussian(), L.Poisson()], ids=["heteroscedastic", "poisson"]
)
def test_single_precision_products_change_the_determinant_by_rounding_only(likelihood, monkeypatch):
    """With many features ΔH is formed in float32, its trace in float64: 1e-9 of float64;
    without that trace 2e-9 to 5e-9 off.
    """
    post, new = many_features(likelihood)
    candidates = post.predict(new).icdf(torch.tensor([0.01, 0.3, 0.99], dtype=torch.float64))
    single = ssla.ssla(post, new, candidates)
    monkeypatch.setattr("ssla.refit.weights.last_layer_group.MANY_FEATURES", 10_000)
    double = ssla.ssla(post, new, candidates)
    assert not torch.equal(single.curvature, double.curvature)  # they were computed in two ways
    assert torch.allclose(single.curvature, double.curvature, rtol=0, atol=1e-9)
    assert torch.equal(single.likelihood, double.likelihood)


def test_a_large_change_of_curvature_is_formed_in_double_precision(monkeypatch):
    """A weak prior and a far y: single precision would be off by 1e-6, and is not used."""
    post, new = many_features(L.HeteroscedasticGaussian(), precision=0.01)
    candidates = post.predict(new).icdf(torch.tensor([0.01, 0.3, 0.999], dtype=torch.float64))
    found = ssla.ssla(post, new, candidates).curvature
    monkeypatch.setattr("ssla.refit.weights.last_layer_group.LARGE_CHANGE", math.inf)
    single = ssla.ssla(post, new, candidates).curvature
    monkeypatch.setattr("ssla.refit.weights.last_layer_group.MANY_FEATURES", 10_000)
    double = ssla.ssla(post, new, candidates).curvature
    assert (single - double).abs().max() > 1e-7
    assert torch.allclose(found, double, rtol=0, atol=1e-12)


# --- networks that are no mode ---------------------------------------------------------------


def untrained(width, precision=1.0, mode="tilt", outputs=3):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(2, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, outputs),
    ).double()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(2.0)
    x = inputs(60, 1)
    options = {
        "weights": "all",
        "structure": "kfac",
        "prior": priors.Gaussian(precision=precision),
        "mode": mode,
    }
    return ssla.fit(
        net.eval(), (x, classes_at(x)), likelihood=L.Categorical(), gaussian="laplace", **options
    ), 2 * inputs(4, 2)


FAR = r"The 3 easiest made no progress.*are [\d.]+ posterior standard deviations.*per parameter.*train the network.*polish"


def counted(monkeypatch):
    """Rows of data times tasks of every gradient that is taken."""
    work, gradient = [0], all_weights.ManyNetworks.compute_gradients

    def count(self, thetas, *rest, **options):
        work[0] += len(thetas)
        return gradient(self, thetas, *rest, **options)

    monkeypatch.setattr(all_weights.ManyNetworks, "compute_gradients", count)
    return work


def test_refits_without_a_mode_are_given_up_early_and_counted(monkeypatch):
    post, new = untrained(22)
    work, few = counted(monkeypatch), ssla.WeightRefit(max_steps=60, linearised=False)
    new = new.repeat(3, 1) + 0.1 * inputs(12, 3)
    with pytest.warns(
        RuntimeWarning,
        match=f"12 of 12 inputs have refits of the weights that did not converge and use.*{FAR}",
    ):
        found = post.predict(new, refit=few)
    early = work[0]
    assert torch.equal(found.probs, post.predict(new).probs)
    assert set(found.diagnostics.rung) == {"output"}
    assert int(found.diagnostics.refits.sum()) == 0
    monkeypatch.setattr(weights.WeightLogDensity, "_try_some_refits", lambda *_: None)
    log_density = few(post, new)
    solved = log_density.solve(torch.arange(3.0).double().expand(12, 3))
    assert not solved.converged.any()  # the verdict was right
    assert early < 0.1 * (work[0] - early)


def test_few_weights_without_a_mode_are_given_up_too():
    post, new = untrained(12)
    with pytest.warns(RuntimeWarning, match=rf"4 of 4 inputs have refits.*{FAR}"):
        answer = post.predict(new, refit=ssla.WeightRefit(linearised=False))
    assert torch.equal(answer.probs, post.predict(new).probs)


def test_a_network_without_a_mode_is_refused_or_nan_as_asked():
    post, new = untrained(22)
    y = torch.arange(3.0).double().expand(4, 3)
    with pytest.raises(
        RuntimeError,
        match=rf"12 of 12 refits did not reach their mode.*{FAR}.*on_failure='fallback'",
    ):
        post.predict(new, refit=ssla.WeightRefit(on_failure="raise"))
    with pytest.warns(RuntimeWarning, match=rf"4 of 4 inputs .* are NaN.*{FAR}"):
        assert post.predict(new, refit=ssla.WeightRefit(on_failure="nan")).mean.isnan().all()
    with pytest.warns(
        RuntimeWarning,
        match=rf"12 of 12 refits of the weights did not converge and use the output rung.*{FAR}",
    ):
        found = ssla.ssla(post, new, y, ssla.WeightRefit(linearised=False))
    assert torch.equal(found.total, post.predict(new).increments(y).total)
    never = ssla.AutoRefit(target=1e-6, weights=ssla.WeightRefit(linearised=False))
    with pytest.warns(RuntimeWarning, match=rf"4 of 4 inputs have refits.*{FAR}"):
        assert set(post.predict(new, refit=never).diagnostics.rung) == {"output"}


def test_a_network_without_a_mode_is_linearised_by_weights_and_by_auto():
    """With the trial itself, not a stand-in for it."""
    post, new = untrained(22)
    asked = post.predict(new, refit=ssla.WeightRefit(linearised=True))
    for refit in ("weights", ssla.AutoRefit(target=1e-6)):
        with pytest.warns(
            RuntimeWarning, match="linearised at the trained weights was refitted in its place"
        ):
            answer = post.predict(new, refit=refit)
        assert set(answer.diagnostics.rung) == {"weights"}
        assert answer.diagnostics.linearised.all()
        assert torch.equal(answer.probs, asked.probs)


def test_a_tilted_network_at_a_distance_is_refitted():
    """Untrained, but under a prior that makes the log posterior concave around it: no warning,
    all converge.
    """
    post, new = untrained(22, precision=300.0)
    assert post.report.residual_per_parameter > 1
    found = post.predict(new, refit="weights")
    assert set(found.diagnostics.rung) == {"weights"}


@pytest.mark.parametrize("refit", ["weights", "auto"])
@pytest.mark.parametrize("name", ["heteroscedastic", "categorical", "poisson"])
def test_last_layer_refits_that_fall_back_are_counted_aloud(name, refit):
    post, new, *_ = last_layer(name)
    few = ssla.WeightRefit(max_steps=1, tolerance=1e-12)
    rung = few if refit == "weights" else ssla.AutoRefit(target=1e-9, weights=few)
    count = rf"{len(new)} of {len(new)} inputs have refits of the weights that did not converge and use the output rung"
    with pytest.warns(
        RuntimeWarning, match=rf"{count}.*posterior standard deviations from the mode"
    ) as seen:
        found = post.predict(new, refit=rung)
    assert "mode='polish'" not in str(seen[0].message)  # it is polished
    assert "not tried" not in str(seen[0].message)
    assert seen[0].filename == __file__
    assert torch.allclose(found.mean, post.predict(new).mean)
    y = torch.ones(len(new), dtype=torch.float64)
    with pytest.warns(
        RuntimeWarning,
        match=rf"{len(new)} of {len(new)} refits of the weights did not converge and use",
    ) as seen:
        ssla.ssla(post, new, y, few)
    assert seen[0].filename == __file__


def wide_classes(weighted=False, prior=0.3, gaussian="laplace"):
    """A last layer of four classes with 30 features, where determinants may be in single
    precision.
    """
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 29), nn.Tanh(), nn.Linear(29, 4)).double()
    post = ssla.fit(
        model,
        wide_rows(weighted),
        likelihood=L.Categorical(),
        prior=priors.Gaussian(prior),
        gaussian=gaussian,
    )
    return post, 1.5 * inputs(12, 6, width=5), torch.arange(4).double().expand(12, -1)


def wide_rows(weighted):
    x = inputs(150, 5, width=5)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] + 0.3 * x[:, 2] > 0).long()
    return (x, y, torch.linspace(0.2, 2.0, 150, dtype=torch.float64)) if weighted else (x, y)


def test_classes_are_by_default_within_1e_3_of_refits_to_the_end():
    post, new, y = wide_classes()
    exact = ssla.WeightRefit(tolerance=1e-9)(post, new).solve(y)
    quick = ssla.WeightRefit()(post, new).solve(y)
    assert exact.converged.all()
    assert quick.converged.all()
    assert (quick.total - exact.total).abs().max() < 1e-3
    assert (quick.curvature - exact.curvature).abs().max() < 1e-3
    assert exact.curvature.abs().max() > 0.3  # determinants that change
    assert quick.steps.double().mean() < exact.steps.double().mean()


def test_rare_classes_change_as_the_rarest_class_with_a_refit():
    post, new, _ = wide_classes()
    output = post.predict(new).probs
    rare = output < 0.02
    assert rare.any(1).any()
    some = post.predict(new, refit=ssla.WeightRefit(rare=0.02))
    every = post.predict(new, refit=ssla.WeightRefit(rare=0))
    alone = (~rare).sum(
        1
    ) == 1  # the only class that is not rare is sure of its probability: no refit changes it
    assert alone.any()
    assert torch.equal(some.diagnostics.refits, torch.where(alone, 0, (~rare).sum(1)))
    assert (every.diagnostics.refits == 4).all()
    assert set(some.diagnostics.rung) == {"weights"}
    before_normalising = some.probs * some.mass.unsqueeze(1)
    rarest = torch.where(rare, torch.inf, output).argmin(1, keepdim=True)
    change = (
        (before_normalising / output).gather(1, rarest).where(~alone.unsqueeze(1), torch.ones(()))
    )
    assert torch.allclose(before_normalising[rare], (output * change)[rare])
    assert torch.allclose(some.probs[alone], output[alone])
    refitted = ~rare & ~alone.unsqueeze(1)
    assert torch.allclose(
        before_normalising[refitted], (every.probs * every.mass.unsqueeze(1))[refitted], atol=1e-4
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("tolerance", [1e-9, 1e-4])
def test_determinants_in_contrasts_of_classes_are_those_of_all_outputs(weighted, tolerance):
    post, new, y = wide_classes(weighted)
    engine = ssla.WeightRefit(tolerance=tolerance).open_engine(post, new)
    where = torch.arange(12).repeat_interleave(4)
    group = Group(engine, engine.initial_curvatures[0], where, y.flatten().long())
    point = engine._find_modes(group).point
    contrasts, _ = group.compute_curvature_increments(point, engine.contrast_curvature)
    whole, _ = group.compute_curvature_increments(point, engine.initial_curvatures[0])
    steps = engine.from_basis(point)
    by_hand = torch.stack(
        [
            curvature_by_hand(post, wide_rows(weighted), new[i], step)
            for i, step in zip(where, steps, strict=True)
        ]
    )
    assert by_hand.abs().max() > 0.3
    within = 1e-7 if tolerance < 1e-6 else 2e-4  # ΔH is in single precision, its trace is not
    torch.testing.assert_close(contrasts, by_hand, rtol=0, atol=within)
    torch.testing.assert_close(contrasts, whole, rtol=0, atol=within)


def curvature_by_hand(post, data, x, step):
    """−½[log|H̃(θ̃)| − log|H(θ̂)|] of a softmax layer under the prior's precision 0.3, from
    whole matrices.
    """
    rows, weights = torch.cat([data[0], x[None]]), torch.ones(151, dtype=torch.float64)
    if len(data) > 2:
        weights[:-1] = data[2]
    with torch.no_grad():
        phi = torch.cat(
            [post.network.frozen.module[:-1](rows), torch.ones(151, 1, dtype=torch.float64)], 1
        )

    def logdet(theta, n):
        p = (phi[:n] @ theta.reshape(4, -1).mT).softmax(1)
        Lambda = (torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)) * weights[:n, None, None]
        H = torch.einsum("nab,nf,ng->afbg", Lambda, phi[:n], phi[:n]).reshape(len(theta), -1)
        return torch.logdet(H + 0.3 * torch.eye(len(theta), dtype=torch.float64))

    return 0.5 * (logdet(post.theta, 150) - logdet(post.theta + step, 151))


def test_classes_with_priors_of_their_own_have_no_contrasts():
    alike, new, _ = wide_classes()
    weight = torch.full((4, 29), 0.3, dtype=torch.float64)
    weight[0] = 0.6
    different, _, _ = wide_classes(prior={"2.weight": weight, "2.bias": 0.3})
    assert ssla.WeightRefit().open_engine(alike, new).contrast_curvature is not None
    assert ssla.WeightRefit().open_engine(different, new).contrast_curvature is None


@pytest.mark.parametrize("rare", [-0.1, 1.0, "few", True])
def test_rare_is_a_probability(rare):
    with pytest.raises(ValueError, match="rare must be a number from 0 and below 1"):
        ssla.WeightRefit(rare=rare)


def test_newton_starts_again_where_the_shared_steps_were_lost(monkeypatch):
    """For a y far out 20 steps with the shared preconditioner end a standard deviation from the
    mode.
    """
    generator = torch.Generator().manual_seed(2)
    x = 5 * torch.rand(150, 1, dtype=torch.float64, generator=generator) - 2.5
    up, down = torch.tanh(1.5 * (x[:, 0] + 1)), torch.tanh(1.5 * (x[:, 0] - 1))
    y = (
        up
        - down
        + 0.2 * torch.exp(0.3 * up) * torch.randn(150, dtype=torch.float64, generator=generator)
    )
    model = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    trained = (
        [[1.45842], [1.51449]],
        [1.35132, -1.39103],
        [[1.06995, -1.02606], [0.42388, 0.21133]],
        [0.04839, -3.10983],
    )
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), trained, strict=True):
            parameter.copy_(torch.tensor(value))
    law = ssla.likelihoods.HeteroscedasticGaussian()
    post = ssla.fit(
        model,
        (x, y),
        likelihood=law,
        prior=ssla.priors.Gaussian(1.0),
        gaussian="laplace",
        weights="all",
    )
    new = torch.tensor([[3.0], [3.5]], dtype=torch.float64)
    far = torch.linspace(-1.6, -1.0, 30, dtype=torch.float64).expand(2, -1)

    def solved(most):
        refit = ssla.WeightRefit(max_steps=most, linearised=False)
        return refit(post, new).solve(far)

    found = solved(40)
    assert found.converged.all()
    assert (
        found.total.reshape(2, 30).diff(n=3, dim=1).abs().max() < 2e-4
    )  # one mode for all y, not another one for some
    monkeypatch.setattr("ssla.refit.weights.all_weights.LOST", math.inf)
    assert not solved(100).converged.all()
    assert solved(1000).total.reshape(2, 30).diff(n=3, dim=1).abs().max() > 1e-3
