"""The recipes of docs/recipes.md run as they stand, and agree with the networks and brute force.

`make recipes` sets SSLA_RECIPES: every package is installed there, and a missing one fails.
"""

import importlib
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import ssla
from ssla import metrics

PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"
EXTRA = "pip install 'ssla[recipes]'"
RECIPES = dict(re.findall(r"^## (.*?)\n.*?```python\n(.*?)```", PAGE.read_text(), re.S | re.M))


def needs(package, remedy=EXTRA):
    """The imported package. Without it the test is skipped, and fails in `make recipes`."""
    if "SSLA_RECIPES" in os.environ:
        return importlib.import_module(package)
    return pytest.importorskip(package, reason=f"needs {package}: {remedy}", exc_type=ImportError)


def run(title, *packages, remedy=EXTRA):
    """The names after one recipe."""
    for package in packages:
        needs(package, remedy)
    names = {}
    exec(RECIPES[title], names)
    return names


def check_validation_of_classes(posterior, logits, y):
    """The report's loss of the network is the cross-entropy of its logits on the unseen rows."""
    found = posterior.report.validation
    assert (found.rows, found.held_out) == (len(y), False)
    loss = torch.nn.functional.cross_entropy(logits.double(), y)
    assert found.plug_in == pytest.approx(float(loss), rel=1e-5)


def check_validation_of_numbers(posterior, outputs, y):
    """The best noise of the network is the root mean square of its residuals on the unseen rows."""
    found = posterior.report.validation
    assert (found.rows, found.held_out) == (len(y), False)
    mean_square = float(((y - outputs[:, 0]).double() ** 2).mean())
    best = 0.5 * math.log(2 * math.pi * math.e * mean_square)
    assert best <= found.scaled_plug_in <= best + 2e-3  # the noise of the report is one of a grid


def test_a_missing_package_fails_where_all_are_installed(monkeypatch):
    monkeypatch.delenv("SSLA_RECIPES", raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs no_such_package: pip install"):
        needs("no_such_package")
    monkeypatch.setenv("SSLA_RECIPES", "1")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        needs("no_such_package")


def test_every_section_is_one_recipe():
    text = PAGE.read_text()
    assert len(RECIPES) == text.count("\n## ") == text.count("```python")


def test_padding_changes_nothing_and_the_outputs_are_the_logits():
    names = run("Hugging Face: a classifier of texts", "transformers")
    model, loader, posterior, new = (names[key] for key in ("model", "loader", "posterior", "new"))
    assert len({batch["input_ids"].shape for batch in loader}) > 1
    longer = {key: torch.nn.functional.pad(part, (0, 9)) for key, part in new.items()}
    torch.testing.assert_close(posterior.predict(longer).probs, posterior.predict(new).probs)
    unmasked = longer | {"attention_mask": torch.ones_like(longer["input_ids"])}
    mean, masked, visible = (posterior.marginal(x).mean for x in (new, longer, unmasked))
    assert float((visible - mean).abs().max()) > 1e3 * float(
        (masked - mean).abs().max()
    )  # without the mask it would matter
    with torch.no_grad():
        batches = [model(**batch).logits for batch in names["unseen"]]
    check_validation_of_classes(posterior, torch.cat(batches), names["labels"][96:])
    kept = ssla.fit(
        model,
        loader,
        likelihood=ssla.likelihoods.Categorical(),
        output="logits",
        mode="tilt",
        gaussian="laplace",
    )
    with torch.no_grad():
        torch.testing.assert_close(
            kept.predict(new, refit="plug_in").probs, model(**new).logits.softmax(1)
        )
    for row, text in enumerate(
        names["texts"][:2]
    ):  # a row does not depend on the padding of its batch
        alone = {
            "input_ids": text[None],
            "attention_mask": torch.ones(1, len(text), dtype=torch.long),
        }
        torch.testing.assert_close(
            posterior.predict(alone).probs[0], posterior.predict(new).probs[row]
        )


def test_a_decoder_takes_its_score_layer_by_name():
    """Its logits are picked from those of all positions, so there is no last layer; the named
    weight is the same model.
    """
    transformers = needs("transformers")
    tokens = {"vocab_size": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, num_labels=2, **tokens)
    model = transformers.GPT2ForSequenceClassification(config).double().eval()
    ids = torch.randint(3, 20, (64, 6))
    ids[::2, 4:] = 0
    x, y = {"input_ids": ids, "attention_mask": (ids > 0).long()}, (ids[:, 0] > 10).long()
    options = {
        "likelihood": ssla.likelihoods.Categorical(),
        "prior": ssla.priors.Gaussian(1.0),
        "mode": "tilt",
    }
    with pytest.raises(ValueError, match=r"no last layer.*list of parameter names"):
        ssla.fit(model, (x, y), output="logits", **options)
    posterior = ssla.fit(model, (x, y), output="logits", weights=["score.weight"], **options)
    with torch.no_grad():
        hidden = model.transformer(**x).last_hidden_state[
            torch.arange(64), x["attention_mask"].sum(1) - 1
        ]
    head = ssla.fit(model.score, (hidden, y), **options)
    torch.testing.assert_close(
        posterior.predict(x).probs, head.predict(hidden).probs, rtol=0, atol=1e-6
    )


def test_the_adapters_are_the_free_parameters_and_match_brute_force():
    names = run("PEFT: LoRA adapters", "transformers", "peft")
    model, x, y, adapters = names["model"].double(), names["x"], names["y"], names["adapters"]
    free = [p.requires_grad_() for name, p in model.named_parameters() if name in adapters]
    P = sum(p.numel() for p in free)
    assert (
        names["posterior"].report.parameters == P == 4 * 2 * 16
    )  # A and B of two layers: rank 2, width 16
    unseen_x, unseen_y = names["unseen"]
    check_validation_of_classes(names["posterior"], model(**unseen_x).logits.detach(), unseen_y)
    f = model(**x).logits
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(one, free, retain_graph=True)])
        for one in f.flatten()
    ]
    J, f = torch.stack(rows).reshape(*f.shape, P), f.detach()  # (N, C, P)
    p = f.softmax(1)
    Lambda = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    H = 3 * torch.eye(P, dtype=torch.float64) + torch.einsum("ncp,ncd,ndq->pq", J, Lambda, J)
    posterior = ssla.fit(
        model,
        (x, y),
        likelihood=ssla.likelihoods.Categorical(),
        prior=ssla.priors.Gaussian(3.0),
        output="logits",
        weights=adapters,
        gaussian="laplace",
    )
    found = posterior.marginal(x)
    torch.testing.assert_close(found.mean, f)
    torch.testing.assert_close(
        found.covariance, J @ torch.linalg.solve(H, J.mT), rtol=1e-6, atol=1e-10
    )


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_padded_graphs_have_the_outputs_of_the_graph_network():
    names = run("PyTorch Geometric: a number for each molecule", "torch_geometric")
    network, padded, posterior, new = (
        names[key] for key in ("network", "padded", "posterior", "new")
    )
    with torch.no_grad():
        for graphs in names["loader"]:
            own = network(graphs.x, graphs.edge_index, graphs.batch)
            torch.testing.assert_close(names["Padded"](network)(**padded(graphs)), own)
        unseen = names["Batch"].from_data_list(names["molecules"][80:])
        outputs = network(unseen.x, unseen.edge_index, unseen.batch)
    check_validation_of_numbers(posterior, outputs, unseen.y)
    together = posterior.predict(padded(new)).interval(0.9)
    for row, graph in enumerate(
        new.to_data_list()
    ):  # padded to its own size: no atom is missing, no padding is counted
        alone = posterior.predict(padded(names["Batch"].from_data_list([graph]))).interval(0.9)
        torch.testing.assert_close(alone[0], together[row])
    order = torch.tensor([2, 0, 3, 1])  # the atoms of a molecule have no order
    graph = new[0]
    moved = names["Data"](x=graph.x[order], edge_index=order.argsort()[graph.edge_index])
    torch.testing.assert_close(
        posterior.predict(padded(names["Batch"].from_data_list([moved]))).interval(0.9)[0],
        together[0],
    )
    assert posterior.report.n == 80


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated")
def test_a_lightning_module_is_its_inner_network():
    names = run("Lightning", "pytorch_lightning")
    x, y, network = names["x"], names["y"], names["model"].network
    likelihood = ssla.likelihoods.Gaussian(noise="estimate")
    inner = ssla.fit(network, names["loader"], likelihood=likelihood, validation=names["unseen"])
    with torch.no_grad():
        check_validation_of_numbers(names["posterior"], network(x[128:]), y[128:])
    assert torch.equal(names["posterior"].predict(x).interval(0.9), inner.predict(x).interval(0.9))
    assert torch.equal(names["posterior"].theta, inner.theta)
    assert names["model"].trainer is not None  # the user's module keeps its trainer


