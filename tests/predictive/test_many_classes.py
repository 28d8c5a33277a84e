"""Many classes by slabs of nodes: equal to the plain sum over the nodes, however the products
are made.
"""

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.maths.roots import FullRoot, ScaledRoot
from ssla.predictive import class_integrals, many_classes
from ssla.predictive.class_integrals import (
    ClassIntegrals,
    integrate_classes,
    make_softmax_nodes,
    multiply_root_by_nodes,
)

T = {"dtype": torch.float64}


def reference(f, root):
    """One row at a time, all nodes at once, in float64."""
    z = make_softmax_nodes(f.shape[1]).to(root.dtype)
    logs = torch.log_softmax(f.unsqueeze(-1) + multiply_root_by_nodes(root, z).double(), 1)
    p = logs.exp()
    log_probs = torch.log_softmax(logs.logsumexp(-1), 1)
    return ClassIntegrals(log_probs, p.var(-1, correction=0), torch.special.entr(p).sum(1).mean(-1))


def close(found, expected, tolerance):
    assert (found.log_probs.exp() - expected.log_probs.exp()).abs().max() < tolerance
    assert (
        (found.log_probs - expected.log_probs) / expected.log_probs.abs().clamp_min(1)
    ).abs().max() < 10 * tolerance
    assert (found.spread - expected.spread).abs().max() < tolerance
    assert (found.entropy - expected.entropy).abs().max() < 10 * tolerance


def scaled_root(classes, rows, dtype=torch.float64, profiles=2):
    """Scales of all rows in the span of the profiles."""
    g = torch.Generator().manual_seed(3)
    basis = torch.linalg.qr(torch.randn(classes, classes, generator=g, **T))[0].to(dtype)
    span = torch.linalg.qr(torch.rand(classes, profiles, generator=g, **T) + 1)[0].mT.contiguous()
    span = span * span[:, :1].sign()
    weights = torch.tensor([[8.0] + [0.1] * (profiles - 1)], **T) * (
        0.5 + torch.rand(rows, profiles, generator=g, **T)
    )
    return ScaledRoot((weights @ span).abs().to(dtype), basis, lambda: span), 3 * torch.randn(
        rows, classes, generator=g, **T
    )


def fitted(classes, structure="kfac", dtype=torch.float32, seed=0, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 30), nn.ReLU(), nn.Linear(30, classes)).to(dtype).eval()
    with torch.no_grad():
        model[2].weight.mul_(3)
        x = torch.randn(400, 8, dtype=dtype)
        y = torch.distributions.Categorical(logits=model(x)).sample()
    return ssla.fit(
        model,
        (x, y),
        likelihood=L.Categorical(),
        prior=priors.Gaussian(1.0),
        structure=structure,
        mode="tilt",
        **options,
    )


@pytest.mark.parametrize("classes", [32, 60, 200])  # whitened nodes up to 128
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6)])
def test_slabs_equal_the_plain_sum(classes, dtype, tolerance):
    root, f = scaled_root(classes, 23, dtype)
    expected = reference(f, root)
    close(integrate_classes([(f, root)], classes, 1 << 30), expected, tolerance)  # shared products
    plain = ScaledRoot(root.scale, root.basis)
    close(integrate_classes([(f, plain)], classes, 1 << 30), expected, tolerance)
    diagonal = ScaledRoot(root.scale)
    close(integrate_classes([(f, diagonal)], classes, 1 << 30), reference(f, diagonal), tolerance)
    full = FullRoot(root.multiply(torch.eye(classes, dtype=dtype)))
    close(integrate_classes([(f, full)], classes, 1 << 30), expected, tolerance)


def test_shared_products_are_taken_where_they_are_worth_it(monkeypatch):
    root, f = scaled_root(40, 30)
    calls = []
    product = ScaledRoot.multiply_outputs_last
    monkeypatch.setattr(
        ScaledRoot,
        "multiply_outputs_last",
        lambda self, z: calls.append(len(self.scale)) or product(self, z),
    )
    whole = integrate_classes([(f, root)], 40, 1 << 30)
    assert not calls
    few = integrate_classes([(f[:3], root.select_rows(slice(3)))], 40, 1 << 30)
    assert sum(calls) == 3
    assert (whole.log_probs[:3] - few.log_probs).abs().max() < 1e-12
    calls.clear()
    small = integrate_classes([(f, root)], 40, 1 << 10)  # no room for the products
    assert sum(calls) == 30
    assert (whole.log_probs - small.log_probs).abs().max() < 1e-12


def test_rows_outside_the_span_take_their_own_product():
    root, f = scaled_root(40, 30)
    scale = root.scale.clone()
    scale[[4, 17]] *= torch.linspace(0.2, 2, 40, **T)
    odd = ScaledRoot(scale, root.basis, root.profiles)
    found = integrate_classes([(f, odd)], 40, 1 << 30)
    close(found, reference(f, odd), 1e-12)
    shared = many_classes.build_shared_nodes(odd, make_softmax_nodes(40).mT[:256])
    assert (
        ~shared.find_covered_rows(odd, many_classes.TOLERANCE)
    ).nonzero().flatten().tolist() == [4, 17]


