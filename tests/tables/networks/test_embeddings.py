"""Learned numbers for the levels of categories."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

import ssla
from ssla.files import Decoder, Encoder, FileError, read_model, write_model
from ssla.likelihoods import HeteroscedasticGaussian
from ssla.sklearn import SSLAClassifier, SSLARegressor, TableEncoder, load
from ssla.tables.columns import plan as plans
from ssla.tables.columns.plan import ENOUGH
from ssla.tables.estimators.saving import KIND
from ssla.tables.networks import training
from ssla.tables.networks.embeddings import (
    Embeddings,
    check_codes,
    choose_embedding_dimensions,
    without_codes,
)
from ssla.tables.networks.scaling import fit_scaling
from ssla.tables.networks.training import Architecture, Rows, Schedule, train_networks

F64 = torch.float64
RNG = np.random.default_rng(0)
LEVELS, DIMENSIONS = (0, 6, 0, 3), (0, 3, 0, 2)
X = torch.from_numpy(
    np.stack(
        [RNG.normal(size=90), RNG.integers(0, 7, 90), RNG.normal(size=90), RNG.integers(0, 4, 90)],
        1,
    )
)
Y = X[:, 0] + 0.3 * (X[:, 1] - 3) + 0.1 * torch.from_numpy(RNG.normal(size=90))
ONES = torch.ones(90, dtype=F64)
HELD = torch.arange(90).expand(3, -1) % 5 == torch.tensor([[1], [2], [4]])


def trained(members=3, levels=LEVELS, x=X, epochs=10):
    architecture = Architecture(
        x.shape[1], 2, (8,), levels=levels, dimensions=DIMENSIONS if levels else ()
    )
    return train_networks(
        architecture,
        HeteroscedasticGaussian(),
        Rows(x, Y, ONES, HELD[:members]),
        Schedule(epochs, None),
        0,
    )


def test_an_embedding_is_a_one_hot_matrix_times_a_table():
    module = trained().modules[0]
    layer = module[0]
    assert isinstance(layer, Embeddings)
    by_hand = [X[:, [0, 2]]]
    for column, table in ((1, layer.tables[0]), (3, layer.tables[1])):
        by_hand.append(
            torch.nn.functional.one_hot(X[:, column].long(), len(table)).double() @ table
        )
    assert torch.allclose(layer(X), torch.cat(by_hand, 1), atol=1e-14)
    assert layer(X).shape[1] == module[1].in_features == 2 + 3 + 2


def test_codes_that_are_not_possible_are_refused_and_never_read_outside_the_table():
    check_codes(X, LEVELS)
    for wrong in (7.0, -1.0, 2.5, float("nan")):
        strange = X.clone()
        strange[4, 1] = wrong
        with pytest.raises(ValueError, match="whole numbers from 0 to 6"):
            check_codes(strange, LEVELS)
    layer = trained().modules[0][0]
    far = X[:2].clone()
    far[:, 1] = torch.tensor([-5.0, 99.0])
    assert torch.equal(layer(far)[:, 2:5], layer.tables[0][[0, 6]])


def test_members_that_are_trained_together_are_those_of_their_modules():
    found = trained()
    module = found.modules[0]
    shapes = {name: p.shape for name, p in module.named_parameters()}
    theta = torch.stack(
        [torch.cat([p.flatten() for p in m.parameters()]) for m in found.modules]
    ).detach()
    together = training._compute_outputs(
        list(module.named_children()), shapes, theta, X.expand(3, -1, -1)
    )
    assert torch.allclose(together, torch.stack([m(X) for m in found.modules]), atol=1e-12)


def test_a_network_of_codes_is_one_of_one_hot_columns():
    """The same function: the first layer of the one-hot network is that of the other times its
    table.
    """
    module = trained().modules[1]
    first, tables = module[1], module[0].tables
    wide = torch.cat(
        [
            first.weight[:, :2],
            first.weight[:, 2:5] @ tables[0].mT,
            first.weight[:, 5:] @ tables[1].mT,
        ],
        1,
    )
    hot = [torch.nn.functional.one_hot(X[:, i].long(), n).double() for i, n in ((1, 7), (3, 4))]
    by_hand = torch.cat([X[:, [0, 2]], *hot], 1) @ wide.mT + first.bias
    assert torch.allclose(module[2:](by_hand), module(X), atol=1e-12)


def test_a_level_without_training_rows_stays_at_zero():
    """The prior mean, which is also the start of code 0."""
    x = X.clone()
    x[:, 1] = x[:, 1].clamp_min(1)
    table = trained(x=x).modules[0][0].tables[0]
    assert not table[0].any()
    assert table[1:].abs().min() > 0


def test_the_table_is_at_the_mode_of_its_prior_and_the_rows():
    """A linear network with fixed noise: code effects are those of the posterior mode, by
    derivatives of the objective.
    """
    rows = Rows(X, Y, ONES, torch.zeros(1, 90, dtype=torch.bool))
    likelihood = ssla.likelihoods.Gaussian(noise=0.3)
    architecture = Architecture(4, 1, (), levels=LEVELS, dimensions=DIMENSIONS)
    module = train_networks(
        architecture, likelihood, rows, Schedule(3000, None, 0.02, precision=2.0), 0
    ).modules[0]
    parameters = list(module.parameters())
    loss = -likelihood.log_prob(Y, module(X)).sum() + sum((p * p).sum() for p in parameters)  # 2/2
    for gradient in torch.autograd.grad(loss, parameters):
        assert gradient.abs().max() < 0.02


def test_codes_are_not_standardised_and_have_no_pieces():
    scaling = fit_scaling(X, ONES, LEVELS)
    assert scaling.shift[[1, 3]].tolist() == [0, 0]
    assert scaling.scale[[1, 3]].tolist() == [1, 1]
    assert torch.allclose(scaling(X)[:, [0, 2]].mean(0), torch.zeros(2, dtype=F64), atol=1e-12)
    assert torch.equal(without_codes(X, LEVELS)[:, [0, 2]], X[:, [0, 2]])
    assert not without_codes(X, LEVELS)[:, [1, 3]].any()
    assert torch.equal(without_codes(X, ()), X)


def test_more_levels_have_more_dimensions():
    assert choose_embedding_dimensions((0, 1, 300, 10**6)) == (0, 2, 5, 33)


# --- estimators


def shops(levels=60, rows=12, effect=1.0, noise=0.3, seed=0, rare=4):
    """Rows of shops with effects of their own; some shops have one row."""
    rng = np.random.default_rng(seed)
    shop = np.concatenate([np.repeat(np.arange(levels), rows), levels + np.arange(rare)])
    x = rng.normal(size=len(shop))
    effects = effect * rng.normal(size=levels + rare)
    y = 0.5 * x + effects[shop] + noise * rng.normal(size=len(shop))
    order = rng.permutation(len(shop))
    frame = pd.DataFrame({"size": x[order], "shop": [f"shop {i}" for i in shop[order]]})
    return frame, y[order], effects[shop][order]


@pytest.fixture(scope="module")
def fitted():
    frame, y, _ = shops()
    return SSLARegressor(members=2, max_epochs=20, trees=10, random_state=0).fit(frame, y), frame, y


def test_the_estimators_learn_codes_and_the_encoder_does_not(fitted):
    model, frame, _ = fitted
    (codes,) = [feature for feature in model.plan_.features if feature.codes]
    assert codes.encoded_names == ["shop: code"]
    assert model.ensemble_.architecture.levels == model.plan_.level_counts == (0, 60)
    assert model.ensemble_.architecture.pieces == (8, 0)
    plan = TableEncoder().fit(frame).plan_
    assert plan.level_counts == ()
    assert plan.width == 1 + 50 + 1


@pytest.mark.parametrize("refit", ["output", "newton", "plug_in", "none"])
def test_every_refit_predicts_with_codes_and_a_file_gives_the_same_bits(fitted, tmp_path, refit):
    model, frame, _ = fitted
    model.save(tmp_path / "m")
    again = load(tmp_path / "m")
    again.refit = model.refit = refit
    new = pd.concat([frame[:20], pd.DataFrame({"size": [0.1, 0.2], "shop": ["new", None]})])
    one, other = model.predict_dist(new), again.predict_dist(new)
    model.refit = "output"
    assert torch.equal(one.mean, other.mean)
    assert torch.equal(one.variance, other.variance)
    assert bool(torch.isfinite(one.mean).all())


def test_unknown_shops_are_mixed_over_training_shops_and_rare_ones_share_code_0(fitted):
    model = fitted[0]
    new = pd.DataFrame({"size": [0.0] * 4, "shop": ["shop 3", "shop 61", "new", None]})
    encoded = model._encode_if_needed(new)
    assert encoded.values[:, 1].tolist() == [
        1 + model.plan_.features[1].codes.index("shop 3"),
        0,
        0,
        0,
    ]
    assert encoded.mixed_rows.tolist() == [
        False,
        True,
        True,
        True,
    ]  # four rows of rare shops are too few
    assert encoded.notes.tolist() == [
        "",
        "shop: category 'shop 61' of too few training rows",
        "shop: unknown category 'new'",
        "shop: missing",
    ]
    copies = np.stack(list(encoded.make_filled_copies()))
    assert np.array_equal(copies[..., 1], copies[..., 1].round())
    assert (copies[..., 1] > 0).any()
    p = model.predict_dist(new)
    assert p.epistemic[2] > 3 * p.epistemic[0]  # the spread of the shops
    many, y, _ = shops(rare=ENOUGH)
    many.loc[many["shop"] == "shop 5", "shop"] = None
    learned = SSLARegressor(members=1, max_epochs=5, trees=0, random_state=0).fit(many, y)
    encoded = learned._encode_if_needed(new)
    assert learned.plan_.level_counts == (0, 60)  # 59 shops, and gaps
    assert encoded.values[1:, 1].tolist() == [0, 0, 60]
    assert encoded.mixed_rows.tolist() == [False, False, False, True]  # twelve gaps are too few
    assert encoded.notes.tolist()[1:3] == [
        "",
        "shop: unknown category 'new', treated as a rare one",
    ]


def test_more_rows_predictive_sets_and_other_uses(fitted, tmp_path):
    model, frame, y = fitted
    assert model.predictive_set(frame[:5], 0.8).shape == (5, 2)
    constant = SSLARegressor("gaussian", members=2, max_epochs=5, random_state=0).fit(frame, y)
    before = constant.predict(frame[:5])
    constant.partial_fit(frame[:60], y[:60] + 0.1)
    assert not np.array_equal(constant.predict(frame[:5]), before)
    conformal = SSLARegressor(members=1, max_epochs=5, conformal=True, random_state=0).fit(frame, y)
    assert conformal.predict_interval(frame[:5]).shape == (5, 2)
    model.save(tmp_path / "m")
    columns = ssla.Scorer(tmp_path / "m", levels=(0.9,))(frame[:7])
    assert np.allclose(columns["mean"], model.predict(frame[:7]), rtol=1e-12)
    classes = SSLAClassifier(members=2, max_epochs=5, trees=5, random_state=0).fit(frame, y > 0)
    classes.save(tmp_path / "c")
    assert np.array_equal(
        load(tmp_path / "c").predict_proba(frame[:9]), classes.predict_proba(frame[:9])
    )
    with pytest.raises(ValueError, match="whole numbers from 0 to 60"):
        model.ensemble_.predict(torch.tensor([[0.0, 61.0]], dtype=F64))


def test_trees_do_not_split_by_codes(fitted):
    forest = fitted[0].ensemble_.trees.forest
    inner = forest.left != torch.arange(len(forest.left))
    assert set(forest.feature[inner].tolist()) == {0}


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("levels", [0, 61], "embeddings do not have the sizes"),
        ("levels", [0, 60, 0], "one count for each"),
        ("levels", [0, -60], "not counts"),
        ("levels", [0, 60.0], "not counts"),
        ("levels", [60, 0], "one count for each"),
        ("levels", [0, 0], "one count for each"),
        ("dimensions", [0, 10**9], "embeddings do not have the sizes"),
        ("dimensions", [], "one count for each"),
        ("pieces", [8, 2], "has no pieces"),
        ("codes", None, "codes of the plan"),
    ],
)
def test_a_file_with_impossible_levels_is_refused_in_words(fitted, tmp_path, name, wrong, words):
    path = fitted[0].save(tmp_path / "m")
    content, tensors = read_model(path, KIND)
    if name == "codes":
        content["plan"]["features"][1]["codes"].pop()
    else:
        changed = Decoder(tensors).decode(content["ensemble"]["architecture"], dict) | {
            name: tuple(wrong)
        }
        content["ensemble"]["architecture"] = Encoder().encode(changed, "architecture")
    write_model(tmp_path / "forged", KIND, content, tensors)
    with pytest.raises(FileError, match=words):
        load(tmp_path / "forged")


def test_an_exported_network_has_its_embeddings(fitted, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    frame, y = fitted[1:]
    model = SSLARegressor("gaussian", members=1, max_epochs=3, random_state=0).fit(frame, y)
    posterior = model.ensemble_.components[0].posterior
    z = model.ensemble_.standardise(torch.from_numpy(model._encode_if_needed(frame[:20]).values))
    posterior.export(tmp_path / "m.onnx", example=z)
    session = runtime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    mean, *_ = session.run(None, {session.get_inputs()[0].name: z.numpy()})
    assert np.allclose(mean.ravel(), posterior.predict(z).mean, atol=1e-10)


def test_a_file_with_standardised_codes_is_refused(fitted, tmp_path):
    path = fitted[0].save(tmp_path / "m")
    content, tensors = read_model(path, KIND)
    for name, wrong in (("inputs.shift", 1.0), ("inputs.scale", 2.0)):
        changed = {key: value.clone() for key, value in tensors.items()}
        changed[name][1] = wrong
        write_model(tmp_path / name, KIND, content, changed)
        with pytest.raises(FileError, match="not standardised"):
            load(tmp_path / name)


# --- accuracy


def test_effects_of_300_levels_are_close_to_the_shrunken_means(monkeypatch):
    rng = np.random.default_rng(1)
    level = rng.integers(0, 300, 12_000)
    effects = rng.normal(size=300)
    y = effects[level] + 0.3 * rng.normal(size=12_000)
    frame = pd.DataFrame({"x": rng.normal(size=12_000), "city": [f"c{i}" for i in level]})
    seen, new = slice(0, 6_000), slice(6_000, None)
    make = partial(SSLARegressor, members=2, max_epochs=30, trees=0, random_state=0)
    error = {}
    p = make().fit(frame[seen], y[seen]).predict_dist(frame[new])
    error["codes"] = float(np.sqrt(np.mean((p.mean.numpy() - y[new]) ** 2)))
    inside = p.interval(0.9).numpy()
    assert 0.85 < np.mean((inside[:, 0] <= y[new]) & (y[new] <= inside[:, 1])) < 0.95
    monkeypatch.setattr(plans, "CODED", 2.0)
    error["50 levels"] = float(
        np.sqrt(np.mean((make().fit(frame[seen], y[seen]).predict(frame[new]) - y[new]) ** 2))
    )
    rows = np.bincount(level[seen], minlength=300)
    shrunken = np.bincount(level[seen], y[seen], 300) / (rows + 0.09)
    oracle = float(np.sqrt(np.mean((shrunken[level[new]] - y[new]) ** 2)))
    assert error["codes"] < 1.1 * oracle
    assert error["50 levels"] > 2 * oracle