def test_images_have_the_features_of_the_resnet():
    names = run("A ResNet on images", "transformers")
    model, images, labels = names["model"], names["images"], names["labels"]
    posterior = names["posterior"]
    with torch.no_grad():
        features = model.resnet(images).pooler_output.flatten(1)
        logits = model(images).logits
    check_validation_of_classes(posterior, logits[96:], labels[96:])
    train, unseen = (features[:96], labels[:96]), (features[96:], labels[96:])
    likelihood = ssla.likelihoods.Categorical()
    head = ssla.fit(model.classifier[-1], train, likelihood=likelihood, validation=unseen)
    torch.testing.assert_close(
        posterior.predict(images).probs, head.predict(features).probs, rtol=1e-4, atol=1e-5
    )
    assert bool((logits.argmax(1) == labels).float().mean() > 0.9)
    unknown = posterior.predict(torch.randn(20, 1, 16, 16)).probs.amax(1)
    assert float(unknown.mean()) < float(posterior.predict(images).probs.amax(1).mean())


def test_a_search_is_scored_by_the_predictive_distribution():
    names = run(
        "scikit-learn: cross-validation and searches",
        "sklearn",
        remedy="pip install 'ssla[sklearn,metrics]'",
    )
    X, y, search = names["X"], names["y"], names["search"]
    train, test = np.arange(50, 150), np.arange(50)  # the first of three folds
    found = (
        names["model"]
        .set_params(**search.best_params_)
        .fit(X[train], y[train])
        .predict_dist(X[test])
    )
    by_hand = -float(metrics.crps(found, y[test]))
    assert search.cv_results_["split0_test_score"][search.best_index_] == pytest.approx(by_hand)


def test_skpro_has_the_moments_of_the_predictive():
    names = run(
        "skpro",
        "skpro",
        "sklearn",
        remedy="pip install --no-deps skpro scikit-base (it declares an older pandas)",
    )
    crps_normal = needs("scoringrules").crps_normal
    X, found, model = names["X"][100:], names["found"], names["model"]
    own = model.estimator_.predict_dist(X)
    np.testing.assert_allclose(found.mean().to_numpy()[:, 0], own.mean, rtol=1e-6)
    np.testing.assert_allclose(found.var().to_numpy()[:, 0], own.variance, rtol=1e-6)
    score = names["CRPS"]()(names["y"][100:], found)
    normal = crps_normal(names["y"][100:]["price"].to_numpy(), own.mean.numpy(), own.stddev.numpy())
    assert score == pytest.approx(float(np.mean(normal)), rel=1e-6)