def test_chunks_share_their_products():
    root, f = scaled_root(40, 30)
    parts = [(f[i : i + 3], root.select_rows(slice(i, i + 3))) for i in range(0, 30, 3)]
    whole = integrate_classes([(f, root)], 40, 1 << 30)
    by_chunks = integrate_classes(parts, 40, 1 << 30, rows=30)
    close(by_chunks, whole, 1e-13)
    single = integrate_classes(parts, 40, 1 << 30, rows=30, dtype=torch.float32)
    assert single.log_probs.dtype == single.spread.dtype == torch.float32
    close(single, whole, 1e-6)


@pytest.mark.parametrize("prior", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("classes", [40, 150])
def test_profiles_span_the_scales_of_any_row(classes, prior):
    post = fitted(classes, dtype=torch.float64).with_prior(priors.Gaussian(prior))
    (operator,) = post.covariance.layers
    profiles = operator.profiles
    assert len(profiles) <= 24
    assert (profiles @ profiles.mT - torch.eye(len(profiles), **T)).abs().max() < 1e-12
    for x in (torch.randn(200, 8, **T), 30 * torch.randn(200, 8, **T), torch.zeros(1, 8, **T)):
        for _, root in post.iterate_means_and_roots(x):
            off = root.scale - root.scale @ profiles.mT @ profiles
            assert (off.abs().amax(1) / root.scale.amax(1)).max() < many_classes.TOLERANCE


@pytest.mark.parametrize("structure", ["kfac", "diag", "dense", "low_rank"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-7), (torch.float32, 3e-6)])
def test_predict_equals_the_plain_sum(structure, dtype, tolerance):
    post = fitted(40, structure, dtype)
    x = torch.randn(60, 8, dtype=dtype)
    p = post.predict(x)
    parts = [reference(f, root) for f, root in post.iterate_means_and_roots(x)]
    expected = torch.cat([part.log_probs for part in parts]).exp()
    assert (p.probs - expected).abs().max() < tolerance
    few = post.predict(x[:2])
    assert (few.probs - p.probs[:2]).abs().max() < tolerance
    with_graph = post.predict(x[:9], differentiable=True)
    assert (with_graph.probs - p.probs[:9]).abs().max() < tolerance
    assert (with_graph.mutual_information - p.mutual_information[:9]).abs().max() < 10 * tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tiny_probabilities_are_summed_in_logarithms(dtype):
    root, f = scaled_root(40, 12, dtype)
    f[2, 5], f[7, 0], f[7, 1] = -2000.0, -400.0, 300.0
    found = integrate_classes([(f, root)], 40, 1 << 30)
    assert torch.isfinite(found.log_probs).all()
    close(found, reference(f, root), 1e-12 if dtype == torch.float64 else 1e-5)


def test_a_class_that_is_likely_at_the_mean_and_nowhere_else():
    """The likeliest class of f̂ has no probability at some nodes: the entropy is then found
    from another class.
    """
    root, f = scaled_root(40, 12, torch.float32)
    wide = ScaledRoot(200 * root.scale, root.basis, root.profiles)
    close(
        integrate_classes([(f, wide)], 40, 1 << 30), reference(f, wide), 1e-3
    )  # float32 products of size 1,000


def test_nan_stays_in_its_row():
    root, f = scaled_root(40, 12)
    f[3] = torch.nan
    found = integrate_classes([(f, root)], 40, 1 << 30)
    for part in (found.log_probs[:, 0], found.spread[:, 0], found.entropy):
        assert part.isnan().nonzero().flatten().tolist() == [3]


def test_very_many_answers_are_held_in_float32(monkeypatch):
    import ssla.predictive as predictive

    post = fitted(40)
    x, y = torch.randn(50, 8), torch.arange(50) % 40
    whole = post.predict(x)
    monkeypatch.setattr(predictive, "MOST_IN_FLOAT64", 100)
    monkeypatch.setattr(class_integrals, "ENTRIES_AT_ONCE", 90)  # entropies of two rows at a time
    held = post.predict(x)
    assert whole.law.log_weights.dtype == torch.float64
    assert held.law.log_weights.dtype == held.law.integrals.spread.dtype == torch.float32
    for name in (
        "probs",
        "variance",
        "epistemic",
        "aleatoric",
        "entropy",
        "mutual_information",
        "mass",
    ):
        assert (getattr(held, name) - getattr(whole, name)).abs().max() < 1e-6
    assert (held.log_prob(y) - whole.log_prob(y)).abs().max() < 1e-5
    assert torch.equal(held.mode, whole.mode)
    assert (held.interval(0.9) == whole.interval(0.9)).float().mean() > 0.99
    double = fitted(40, dtype=torch.float64).predict(x.double())
    assert double.law.log_weights.dtype == torch.float64


def test_sets_of_classes_are_found_by_blocks(monkeypatch):
    import ssla.predictive.class_law as classes

    p = torch.softmax(torch.randn(37, 9, generator=torch.Generator().manual_seed(1), **T), 1)
    p[4] = torch.nan
    whole = classes.select_smallest_set(p, 0.8)
    monkeypatch.setattr(classes, "ENTRIES_AT_ONCE", 20)
    assert torch.equal(classes.select_smallest_set(p, 0.8), whole)
    assert classes.select_smallest_set(p[:0], 0.8).shape == (0, 9)
