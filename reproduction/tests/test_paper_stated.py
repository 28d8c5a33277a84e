"""The stated experiment: its rows, network, search, methods and claims, each against another way
to have it.
"""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn

import ssla
from ssla.likelihoods import HeteroscedasticGaussian
from ssla_paper.stated import data, methods, modes, network, search
from ssla_paper.stated.claims import claims
from ssla_paper.stated.numbers import (
    coverage_error,
    difference,
    gathered,
    jackknifed,
    levels_of,
)
from ssla_paper.stated.study import MODE_SETS, SEARCHED, SPLITS, Stated
from ssla_paper.uci.data import SETS, STAND_IN, load, split

FOLDER = Path(os.environ.get("SSLA_DATA", "nowhere"))
with_data = pytest.mark.skipif(
    not (FOLDER / "auto_mpg.csv").exists(), reason="SSLA_DATA does not name the UCI sets"
)


@pytest.fixture(scope="module")
def fitted():
    """A small stated network with 12 hidden units, its rows, and the dense posterior."""
    rows = data.table_case(STAND_IN, 3)
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.4 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    optimiser = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(300):
        optimiser.zero_grad()
        network.gaussian_nll(net(rows.train[0]), rows.train[1]).backward()
        optimiser.step()
    settings = ssla.paper_settings(1.96, structure="dense")
    posterior = ssla.fit(net, rows.train, likelihood=HeteroscedasticGaussian(), **settings.fit)
    return rows, net.requires_grad_(False), posterior, settings


def test_binary_columns_are_0_and_1_and_categories_have_a_column_for_each_code():
    x = np.array([[3.0, 7.0, 1.5], [1.0, 2.0, 0.5], [2.0, 7.0, 2.5], [1.0, 2.0, 3.5]])
    coded, continuous = data.encode(x, (0,))
    expected = [[0, 0, 1, 1, 1.5], [1, 0, 0, 0, 0.5], [0, 1, 0, 1, 2.5], [1, 0, 0, 0, 3.5]]
    np.testing.assert_array_equal(coded, expected)
    assert continuous.tolist() == [False, False, False, False, True]


@with_data
@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("auto_mpg", ["origin"]),
        ("bike_sharing_hour", ["season", "mnth", "hr", "weekday", "weathersit"]),
        ("daily_demand_orders", ["Week of the month", "Day of the week"]),
    ],
)
def test_the_categories_are_the_columns_without_an_order(name, columns):
    head = (FOLDER / f"{name}.csv").read_text(encoding="utf-8").split("\n")[0]
    head = head.replace('"', "").replace("(first week, second, third, fourth or fifth week", "")
    left_out = (*SETS[name].left_out, SETS[name].target.strip())
    names = [each.strip() for each in head.split(",") if each.strip() not in left_out]
    names = [each for each in names if each not in ("second", "third", "fourth or fifth week")]
    chosen = [names[position] for position in data.CATEGORIES[name]]
    assert all(a.startswith(b) for a, b in zip(chosen, columns, strict=True))


@with_data
def test_a_table_is_standardised_by_its_training_rows_and_has_50_test_rows_if_large():
    case = data.case("concrete", 200)
    assert [len(part[1]) for part in (case.train, case.validation, case.test)] == [659, 165, 50]
    x, y = case.train
    assert float(x.mean(0).abs().max()) < 1e-12
    assert float((x.std(0, correction=0) - 1).abs().max()) < 1e-12
    assert float(y.std(correction=0)) == pytest.approx(1)
    rows = load("concrete")
    held = set(split(len(rows.y), 200).test.tolist())
    known = {tuple(row) for row in x.tolist()}
    assert len(held) == 206
    assert len(data.case("auto_mpg", 200).test[1]) == 79
    assert sum(tuple(row) in known for row in case.test[0].tolist()) <= 5  # duplicates of the set


