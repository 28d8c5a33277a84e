"""Doubt that a last layer does not see: three ways to add it to the plain posterior.

    python -m benchmarks.networks.doubt [--only clinc fashion cnn] [--seeds 0 1 2] [--cache DIR]
    [--json FILE]

A last-layer posterior does not contain the uncertainty of the earlier layers. Every variant below
is the posterior of prototype.py (kfac at the trained head), with precision τ and temperature T of
the lowest log-loss on the validation rows. No choice sees a shifted or out-of-distribution row.

    plain         the last layer
    rich          the prior covariance of the last layer is I + R in place of I. R is the part of
                  the kernel of the earlier layers' Jacobian (the NTK) that is a function of the
                  features: each random direction v of the earlier weights changes the outputs by
                  J(x)v; a linear regression on the features gives coefficients m_v, and R is the
                  mean of m_v m_vᵀ over directions and classes. The variance is at least that of
                  `plain` for the same τ (after arXiv 2602.01279).
    mahalanobis   K(x) times max(1, h(x)/q)², with h² = φᵀ(Σφφᵀ/n + ridge)⁻¹φ and q the 90%
                  quantile of h on the validation rows: nine of ten rows keep their covariance
    neighbours    the same with the mean distance to the ten nearest training features, in cosine
    all weights   kfac of all weights at the trained network by `ssla.fit(weights="all")` (cnn
                  alone), with the precision of the lowest validation log-loss and T = 1

A variant is worth keeping if it raises the AUROC or lowers the log-loss under shift on every task,
with a log-loss on test rows that is not higher.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp

import ssla
from ssla.likelihoods import Categorical

from . import prototype, scores
from .peers import Setting, setting_of
from .prototype import Head, HeadCovariance, Search, nodes, with_ones
from .scores import ClassPrediction
from .tasks import TASKS
from .training import CACHE, in_chunks, trained

DIRECTIONS = 40
DIRECTION_ROWS = 2_000
RIDGE = 1e-3  # of the mean eigenvalue, in regressions on features
QUANTILE = 0.9
NEIGHBOURS = 10
NEIGHBOUR_ROWS = 15_000  # training features that are searched
ALL_WEIGHTS_PRECISIONS = (1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6)
DRAWS = 128

# (raw inputs, features) -> prediction
Predictor = Callable[[Tensor, Tensor], ClassPrediction]


def searched(
    setting: Setting, phi: Callable[[Tensor], Tensor]
) -> tuple[HeadCovariance, float, float]:
    """Covariance, temperature and validation loss of the best (τ, T), with transformed features."""
    f = in_chunks(setting.head, setting.phi.train[0])
    phi_val, y_val = setting.phi.validation
    head = Head(phi(setting.phi.train[0]), f)
    search = Search(head, prototype.LAPLACE, phi(phi_val), in_chunks(setting.head, phi_val), y_val)
    search.run()
    best = search.best
    return head.covariance(best.B, best.precision), best.temperature, float(best.losses.mean())


def integrated(
    cov: HeadCovariance, phi: Tensor, f: Tensor, temperature: float, factor: Tensor
) -> ClassPrediction:
    """softmax(f/T) over N(f, factor · K).  factor (N,): of the variance."""
    probs = []
    entropies = []
    sd = cov.variances(with_ones(phi)).sqrt() * factor[:, None].sqrt()
    for k, rows in enumerate(torch.arange(len(f)).split(prototype.CHUNK)):
        z = nodes(len(rows), f.shape[1], DRAWS, k)
        p = torch.softmax((f[rows] + (z * sd[rows]) @ cov.basis_b.T) / temperature, -1)
        probs.append(p.mean(0))
        entropies.append(torch.special.entr(p).sum(-1).mean(0))
    return ClassPrediction(torch.cat(probs), torch.cat(entropies))


# --- (a) rich last layers -----------------------------------------------------------------------


def rich_root(setting: Setting) -> Tensor:
    """(I + R)^½ of the features with ones, from random directions of the earlier weights."""
    network = trained(setting.task, setting.raw, setting.seed, setting.cache)
    body = {f"0.{name}": value.detach() for name, value in network[0].named_parameters()}
    order = torch.randperm(len(setting.raw.train[0]), generator=torch.Generator().manual_seed(0))
    chosen = order[:DIRECTION_ROWS]
    x = setting.raw.train[0][chosen]
    phi = with_ones(setting.phi.train[0][chosen]).double()
    gram = phi.T @ phi
    ridge = RIDGE * gram.diagonal().mean()
    solver = torch.linalg.cholesky(gram + ridge * torch.eye(len(gram), dtype=gram.dtype))
    total = torch.zeros_like(gram)
    generator = torch.Generator().manual_seed(1)
    for _ in range(DIRECTIONS):
        tangent = {k: torch.randn(v.shape, generator=generator) for k, v in body.items()}
        changes = []
        for part in x.split(500):

            def outputs(weights: dict[str, Tensor], part: Tensor = part) -> Any:
                return functional_call(network, weights, (part,))

            changes.append(jvp(outputs, (body,), (tangent,))[1])
        change = torch.cat(changes).double()
        coefficients = torch.cholesky_solve(phi.T @ change, solver)
        total += coefficients @ coefficients.T / change.shape[1]
    values, vectors = torch.linalg.eigh(torch.eye(len(total)) + total / DIRECTIONS)
    return (vectors * values.sqrt() @ vectors.T).float()


def rich(setting: Setting) -> tuple[Predictor, dict[str, float]]:
    root = rich_root(setting)

    def phi_of(phi: Tensor) -> Tensor:
        return with_ones(phi) @ root

    cov, temperature, loss = searched(setting, phi_of)
    return _predictor(setting, cov, temperature, phi_of), _choice(cov, temperature, loss)


# --- (b) distance to the training features --------------------------------------------------------


def leverage(setting: Setting) -> Callable[[Tensor], Tensor]:
    phi = with_ones(setting.phi.train[0]).double()
    gram = phi.T @ phi / len(phi)
    ridge = RIDGE * gram.diagonal().mean()
    root = torch.linalg.cholesky(gram + ridge * torch.eye(len(gram), dtype=gram.dtype))

    def distance(values: Tensor) -> Tensor:
        solved = torch.linalg.solve_triangular(root, with_ones(values).double().T, upper=False)
        return solved.square().sum(0).sqrt().float()

    return distance


def neighbour_distance(setting: Setting) -> Callable[[Tensor], Tensor]:
    order = torch.randperm(len(setting.phi.train[0]), generator=torch.Generator().manual_seed(0))
    known = nn.functional.normalize(setting.phi.train[0][order[:NEIGHBOUR_ROWS]])

    def distance(values: Tensor) -> Tensor:
        found = []
        for part in nn.functional.normalize(values).split(500):
            nearest = (part @ known.T).topk(NEIGHBOURS, 1).values
            found.append((1 - nearest).clamp_min(0).mean(1))
        return torch.cat(found).sqrt()

    return distance


def by_distance(
    measure: Callable[[Setting], Callable[[Tensor], Tensor]],
) -> Callable[[Setting], tuple[Predictor, dict[str, float]]]:
    def method(setting: Setting) -> tuple[Predictor, dict[str, float]]:
        distance = measure(setting)
        limit = distance(setting.phi.validation[0]).quantile(QUANTILE)
        cov, temperature, loss = searched(setting, _same)

        def factor(phi: Tensor) -> Tensor:
            return (distance(phi) / limit).clamp_min(1).square()

        predictor = _predictor(setting, cov, temperature, _same, factor)
        return predictor, _choice(cov, temperature, loss)

    return method


# --- (c) all weights ----------------------------------------------------------------------------


def all_weights(setting: Setting) -> tuple[Predictor, dict[str, float]]:
    """kfac of all weights by `ssla.fit`, the precision by the validation rows."""
    network = trained(setting.task, setting.raw, setting.seed, setting.cache)
    x_val, y_val = setting.raw.validation
    posterior = ssla.fit(
        network,
        setting.raw.train,
        likelihood=Categorical(),
        prior=ssla.priors.Gaussian(precision=1.0),
        weights="all",
        structure="kfac",
        gaussian="laplace",
        mode="tilt",
    )

    def predicted(post: ssla.Posterior, x: Tensor) -> ClassPrediction:
        probs = []
        entropies = []
        for k, part in enumerate(x.split(prototype.CHUNK)):
            mean, covariance = post.marginal(part)
            values, vectors = torch.linalg.eigh(covariance.double())
            root = vectors * values.clamp_min(0).sqrt()[:, None, :]
            z = nodes(len(part), mean.shape[1], DRAWS, k).double()
            p = torch.softmax(mean.double() + torch.einsum("nij,snj->sni", root, z), -1)
            probs.append(p.mean(0))
            entropies.append(torch.special.entr(p).sum(-1).mean(0))
        return ClassPrediction(torch.cat(probs).float(), torch.cat(entropies).float())

    found = []
    for precision in ALL_WEIGHTS_PRECISIONS:
        post = posterior.with_prior(ssla.priors.Gaussian(precision=precision))
        found.append((float(predicted(post, x_val).losses(y_val).mean()), precision, post))
    loss, precision, best = min(found, key=lambda item: item[0])
    choice = {"precision": precision, "temperature": 1.0, "validation loss": loss}
    return lambda x, phi: predicted(best, x), choice


# --- the table ----------------------------------------------------------------------------------


def _same(phi: Tensor) -> Tensor:
    return phi


def _ones(phi: Tensor) -> Tensor:
    return torch.ones(len(phi))


def _choice(cov: HeadCovariance, temperature: float, loss: float) -> dict[str, float]:
    return {"precision": cov.precision, "temperature": temperature, "validation loss": loss}


def _predictor(
    setting: Setting,
    cov: HeadCovariance,
    temperature: float,
    transform: Callable[[Tensor], Tensor],
    factor: Callable[[Tensor], Tensor] = _ones,
) -> Predictor:
    def predict(x: Tensor, phi: Tensor) -> ClassPrediction:
        f = in_chunks(setting.head, phi)
        return integrated(cov, transform(phi), f, temperature, factor(phi))

    return predict


def plain(setting: Setting) -> tuple[Predictor, dict[str, float]]:
    cov, temperature, loss = searched(setting, _same)
    return _predictor(setting, cov, temperature, _same), _choice(cov, temperature, loss)


VARIANTS: dict[str, Callable[[Setting], tuple[Predictor, dict[str, float]]]] = {
    "plain": plain,
    "rich": rich,
    "mahalanobis": by_distance(leverage),
    "neighbours": by_distance(neighbour_distance),
    "all weights": all_weights,
}


def scored(setting: Setting, predict: Predictor) -> dict[str, float]:
    test = predict(setting.raw.test[0], setting.phi.test[0])
    found = test.scores(setting.raw.test[1])
    found |= scores.ood_scores(test, predict(setting.raw.ood, setting.phi.ood))
    for name, (x, y) in setting.raw.shifts.items():
        phi = setting.phi.shifts[name][0]
        found[f"shift {name}"] = float(predict(x, phi).losses(y).mean())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=["clinc", "fashion", "cnn"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--json", type=Path, default=None, help="default: doubt.json in the cache")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = options.json or options.cache / "doubt.json"
    records = json.loads(path.read_text()) if path.exists() else []
    done = {(r["task"], r["seed"], r["variant"]) for r in records}
    for name in options.only:
        raw = TASKS[name].rows()
        for seed in options.seeds:
            setting = setting_of(TASKS[name], seed, options.cache, raw)
            for variant in options.variants:
                if variant == "all weights" and name != "cnn":
                    continue
                if (name, seed, variant) in done:
                    continue
                start = time.process_time()
                predict, choice = VARIANTS[variant](setting)
                with torch.no_grad():
                    found = choice | scored(setting, predict)
                found["seconds"] = time.process_time() - start
                records.append({"task": name, "seed": seed, "variant": variant} | found)
                path.write_text(json.dumps(records, indent=1) + "\n")
                line = " ".join(f"{key} {value:.4g}" for key, value in found.items())
                print(f"{name} {seed} {variant}: {line}", flush=True)


if __name__ == "__main__":
    main()
