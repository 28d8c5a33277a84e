"""Settings and data of refits that are refused, and the remedy."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from support.bad_input import X, Y, assert_message, fit


def _cauchy_log_prob(y, f):
    return -math.log(math.pi) - torch.log1p((y - f[..., 0]) ** 2)


def _gamma_log_prob(y, f):
    rate = 3.0 * torch.exp(-f[..., 0])
    return 3.0 * torch.log(rate) + 2.0 * torch.log(y) - rate * y - math.lgamma(3.0)


CASES = {
    "unknown refit": (
        lambda: fit().predict(X, refit="outputs"),
        r"Unknown refit 'outputs'. Did you mean 'output'\?",
    ),
    "no refit": (lambda: fit().predict(X, refit=None), "refit must be one of"),
    "a refit's class": (lambda: fit().predict(X, refit=ssla.NoRefit), "refit must be one of"),
    "unknown curvature": (lambda: ssla.NoRefit(curvature="observd"), r"Did you mean 'observed'\?"),
    "unknown curvature of the data": (
        lambda: ssla.NoRefit(data_curvature="empirical"),
        "Unknown data_curvature 'empirical'. Valid: 'fisher', 'observed'",
    ),
    "data without a use": (
        lambda: ssla.NoRefit(data=(X, Y)),
        "is for data_curvature='observed', which reads the training rows",
    ),
    "observed curvature on other data": (
        lambda: ssla.assla(
            fit(), X, Y, ssla.NoRefit(data_curvature="observed", data=(X[:9], Y[:9]))
        ),
        r"The data of the curvature have 9 rows.*NoRefit\(data_curvature='observed', data=",
    ),
    "observed curvature without data": (
        lambda: ssla.assla(
            replace(fit(), source=None), X, Y, ssla.NoRefit(data_curvature="observed")
        ),
        r"needs the training data again.*NoRefit\(data_curvature='observed', data=",
    ),
    "observed curvature in a low-rank sketch": (
        lambda: ssla.assla(
            fit(weights="all", structure="low_rank"), X, Y, ssla.NoRefit(data_curvature="observed")
        ),
        "structure='low_rank' cannot sum an observed curvature.*'dense', 'kfac' or 'diag'",
    ),
    "observed curvature of no data": (
        lambda: ssla.predictive.from_marginal(
            L.Poisson(), X[:, :1], 0 * X[:, :1, None], ssla.NoRefit(data_curvature="observed")
        ),
        "sums the curvature of training rows, and f alone has none",
    ),
    "two steps": (lambda: ssla.OutputRefit(steps=2), "steps must be None"),
    "refit of a generator's data": (
        lambda: (
            fit(data=((X, Y) for _ in range(1)))
            .predict(X, refit=ssla.WeightRefit(logdet="frozen"))
            .increments(Y)
        ),
        (
            "came from a generator, which can be read only once. Give all the data of the "
            r"fit: refit=ssla.WeightRefit\(data="
        ),
    ),
    "refit on fewer rows": (
        lambda: ssla.ssla(fit(), X, Y, ssla.WeightRefit(data=(X[:9], Y[:9]))),
        "data to refit on have 9 rows, but the posterior was fitted on 20",
    ),
    "refit on other data": (
        lambda: ssla.ssla(fit(), X, Y, ssla.WeightRefit(data=(X, Y + 9))),
        "not those of the fit: the log likelihood's gradient.*Give the data of the fit",
    ),
    "refit without data": (
        lambda: ssla.ssla(replace(fit(), source=None), X, Y),
        "does not hold them.*loaded from a file.*WeightRefit",
    ),
    "refit tolerance": (
        lambda: ssla.WeightRefit(tolerance=0.0),
        "tolerance must be a number between 0 and 1",
    ),
    "refit steps": (
        lambda: ssla.WeightRefit(max_steps=2.5),
        "max_steps must be a whole number from 1",
    ),
    "refit curvature": (lambda: ssla.WeightRefit(curvature="hesian"), r"Did you mean 'hessian'\?"),
    "refit logdet": (lambda: ssla.WeightRefit(logdet="exakt"), r"Did you mean 'exact'\?"),
    "refit failure": (lambda: ssla.WeightRefit(on_failure="rise"), r"Did you mean 'raise'\?"),
    "refit at another point": (
        lambda: ssla.WeightRefit(at="predicted"),
        r"Unknown at 'predicted'. Did you mean 'prediction'\?",
    ),
    "refit at a mean that does not exist": (
        lambda: ssla.ssla(
            fit(likelihood=L.custom(_cauchy_log_prob, outputs=1), mode="tilt"),
            X,
            Y,
            ssla.WeightRefit(at="prediction"),
        ),
        "need the mean of y, which is no possible y here.*at='candidate'",
    ),
    "candidates without a width": (
        lambda: ssla.WeightRefit(candidates=20),
        "candidates and half_width belong together.*half_width=None; give both",
    ),
    "a width without candidates": (
        lambda: ssla.WeightRefit(half_width=1.96),
        "belong together.*candidates=None",
    ),
    "three candidates": (
        lambda: ssla.WeightRefit(candidates=3, half_width=1.0),
        "candidates must be a whole number from 4",
    ),
    "a width of zero": (
        lambda: ssla.WeightRefit(candidates=20, half_width=0.0),
        "half_width must be a finite number above zero",
    ),
    "candidates for counts": (
        lambda: fit(data=(X, Y.abs().round()), likelihood=L.Poisson()).predict(
            X, refit=ssla.WeightRefit(candidates=20, half_width=1.0)
        ),
        "is for one continuous target.*of kind 'count'",
    ),
    "candidates beyond the support": (
        lambda: fit(
            data=(X, Y.exp()), likelihood=L.custom(_gamma_log_prob, support="positive", outputs=1)
        ).predict(X, refit=ssla.WeightRefit(candidates=20, half_width=100.0)),
        "leaves the support of y.*smaller half_width",
    ),
    "auto with candidates": (
        lambda: ssla.AutoRefit(weights=ssla.WeightRefit(candidates=20, half_width=1.0)),
        "needs the accurate refit.*without candidates",
    ),
    "auto at the prediction": (
        lambda: ssla.AutoRefit(weights=ssla.WeightRefit(at="prediction")),
        "needs the accurate refit",
    ),
    "paper's settings with a sketch": (
        lambda: ssla.paper_settings(1.0, structure="low_rank"),
        "Unknown structure 'low_rank'.*'kfac', 'diag', 'dense'",
    ),
    "paper's settings without a width": (
        lambda: ssla.paper_settings(half_width=-1.0),
        "half_width must be a finite number above zero",
    ),
    "structure of a last layer beyond the memory": (
        lambda: ssla.ssla(
            fit(
                nn.Sequential(nn.Linear(3, 400), nn.Tanh(), nn.Linear(400, 1)),
                structure="diag",
                memory_budget=1 << 22,
            ),
            X,
            Y,
            ssla.WeightRefit(logdet="structure"),
        ),
        "last layer with 401 parameters needs.*memory budget.*logdet='traces'",
    ),
    "Hessian of many weights": (
        lambda: ssla.ssla(
            fit(
                nn.Sequential(nn.Linear(3, 150), nn.Tanh(), nn.Linear(150, 1)),
                weights="all",
                structure="diag",
            ),
            X,
            Y,
            ssla.WeightRefit(curvature="hessian"),
        ),
        "at most 500 weights, but this posterior has 751.*curvature='observed'",
    ),
    "auto target": (lambda: ssla.AutoRefit(target=-1.0), "target must be a number above zero"),
    "auto weights": (lambda: ssla.AutoRefit(weights="weights"), "weights must be a WeightRefit"),
    "ssla of other rows": (
        lambda: ssla.ssla(fit(), X, Y[:7]),
        r"y must have shape \(20,\) with one value for each input",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case):
    assert_message(*CASES[case])