def test_the_unit_is_the_deviation_of_all_targets():
    case, rows = data.table_case(STAND_IN, 5), load(STAND_IN)
    y = torch.cat([part[1] for part in (case.train, case.validation, case.test)])
    assert len(y) == len(rows.y)
    assert float((y / case.unit).std(correction=0)) == pytest.approx(1)


def test_the_toy_set_has_fresh_test_rows():
    case = data.case(data.TOY, 200)
    assert [len(part[1]) for part in (case.train, case.validation, case.test)] == [200, 15, 100]


def test_the_network_is_the_stated_one_and_its_loss_is_the_validation_nll():
    rows = data.table_case(STAND_IN, 0)
    net, loss = network.trained(rows, 0.01, 32, 0, epochs=3)
    kinds = [type(layer).__name__ for layer in net]
    assert kinds == ["Linear", "ReLU", "Linear", "ReLU", "Linear"]
    assert [tuple(net[i].weight.shape) for i in (0, 2, 4)] == [(50, 3), (50, 50), (2, 50)]
    with torch.no_grad():
        f, y = net(rows.validation[0]), rows.validation[1]
    normal = torch.distributions.Normal(f[:, 0], (0.5 * f[:, 1]).exp())
    nll = float(-normal.log_prob(y).mean()) - 0.5 * math.log(2 * math.pi)
    assert loss == pytest.approx(nll, abs=1e-5)


def test_every_search_has_100_trials_in_the_stated_ranges():
    assert set(search.found()) >= set(SEARCHED)
    for trials in search.found().values():
        assert len(trials) == search.TRIALS == 100
        assert all(1e-5 <= trial.rate <= 1e-1 for trial in trials)
        assert all(isinstance(t.batch, int) and 32 <= t.batch <= 256 for t in trials)
        assert search.best(trials).loss == min(trial.loss for trial in trials)


def test_a_search_finds_the_best_of_its_trials():
    pytest.importorskip("optuna")
    trials = search.search(STAND_IN, 3)
    assert len(trials) == 3
    chosen = search.best(trials)
    _, loss = network.trained(data.case(STAND_IN, 42), chosen.rate, chosen.batch, 0)
    assert loss == pytest.approx(chosen.loss)


def test_the_candidates_are_20_around_the_prediction_and_the_density_is_zero_beyond(fitted):
    rows, net, posterior, settings = fitted
    x = rows.test[0][:3]
    answer = posterior.predict(x, refit=settings.refits["SSLA"])
    law = answer.law
    assert law.logs.shape == (3, 20)
    torch.testing.assert_close(law.low, net(x)[:, 0] - 1.96)
    assert law.step == pytest.approx(2 * 1.96 / 19)
    beyond = law.low - 0.01
    assert bool(answer.log_prob(beyond).isneginf().all())
    counted = methods.counts(answer, methods.row_scores(answer, beyond))
    assert counted["outside"] == 3


def likelihood_and_features(net, rows):
    """Inputs of the last layer with a one, and the trained θ̂ (2, F), as numpy arrays."""

    def features(x):
        inner = net[:-1](x)
        return torch.cat([inner, torch.ones(len(x), 1, dtype=torch.float64)], 1).numpy()

    theta = torch.cat([net[-1].weight, net[-1].bias[:, None]], 1).numpy()
    return features, theta


def log_normal(y, f):
    return -0.5 * ((y - f[..., 0]) ** 2 * np.exp(-f[..., 1]) + f[..., 1] + math.log(2 * math.pi))


