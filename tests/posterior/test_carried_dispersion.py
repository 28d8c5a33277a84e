"""The dispersion of a posterior, given or chosen by validation rows, is kept by whatever is
made of it.
"""

import warnings

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors

G = torch.Generator().manual_seed(0)
X = torch.randn(160, 3, dtype=torch.float64, generator=G)
UNSEEN = torch.randn(80, 3, dtype=torch.float64, generator=G)
NEW = torch.randn(6, 3, dtype=torch.float64, generator=G)
PRIOR = priors.Gaussian(2.0)


def net(outputs=3):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)).double().eval()


def targets(model, likelihood, x):
    with torch.no_grad():
        return likelihood.sample(model(x), 1, torch.Generator().manual_seed(2))[0]


def fitted(likelihood, outputs, data=X, **options):
    model = net(outputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ssla.fit(
            model, (data, targets(model, likelihood, data)), likelihood=likelihood, **options
        )


# Dispersions that a default would not have: each is the likelihood of a fit with a factor on it
GIVEN = {
    "temperature": (L.Categorical(temperature=2.0), 3),
    "two classes": (L.Bernoulli(temperature=2.0), 1),
    "counts": (L.NegativeBinomial(3.0), 1),
    "noise": (L.Gaussian(noise=0.7), 1),
}


def chosen_by_rows(structure="dense"):
    """A temperature that is not one, chosen by validation rows."""
    model, truth = net(), L.Categorical(temperature=3.0)
    unseen = UNSEEN, targets(model, truth, UNSEEN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        post = ssla.fit(
            model,
            (X, targets(model, truth, X)),
            likelihood=L.Categorical(),
            validation=unseen,
            structure=structure,
            mode="tilt",
        )
    assert post.likelihood.temperature > 1.2
    return post


def posteriors():
    found = {
        name: lambda given=given: fitted(*given, prior=PRIOR, mode="tilt")
        for name, given in GIVEN.items()
    }
    return {**found, "chosen": chosen_by_rows, "chosen, kfac": lambda: chosen_by_rows("kfac")}


@pytest.fixture(scope="module", params=posteriors())
def post(request):
    return posteriors()[request.param]()


def answers(posterior):
    found = posterior.predict(NEW)
    return found.probs if found.kind == "class" else found.variance


def assert_kept(made, post):
    assert repr(made.likelihood) == repr(post.likelihood)
    assert made.report.likelihood == post.report.likelihood


def test_a_saved_posterior(post, tmp_path):
    post.save(tmp_path / "saved")
    found = ssla.load(tmp_path / "saved", net(post.report.outputs))
    assert_kept(found, post)
    assert torch.equal(answers(found), answers(post))


def test_another_prior(post):
    found = post.with_prior(post.prior)
    assert_kept(found, post)
    assert (answers(found) - answers(post)).abs().max() < 1e-6
    assert_kept(post.with_prior(priors.Gaussian(5.0)), post)


def test_more_data_and_merged_posteriors(post):
    model = net(post.report.outputs)
    rows = UNSEEN, targets(model, post.likelihood, UNSEEN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        more = post.update(rows)
        options = {"gaussian": "laplace", "structure": post.report.structure, "mode": "tilt"}
        parts = [(X, targets(model, post.likelihood, X)), rows]
        shards = [
            ssla.fit(model, part, likelihood=post.likelihood, prior=PRIOR, **options)
            for part in parts
        ]
        both = [torch.cat(pair) for pair in zip(*parts, strict=True)]
        whole = ssla.fit(model, tuple(both), likelihood=post.likelihood, prior=PRIOR, **options)
    merged = shards[0].merge(shards[1])
    assert_kept(more, post)
    assert_kept(merged, post)
    assert (answers(merged) - answers(whole)).abs().max() < 1e-9


def test_posteriors_of_other_temperatures_do_not_merge():
    options = {"prior": PRIOR, "mode": "tilt", "gaussian": "laplace"}
    first, second = (fitted(L.Categorical(temperature=t), 3, **options) for t in (1.0, 2.0))
    with pytest.raises(ValueError, match="likelihood"):
        first.merge(second)


def test_an_exported_graph(post, tmp_path):
    """`export` compares the file with `predict` on the example.

    Sums over counts are cut at 1e-6.
    """
    made = post.export(tmp_path / "model.pt2", (0.05, 0.5, 0.95), NEW)
    assert max(value for own in made.differences.values() for value in own.values()) < 1e-5
    graph = torch.export.load(tmp_path / "model.pt2").module()
    found = graph(NEW)
    first = next(iter(found.values())) if isinstance(found, dict) else found[0]
    expected = post.predict(NEW)
    assert torch.allclose(
        first, expected.probs if expected.kind == "class" else expected.mean, atol=1e-5
    )
