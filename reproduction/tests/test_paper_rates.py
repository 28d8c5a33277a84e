"""What the study of rates measures, against closed forms and SciPy's optimiser; and that its
claims can fail.
"""

import math

import numpy as np
import pytest
import torch
from scipy import optimize

from ssla_paper.rates.measure import BOUNDED, MODELS, NOISE, POINTS, TARGETS, TRUTH, measure, rows
from ssla_paper.rates.study import QUANTITIES, Rates, claims, slope


def test_a_line_in_closed_form():
    data = rows("linear", 60, 4)
    found = measure("linear", data)
    X, y, variance = (
        np.c_[data[:, :2].numpy(), np.ones(60)],
        data[:, 2].numpy(),
        NOISE["linear"] ** 2,
    )
    new = np.array([*POINTS["linear"], 1.0])
    J = X.T @ X / variance
    H = J + np.eye(3)
    hat = np.linalg.solve(H, X.T @ y / variance)
    g = (TARGETS["linear"] - new @ hat) / variance
    H_new = H + np.outer(new, new) / variance
    step = np.linalg.solve(H_new, new * g)
    tilde = hat + step
    assert found["step"] == pytest.approx(np.linalg.norm(step), rel=1e-9)
    assert found["along"] == pytest.approx(1, abs=1e-9)
    assert found["smallest"] == pytest.approx(np.linalg.eigvalsh(J)[0], rel=1e-10)
    assert found["gain"] == pytest.approx(0.5 * g * g * new @ np.linalg.solve(H_new, new), rel=1e-9)
    assert found["loss"] == pytest.approx(0.5 * step @ H @ step, rel=1e-9)
    assert found["bend"] < 1e-12
    assert found["prior"] == pytest.approx(abs(0.5 * (hat @ hat - tilde @ tilde)), rel=1e-9)
    curvature = 0.5 * math.log1p(new @ np.linalg.solve(H, new) / variance)
    assert found["curvature"] == pytest.approx(curvature, rel=1e-9)
    assert found["gap"] == pytest.approx(found["gain"], rel=1e-9)
    assert found["own_fisher"] == pytest.approx(new @ new / variance)
    assert found["own_outer"] == pytest.approx(0, abs=1e-20)
    assert found["gap_at_prediction"] < 1e-12
    assert found["outer"] == pytest.approx(
        hat @ hat / np.trace(H_new - np.eye(3)), rel=1e-8
    )  # only the prior's pull is left


def log_likelihood(model, theta, x, y):
    """In NumPy, by hand."""
    if model == "poisson":
        f = x @ theta[:2] + theta[2]
        return np.sum(y * f - np.exp(f))
    f = np.tanh(x @ theta[:4].reshape(2, 2).T + theta[4:6]) @ theta[6:8] + theta[8]
    return -0.5 * np.sum((y - f) ** 2) / NOISE["network"] ** 2


@pytest.mark.parametrize("model", ["poisson", "network"])
def test_a_refit_by_scipy(model):
    data = rows(model, 300, 1)
    x, y = data[:, :2].numpy(), data[:, 2].numpy()
    new, target = np.array([POINTS[model]]), np.array([TARGETS[model]])

    def climb(start, *extra):
        def loss(theta):
            return (
                0.5 * theta @ theta
                - log_likelihood(model, theta, x, y)
                - sum(log_likelihood(model, theta, *e) for e in extra)
            )

        first = optimize.minimize(loss, start, method="BFGS", options={"gtol": 1e-7}).x
        return optimize.minimize(
            loss,
            first,
            method="Nelder-Mead",
            options={"xatol": 1e-10, "fatol": 1e-13, "maxfev": 20000},
        ).x

    hat = climb(np.array(TRUTH[model]))
    tilde = climb(hat, (new, target))
    found = measure(model, data)
    step = tilde - hat
    assert found["step"] == pytest.approx(np.linalg.norm(step), rel=1e-3)
    loss = [log_likelihood(model, t, x, y) - 0.5 * t @ t for t in (hat, tilde)]
    assert found["loss"] == pytest.approx(loss[0] - loss[1], rel=1e-2)
    own = [log_likelihood(model, t, new, target) for t in (hat, tilde)]
    assert found["gain"] == pytest.approx(loss[1] + own[1] - loss[0] - own[0], rel=1e-2)
    assert found["prior"] == pytest.approx(abs(0.5 * (hat @ hat - tilde @ tilde)), rel=1e-2)


def test_the_bounded_line_satisfies_the_assumption_and_does_not_grow():
    found = [measure(BOUNDED, rows(BOUNDED, n, 0)) for n in (50, 5000)]
    limit = math.pi**2 / 6 / NOISE[BOUNDED] ** 2
    assert found[0]["smallest"] < found[1]["smallest"] < limit < found[1]["smallest"] * 1.001
    assert found[1]["step"] > 0.1