def test_ssla_is_the_normal_at_the_refit_with_the_prediction(fitted):
    """With the Fisher information the determinants do not depend on y, so that the density of y
    is N(μ̃, σ̃²) at the θ̃ of one refit, here by scipy.
    """
    rows, net, posterior, _ = fitted
    features, start = likelihood_and_features(net, rows)
    phi, y = features(rows.train[0]), rows.train[1].numpy()
    new = rows.test[0][:1]
    phi_new = features(new)
    prediction = (phi_new @ start[0]).item()

    def gradient(theta, phi, y):
        f = phi @ theta.T
        residual = (y - f[:, 0]) * np.exp(-f[:, 1])
        g = np.stack([residual, 0.5 * ((y - f[:, 0]) * residual - 1)], 1)
        return g.T @ phi

    tilt = gradient(start, phi, y) - start  # of the log posterior at θ̂, which is taken out

    def objective(flat):
        theta = flat.reshape(start.shape)
        value = log_normal(y, phi @ theta.T).sum() - 0.5 * (theta**2).sum()
        value += log_normal(prediction, phi_new @ theta.T).sum() - (tilt * (theta - start)).sum()
        slope = gradient(theta, phi, y) - theta - tilt
        slope = slope + gradient(theta, phi_new, np.array([prediction]))
        return -value, -slope.flatten()

    found = minimize(objective, start.flatten(), jac=True, method="BFGS", options={"gtol": 1e-9})
    f = phi_new @ found.x.reshape(start.shape).T
    grid = torch.linspace(prediction - 1, prediction + 1, 5, dtype=torch.float64)[None]
    refit = ssla.WeightRefit(at="prediction", logdet="structure")
    answer = posterior.predict(new, refit=refit)
    assert not bool(answer.diagnostics.unconverged.any())
    expected = log_normal(grid.numpy(), f[:, None, :])
    np.testing.assert_allclose(answer.log_prob(grid).numpy(), expected, atol=2e-4)


def test_assla_is_the_density_with_the_determinants_at_the_trained_weights(fitted):
    """Log densities of one row relative to that of ŷ, from the dense matrices."""
    rows, net, posterior, settings = fitted
    features, theta = likelihood_and_features(net, rows)
    phi = features(rows.train[0])
    new = rows.test[0][:1]
    phi_new = features(new)
    f, f_new = phi @ theta.T, (phi_new @ theta.T)[0]
    size = phi.shape[1]
    H = np.eye(2 * size)
    for row, (_, s) in zip(phi, f, strict=True):
        H += np.kron(np.diag([math.exp(-s), 0.5]), np.outer(row, row))

    def log_density(y):
        r, w = y - f_new[0], math.exp(-f_new[1])
        observed = np.array([[w, r * w], [r * w, 0.5 * r * r * w]])
        after = H + np.kron(observed, np.outer(phi_new[0], phi_new[0]))
        return log_normal(y, f_new) - 0.5 * np.linalg.slogdet(after)[1]

    spread = math.exp(0.5 * f_new[1])
    grid = f_new[0] + spread * np.array([-1.5, -0.5, 0.0, 0.7, 1.8])
    expected = np.array([log_density(y) for y in grid])
    answer = posterior.predict(new, refit=settings.refits["ASSLA"])
    found = answer.log_prob(torch.from_numpy(grid)[None])[0].numpy()
    np.testing.assert_allclose(found - found[2], expected - expected[2], atol=1e-6)


def test_the_integral_of_la_is_that_of_samples(fitted):
    rows, _, posterior, _ = fitted
    x, y = rows.test
    answer = methods.integrated(posterior, x[:4])
    f, K = posterior.outputs_at(x[:4])
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(100_000, 4, 2, dtype=torch.float64, generator=generator)
    draws = f + (torch.linalg.cholesky(K) @ noise[..., None])[..., 0]
    normal = torch.distributions.Normal(draws[..., 0], (0.5 * draws[..., 1]).exp())
    density = normal.log_prob(y[:4]).exp().mean(0)
    torch.testing.assert_close(answer.log_prob(y[:4]).exp(), density, rtol=0.01, atol=1e-4)


def test_the_parts_of_the_network_make_its_nll(fitted):
    rows, net, posterior, _ = fitted
    facts = modes.network_facts(posterior, rows.test)
    answer = methods.plug_in(net, rows.test[0])
    assert facts["nll"] == pytest.approx(-float(answer.log_prob(rows.test[1]).mean()))


