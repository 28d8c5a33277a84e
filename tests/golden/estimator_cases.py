"""Answers of the estimators: small networks and trees on arrays and data frames."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
from digests import Answers, asked, attempt, files_in, page_parts
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

import ssla
from ssla import sklearn as estimators

ROWS, TESTS = 70, 6
SMALL: dict[str, Any] = {"members": 2, "hidden": (8,), "max_epochs": 6, "random_state": 0}


def table(rows: int, seed: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Inputs (n, 3), and targets of each kind."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, 3))
    f = X[:, 0] - 0.5 * X[:, 1] ** 2
    noise = 0.3 * rng.normal(size=rows)
    return X, {
        "real": f + noise,
        "vector": np.stack([f + noise, X[:, 2] - noise], 1),
        "positive": np.exp(f + noise),
        "share": 1 / (1 + np.exp(-f - noise)),
        "count": rng.poisson(np.exp(0.5 * X[:, 0])).astype(float),
        "binary": (f + noise > 0).astype(int),
        "class": np.array(["cat", "dog", "emu"])[np.digitize(f + noise, [-0.5, 0.5])],
    }


def frame(rows: int, seed: int) -> tuple[pandas.DataFrame, dict[str, np.ndarray]]:
    """Numbers with gaps, categories, texts, booleans and dates."""
    X, targets = table(rows, seed)
    colours = np.array(["red", "green", "blue"], dtype=object)[
        (np.abs(X[:, 1]) * 2).astype(int) % 3
    ]
    size = X[:, 0].copy()
    size[::9] = np.nan
    colours[4::11] = None
    days = pandas.Timestamp("2024-01-01") + pandas.to_timedelta(np.arange(rows) * 5, unit="D")
    columns = {
        "size": size,
        "colour": colours,
        "grade": pandas.Categorical(np.where(X[:, 2] > 0, "high", "low")),
        "old": X[:, 1] > 0,
        "day": days,
        "name": [f"row {i}" for i in range(rows)],
    }
    return pandas.DataFrame(columns), targets


def numbers(model: Any, X: Any, y: np.ndarray) -> dict[str, Callable[[], Any]]:
    """What a fitted regressor is asked."""
    return {
        "predict": lambda: model.predict(X),
        "std": lambda: model.predict(X, return_std=True),
        "interval": lambda: model.predict_interval(X, level=0.8),
        "quantiles": lambda: model.predict_quantiles(X, [0.1, 0.5, 0.9]),
        "log_prob": lambda: model.predict_dist(X).log_prob(y),
        "variance": lambda: model.predict_dist(X).variance,
        "epistemic": lambda: model.predict_dist(X).epistemic,
        "mass": lambda: model.predict_dist(X).mass,
        "score": lambda: model.score(X, y),
        "nll": lambda: estimators.nll_scorer(model, X, y),
        "crps": lambda: estimators.crps_scorer(model, X, y),
        "pinball": lambda: estimators.pinball_scorer(0.9)(model, X, y),
        "set": lambda: model.predictive_set(X, 0.8),
    }


def labels(model: Any, X: Any, y: np.ndarray) -> dict[str, Callable[[], Any]]:
    """What a fitted classifier is asked."""
    return {
        "predict": lambda: model.predict(X),
        "proba": lambda: model.predict_proba(X),
        "log_proba": lambda: model.predict_log_proba(X),
        "classes": lambda: model.classes_,
        "set": lambda: model.predict_set(X, 0.8),
        "conformal set": lambda: model.predictive_set(X, 0.8),
        "epistemic": lambda: model.predict_dist(X).epistemic,
        "score": lambda: model.score(X, y),
        "nll": lambda: estimators.nll_scorer(model, X, y),
    }


def facts(model: Any) -> dict[str, Callable[[], Any]]:
    """What a fitted estimator knows of its fit and its table."""
    return {
        "names": lambda: sorted(name for name in vars(model) if name.endswith("_")),
        "epochs": lambda: model.n_iter_,
        "left out": lambda: model.plan_.left_out,
        "weight factor": lambda: model.weight_factor_,
        "out of fold": lambda: model.oof_log_prob_,
    }


def fitted(
    case: str, model: Any, data: tuple[Any, Any], test: tuple[Any, Any], **given: Any
) -> Answers:
    """Fit, ask, save, load and ask again."""
    made = attempt(lambda: model.fit(*data, **given))
    if made is not model:
        yield f"{case}: fit", made
        return
    ask = labels if hasattr(model, "classes_") else numbers
    yield from asked(case, ask(model, *test) | facts(model))
    with tempfile.TemporaryDirectory(prefix="golden") as folder:
        path = Path(folder) / "model"
        yield f"{case}: files", attempt(lambda: files_in(model.save(path)))
        models = {"models": model.models_} if hasattr(model, "models_") else {}
        again = attempt(lambda: estimators.load(path, **models))
        yield from asked(f"{case}, loaded", ask(again, *test))
        names = None if hasattr(model, "feature_names_in_") else ["a", "b", "c"]
        X = test[0] if names is None else pandas.DataFrame(test[0], columns=names)

        def columns() -> Any:
            found = ssla.Scorer(path, (0.5, 0.9), inputs=names, **models)(X)
            return {name: np.asarray(found[name]) for name in found.columns}

        yield f"{case}: scorer", attempt(columns)


def networks() -> Answers:
    """The library's own networks on arrays."""
    X, y = table(ROWS, 1)
    T, t = table(TESTS, 2)
    made: dict[str, tuple[Any, str, dict[str, Any]]] = {
        "auto": (estimators.SSLARegressor(**SMALL), "real", {}),
        "one member": (estimators.SSLARegressor(**SMALL | {"members": 1}), "real", {}),
        "auto, positive": (estimators.SSLARegressor(**SMALL), "positive", {}),
        "auto, counts": (estimators.SSLARegressor(**SMALL), "count", {}),
        "auto, vector": (estimators.SSLARegressor(**SMALL), "vector", {}),
        "conformal": (estimators.SSLARegressor(**SMALL, conformal=True), "real", {}),
        "newton": (estimators.SSLARegressor(**SMALL, refit="newton", trees=0), "real", {}),
        "all weights": (estimators.SSLARegressor(**SMALL, weights="all", trees=0), "real", {}),
        "kfac": (estimators.SSLARegressor(**SMALL, structure="kfac", tune=False), "real", {}),
        "groups": (estimators.SSLARegressor(**SMALL), "real", {"groups": np.arange(ROWS) // 5}),
        "time": (estimators.SSLARegressor(**SMALL), "real", {"time": np.arange(ROWS)}),
        "weights": (estimators.SSLARegressor(**SMALL), "real", {"sample_weight": X[:, 2] ** 2}),
        "constant target": (estimators.SSLARegressor(**SMALL), "zero", {}),
    }
    targets = {"positive": "positive", "poisson": "count", "log_normal": "positive"}
    targets |= {"logit_normal": "share", "gaussian": "real", "heteroscedastic": "real"}
    for likelihood, kind in targets.items():
        made[likelihood] = (estimators.SSLARegressor(likelihood, **SMALL, trees=5), kind, {})
    y["zero"], t["zero"] = np.zeros(ROWS), np.zeros(TESTS)
    for what, (model, kind, given) in made.items():
        yield from fitted(f"regressor, {what}", model, (X, y[kind]), (T, t[kind]), **given)
    made = {
        "two classes": (estimators.SSLAClassifier(**SMALL), "binary", {}),
        "three classes": (estimators.SSLAClassifier(**SMALL), "class", {}),
        "balanced": (estimators.SSLAClassifier(**SMALL, class_weight="balanced"), "class", {}),
        "no trees": (estimators.SSLAClassifier(**SMALL, trees=0), "class", {}),
        "weights": (estimators.SSLAClassifier(**SMALL), "class", {"sample_weight": X[:, 2] ** 2}),
    }
    for what, (model, kind, given) in made.items():
        yield from fitted(f"classifier, {what}", model, (X, y[kind]), (T, t[kind]), **given)
    more = table(9, 3)
    for case, model, kind, ask in (
        ("regressor", estimators.SSLARegressor("gaussian", **SMALL), "real", numbers),
        ("classifier", estimators.SSLAClassifier(**SMALL), "class", labels),
    ):
        model.fit(X, y[kind]).partial_fit(more[0], more[1][kind])
        yield from asked(f"{case}, more rows", ask(model, T, t[kind]))
        yield f"{case}, parameters", repr(type(model)().get_params())
        page = attempt(lambda: page_parts(ssla.html_report(model, T, t[kind]).text))
        parts = page if isinstance(page, dict) else {"error": page}
        yield from ((f"{case}, page: {what}", value) for what, value in parts.items())
    chain = make_pipeline(StandardScaler(), estimators.SSLARegressor(**SMALL, trees=0))
    score = estimators.crps_scorer
    yield (
        "regressor, cross validation",
        attempt(lambda: cross_val_score(chain, X, y["real"], scoring=score, cv=KFold(2))),
    )


def frames() -> Answers:
    """Data frames with categories, texts, dates and gaps; new rows with unknown ones."""
    X, y = frame(ROWS, 1)
    T, t = frame(TESTS, 2)
    T["colour"] = ["red", "violet", "blue", None, "green", "red"]
    made = {
        "regressor": (lambda: estimators.SSLARegressor(**SMALL), "real"),
        "classifier": (lambda: estimators.SSLAClassifier(**SMALL), "class"),
    }
    for name, (make, kind) in made.items():
        yield from fitted(f"{name}, pandas", make(), (X, y[kind]), (T, t[kind]))
        with_text = X.astype({"grade": str}), T.astype({"grade": str})
        own = [polars.from_pandas(part) for part in with_text]
        yield from fitted(f"{name}, polars", make(), (own[0], y[kind]), (own[1], t[kind]))
        plain = X[["size", "old"]], T[["size", "old"]]
        yield from fitted(f"{name}, numbers", make(), (plain[0], y[kind]), (plain[1], t[kind]))
        model = make().fit(X, y[kind])
        # An error today, which is to be corrected on purpose.
        page = attempt(lambda: page_parts(ssla.html_report(model, T, t[kind]).text))
        parts = page if isinstance(page, dict) else {"error": page}
        yield from ((f"{name}, pandas page: {what}", value) for what, value in parts.items())
        lacking = T.drop(columns="size")
        yield f"{name}, lacking column", attempt(lambda: model.predict(lacking))
    encoder = estimators.TableEncoder().fit(X)
    yield from asked(
        "encoder",
        {
            "values": lambda: encoder.transform(T),
            "names": lambda: encoder.get_feature_names_out(),
            "left out": lambda: encoder.plan_.left_out,
        },
    )


def wrapped() -> Answers:
    """Trees of scikit-learn with a Bayesian last layer."""
    X, y = table(ROWS, 1)
    T, t = table(TESTS, 2)
    tree = DecisionTreeRegressor(max_depth=3, random_state=0)
    forest = RandomForestClassifier(5, max_depth=3, random_state=0)
    wrap, classes = estimators.PredictiveRegressor, estimators.PredictiveClassifier
    made: dict[str, tuple[Any, str, dict[str, Any]]] = {
        "tree": (wrap(tree, cv=3, random_state=0), "real", {}),
        "noise": (wrap(tree, noise_base=tree, cv=3, final="all", random_state=0), "real", {}),
        "boosted": (wrap(cv=3, random_state=0), "real", {}),
        "weights": (wrap(tree, cv=3, random_state=0), "real", {"sample_weight": X[:, 2] ** 2}),
        "forest": (classes(forest, cv=3, random_state=0), "class", {}),
        "two classes": (classes(DecisionTreeClassifier(max_depth=2), cv=3), "binary", {}),
    }
    for what, (model, kind, given) in made.items():
        model.set_params(random_state=0)
        yield from fitted(f"wrapped, {what}", model, (X, y[kind]), (T, t[kind]), **given)
    (F, y), (G, t) = frame(ROWS, 1), frame(TESTS, 2)
    columns = ["size", "old"]
    yield from fitted(
        "wrapped, pandas",
        wrap(cv=3, random_state=0),
        (F[columns], y["real"]),
        (G[columns], t["real"]),
    )
    model = wrap(tree, cv=3, random_state=0).fit(X, y["real"])
    page = attempt(lambda: page_parts(ssla.html_report(model, T, t["real"]).text))
    parts = page if isinstance(page, dict) else {"error": page}
    yield from ((f"wrapped, page: {what}", value) for what, value in parts.items())
    other = wrap(tree, noise_base=tree, cv=3, random_state=0).fit(X, y["real"])
    logs = np.stack([model.oof_log_prob_, other.oof_log_prob_], 1)
    yield "stacking weights", attempt(lambda: estimators.stacking_weights(logs))


def cases() -> Answers:
    """All of the estimators."""
    for part in (networks, frames, wrapped):
        yield from part()