def test_slopes():
    n = [10, 100, 1000]
    exact = slope(
        [{"n": n, "a": [3 * v**-1.5 for v in n]}, {"n": n, "a": [v**-1.7 for v in n]}], "a"
    )
    assert (exact.mean, exact.error) == pytest.approx((-1.6, 0.1))
    nothing = slope([{"n": n, "a": [0.0, 0.0, 0.0]}], "a")
    assert nothing.mean is None
    assert str(nothing) == "none: exactly 0"


FLAT = {"own_outer": 0.0, "own_fisher": 1.0, "rows_outer": 1.0, "gap_at_prediction": 0.0}


def records(powers, sign=1.0):
    """Pure powers of n, in place of measurements; nothing moves where J is bounded."""
    n = [100, 200, 400]
    found = {}
    for model in (*MODELS, BOUNDED):
        for seed in range(2):
            own = {
                q.key: powers.get(q.key, q.power) if model != BOUNDED else 0.0 for q in QUANTITIES
            }
            values = {key: [0.01 * v**power for v in n] for key, power in own.items()} | {
                k: [v] * 3 for k, v in FLAT.items()
            }
            found[f"{model}-{seed}"] = {
                "model": model,
                "seed": seed,
                "n": n,
                "along": [sign] * 3,
                **values,
            }
    return found


def verdicts(powers, sign=1.0):
    by_model = {
        model: [r for r in records(powers, sign).values() if r["model"] == model]
        for model in (*MODELS, BOUNDED)
    }
    slopes = {
        (q.key, model): slope(runs, q.key) for model, runs in by_model.items() for q in QUANTITIES
    }
    return {claim.statement: claim.holds for claim in claims(by_model, slopes)}


def test_the_claims_follow_the_measurements():
    as_found, as_published = (
        verdicts({}),
        verdicts({"loss": -2.0, "prior": -2.0, "outer": 0.0}, sign=-1.0),
    )

    def starts(statements):
        return {statement.split(",")[0].split(" is ")[0] for statement in statements}

    published = {"Proof of Lemma 1", "Proof of Theorem 1"}
    bounded = {key for key in as_found if "under (A1) to (A3) alone" in key}
    assert starts(bounded) == {"Lemma 1", "Theorem 1", "Corollary 1 on π"}
    wrong = {key for key in as_found if not as_found[key]} - bounded
    assert not any(as_found[key] for key in bounded)
    assert starts(wrong) == published | {"The prior increment", "Equation (13) and Corollary 2"}
    ends = {key.partition(": ")[2] for key in wrong}
    assert ends >= {"y ≠ ŷ", "G̃ the gradient of the sum ℓ̃, at θ̂"}
    changed = {key for key in as_found if as_found[key] != as_published[key]}
    assert changed == wrong | {key for key in as_found if key.startswith("Corollary 1 on π")} - (
        bounded
    )
    for key in ("step", "smallest", "gain", "bend", "gap"):
        slower = verdicts({key: -0.5})
        assert sum(as_found.values()) - sum(slower.values()) == 1, key


def test_the_statements_at_the_prediction_and_of_all_rows_can_fail():
    def verdict(start, **flat):
        by_model = {
            model: [{**r, **flat} for r in records({}).values() if r["model"] == model]
            for model in (*MODELS, BOUNDED)
        }
        slopes = {
            (q.key, model): slope(runs, q.key)
            for model, runs in by_model.items()
            for q in QUANTITIES
        }
        (claim,) = (c for c in claims(by_model, slopes) if start in c.statement)
        return claim.holds

    assert verdict("y = ŷ")
    assert not verdict("y = ŷ", gap_at_prediction=[0.0, 1e-3, 0.0])
    assert verdict("rows' own scores")
    assert not verdict("rows' own scores", rows_outer=[1.0, 1.0, 1.2])


def test_the_report_is_written(tmp_path):
    assert len(Rates().report(records({}), tmp_path)) == len(verdicts({}))
    assert {p.name for p in tmp_path.iterdir()} >= {
        "rates.png",
        "rates.pdf",
        "rates.csv",
        "rates-signs.md",
    }
    line = next(
        line
        for line in (tmp_path / "rates.csv").read_text().splitlines()
        if line.startswith("ℓ(θ̂) − ℓ(θ̃)")
    )
    assert line.split(",")[2] == "−2"
    assert "−1.000 ± 0.000" in line


def test_rows_repeat():
    assert torch.equal(rows("poisson", 30, 7), rows("poisson", 30, 7))
    assert not torch.equal(rows("poisson", 30, 7), rows("poisson", 30, 8))