def test_a_full_run_has_every_searched_set_and_split():
    tasks = [t for t in Stated().tasks(quick=False) if not t.key.startswith("baseline")]
    assert len(tasks) == SPLITS * len(SEARCHED) + sum(t.key.startswith("modes") for t in tasks)
    named = {task.settings["name"] for task in tasks}
    assert named == set(SEARCHED) >= set(MODE_SETS)
    for task in tasks:
        chosen = search.best(search.found()[task.settings["name"]])
        assert (task.settings["rate"], task.settings["batch"]) == (chosen.rate, chosen.batch)


def scores(nll, off, width):
    values = {"nll": nll, "crps": 0.1, "rmse": 0.5, "rows": 10, "unconverged": 0, "outside": 0}
    values |= {"cut": 0, "fisher": 0, "inaccurate": 0}
    values |= {f"cover{level}": level + off for level in (95, 90, 75, 50)}
    return values | {f"width{level}": width * level / 95 for level in (95, 90, 75, 50)}


def records(ssla_nll, assla_off):
    """Splits of two sets where LA is 4 points off and has an NLL of 1."""
    made = {}
    for name in (data.TOY, "auto_mpg"):
        for seed in range(4):
            la, assla = scores(1.0, 4, 2.0), scores(0.9, assla_off, 1.5)
            own = scores(ssla_nll + 0.01 * seed, 1, 1.8)
            found = {"plug-in": assla, "ours": assla, "LA, integral": la}
            for structure in ("kfac", "diag", "dense"):
                for prior in ("unit", "tuned"):
                    label = f"{structure} {prior}"
                    found |= {f"LA {label}": la, f"ASSLA {label}": assla, f"SSLA {label}": own}
            found |= {"SSLA, whole line": own, "SSLA, every y": own}
            pair = {"rows": 10, "SSLA": own, "ASSLA": assla, "LA": la}
            made[f"{name}-{seed}"] = {
                "set": name,
                "split": seed,
                "rows": [100, 20, 10],
                "precision": {"kfac": 2.0},
                "methods": found,
                "refitted": {"whole line": pair, "every y": pair},
            }
    return made


@pytest.mark.parametrize(("nll", "off"), [(0.5, 1), (2.0, 9)])
def test_claims_follow_the_scores(nll, off):
    found = {claim.statement: claim.holds for claim in claims(gathered(records(nll, off)))}
    calibrated = "Outperforms classical Laplace in calibration (the stated networks; coverage "
    assert found[f"{calibrated}error, in points): SSLA"]
    assert found[f"{calibrated}error, in points): ASSLA"] == (off < 4)
    lower = "Has a lower NLL than classical Laplace (the stated networks): "
    assert found[f"{lower}SSLA"] == (nll < 1)
    assert found[f"{lower}ASSLA"]
    assert found[
        "Is sharper than classical Laplace (the stated networks; widths, in per cent): ASSLA"
    ]


def test_a_difference_is_paired_and_the_jackknife_of_a_mean_is_its_standard_error():
    values = [0.1, 0.5, 0.2, 0.9]
    pairs = [(scores(1 + value, 0, 1.0), scores(1, 0, 1.0)) for value in values]
    found = difference(pairs, "nll", "auto_mpg")
    assert found.value == pytest.approx(np.mean(values))
    assert found.error == pytest.approx(np.std(values, ddof=1) / 2)
    assert jackknifed(lambda chosen: 3.0, 4).error == 0
    assert levels_of(data.TOY) == (95, 90, 75, 50)
    assert coverage_error([scores(0, 2, 1), scores(0, -4, 1)], (95, 75)) == pytest.approx(1)
    narrower = [(scores(0, 0, 0.9), scores(0, 0, 1.0))] * 3
    assert difference(narrower, "width", "auto_mpg").value == pytest.approx(-10)
