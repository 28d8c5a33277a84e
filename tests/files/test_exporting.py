"""Exported graphs: against the library, in torch.export and onnxruntime, for any number of rows."""

from types import SimpleNamespace

import pytest
import torch

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.files.exporting import exported_files
from ssla.files.exporting.count_nodes import make_count_law
from ssla.maths import portable
from ssla.refit import make_log_density_of_marginal, resolve
from support.networks import data, mlp

X, Y = data(60)
LEVELS = (0.05, 0.5, 0.95)
MODELS = {
    "gaussian": (L.Gaussian(noise=0.3), 1, Y, "dense"),
    "three classes": (L.Categorical(), 3, (Y > 0).long() + (Y > 0.5).long(), "dense"),
    "counts": (L.Poisson(), 1, Y.abs().round(), "dense"),
    "five classes": (L.Categorical(), 5, torch.arange(60) % 5, "dense"),
}


def fitted(name):
    likelihood, outputs, y, structure = MODELS[name]
    return ssla.fit(
        mlp(outputs=outputs),
        (X, y),
        likelihood=likelihood,
        prior=priors.Gaussian(1.0),
        structure=structure,
    )


def test_special_functions_agree_with_torch():
    x = torch.linspace(-30, 30, 4001, dtype=torch.float64)
    assert torch.allclose(portable.log_ndtr(x), torch.special.log_ndtr(x), rtol=1e-12, atol=1e-15)
    y = torch.logspace(-3, 12, 2001, dtype=torch.float64)
    assert torch.allclose(portable.log_gamma(y), torch.lgamma(y), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", MODELS)
def test_a_file_gives_the_answers_of_the_library(name, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    post = fitted(name)
    made = post.export(tmp_path / "model.onnx", LEVELS, X)
    assert max(made.differences["onnxruntime"].values()) < 1e-8
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for rows in (1, 7):
        answer = torch.from_numpy(session.run(None, {"x": X[:rows].numpy()})[0])
        plain = post.predict(X[:rows])
        assert torch.allclose(
            answer, plain.probs if plain.kind == "class" else plain.mean, atol=1e-8
        )


def test_sums_of_counts_are_exact_for_means_of_every_size():
    """Against 4,000 counts one by one. A last block without counts hid tails of the mean's 6e-4."""
    likelihood = L.NegativeBinomial(0.4)
    f = torch.linspace(-3, 4, 200, dtype=torch.float64)[:, None]
    K = torch.full((200, 1, 1), 0.05, dtype=torch.float64)
    y = torch.arange(4000, dtype=torch.float64)
    chances = (
        make_log_density_of_marginal(resolve("output"), likelihood, f, K)
        .density_at(y.expand(200, -1))
        .log.softmax(1)
    )
    law = make_count_law(likelihood, f, K)
    assert torch.allclose(law.mean, chances @ y, rtol=1e-6)
    assert torch.allclose(law.variance, chances @ y**2 - (chances @ y) ** 2, rtol=1e-5)


def test_torch_files_can_be_loaded(tmp_path):
    post = fitted("gaussian")
    post.export(tmp_path / "model.pt2", LEVELS, X)
    mean, sd, quantiles = torch.export.load(tmp_path / "model.pt2").module()(X[:7])
    plain = post.predict(X[:7])
    assert torch.allclose(mean, plain.mean)
    assert torch.allclose(sd, plain.stddev)
    assert torch.allclose(quantiles, plain.icdf(torch.tensor(LEVELS)))


def test_what_has_no_static_graph_is_refused(tmp_path):
    prior = priors.Gaussian(1.0)
    every = ssla.fit(mlp(), (X, Y), likelihood=L.Gaussian(noise=0.3), prior=prior, weights="all")
    with pytest.raises(ValueError, match="last layer"):
        every.export(tmp_path / "model.pt2")
    outliers = ssla.fit(mlp(), (X, Y), likelihood=L.StudentT(4.0, 0.3), prior=prior)
    with pytest.raises(ValueError, match="StudentT"):
        outliers.export(tmp_path / "model.pt2")
    with pytest.raises(ValueError, match=r"\.onnx"):
        fitted("gaussian").export(tmp_path / "model.txt")
    with pytest.raises(ValueError, match="levels"):
        fitted("gaussian").export(tmp_path / "model.pt2", levels=(5, 95))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (2e-5, r"mean by torch differs .* in 1 of 3 rows, the first is row 1\. Likely causes"),
        (torch.nan, r"in 1 of 3 rows, the first is row 1; 1 rows are NaN, because fixed nodes"),
    ],
)
def test_a_graph_that_differs_in_a_row_is_refused_with_that_row(change, words):
    graph = SimpleNamespace(names=("mean", "stddev", "quantiles"))
    expected = tuple(torch.ones(3, *shape, dtype=torch.float64) for shape in ((), (), (3,)))
    compare = exported_files._compare_answers
    assert max(compare("torch", graph, expected, expected).values()) == 0
    answers = (expected[0] + torch.tensor([0.0, change, 0.0]), *expected[1:])
    with pytest.raises(ValueError, match=words):
        compare("torch", graph, answers, expected)
