"""Regression away from the training inputs: likelihood, coverage and width by distance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import ssla
from ssla.tables.networks import Ensemble, Settings, fit_ensemble
from ssla.tables.networks.training import Schedule
from ssla_paper.peers import GaussianMixture, MissingPeerError, library, scores
from ssla_paper.peers.laplace import laplace
from ssla_paper.robustness.data import Regression, regression
from ssla_paper.robustness.methods import quiet
from ssla_paper.runner import Record

BINS = 4  # inside, and three bins of equal size outside, by distance


def settings_for(found: Regression, seed: int, epochs: int, members: int) -> Settings:
    return Settings(
        likelihood=found.likelihood,
        members=members,
        activation="relu",
        schedule=Schedule(max_epochs=epochs),
        seed=seed,
    )


def one(dataset: str, seed: int, size: float = 1.0, epochs: int = 200) -> Record:
    """Every method at every distance."""
    found = regression(dataset, seed, size)
    ones = torch.ones(len(found.x)).double()
    alone, whole = (
        fit_ensemble(found.x, found.y, ones, settings_for(found, seed, epochs, members))
        for members in (1, 5)
    )
    place, edges = _places(found.distance)
    record: Record = {
        "dataset": dataset,
        "source": found.source,
        "seed": seed,
        "edges": edges,
        "methods": {},
        "missing": {},
    }
    ways: dict[str, Callable[[Tensor], Any]] = {
        "plug_in": lambda x: alone.predict(x, ssla.PlugIn()),
        "laplace": lambda x: _laplace(alone, found, x),
        "ensemble": lambda x: whole.predict(x, ssla.PlugIn()),
        "dropout": lambda x: _dropout(found, x, seed),
        "default": lambda x: alone.predict(x),
        "default5": lambda x: whole.predict(x),
        "none": lambda x: alone.predict(x, "none"),
        "newton": lambda x: alone.predict(x, "newton"),
        "weights": lambda x: alone.predict(x, "weights"),
    }
    for name, way in ways.items():
        try:
            record["methods"][name] = [_scored(way, found, place == b) for b in range(BINS)]
        except MissingPeerError as error:
            record["missing"][name] = str(error)
    return record


def _places(distance: Tensor) -> tuple[Tensor, list[float]]:
    """0 inside, 1 … 3 by thirds of the distances outside; and the mean distance of each."""
    outside = distance[distance > 0]
    cuts = outside.quantile(torch.tensor([1 / 3, 2 / 3], dtype=distance.dtype))
    place = (distance > 0).long() + (distance > cuts[0]).long() + (distance > cuts[1]).long()
    return place, [float(distance[place == b].mean()) for b in range(BINS)]


def _scored(way: Callable[[Tensor], Any], found: Regression, rows: Tensor) -> Record:
    with quiet():
        answer = way(found.new[rows])
        findings: Record = scores(answer, found.target[rows])
    flags = getattr(answer, "diagnostics", None)
    bad = 0.0 if flags is None else float(flags.inaccurate.double().mean())
    kept: Record = {key: findings[key] for key in ("nll", "crps", "cover95", "width95")}
    return {**(kept if bad == 0 else dict.fromkeys(kept)), "no_density": bad}


def _laplace(alone: Ensemble, found: Regression, new: Tensor) -> GaussianMixture:
    """laplace-torch on the first network: noise and prior by the evidence; σ(x) of a (μ, log
    σ²) network as a known scale.
    """
    assert alone.target is not None
    z, fresh, y = alone.inputs(found.x), alone.inputs(new), alone.target(found.y[:, None])[:, 0]
    net = alone.modules[0]
    if found.likelihood == "gaussian":
        findings = laplace(net, z, y, fresh)
    else:
        with torch.no_grad():
            spread, fresh_spread = ((net(part)[:, 1] / 2).exp() for part in (z, fresh))
        findings = laplace(_mean_of(net), z, y, fresh, scale=spread, new_scale=fresh_spread)
    shift, scale = float(alone.target.shift[0]), float(alone.target.scale[0])
    return GaussianMixture(findings.means * scale + shift, findings.sds * scale)


def _mean_of(net: nn.Sequential) -> nn.Sequential:
    """The network with only its first output."""
    last = net[-1]
    assert isinstance(last, nn.Linear)
    head = nn.Linear(last.in_features, 1).double()
    with torch.no_grad():
        head.weight.copy_(last.weight[:1])
        head.bias.copy_(last.bias[:1])
    return nn.Sequential(*list(net)[:-1], head)


def _dropout(found: Regression, new: Tensor, seed: int) -> GaussianMixture:
    peer = library("ssla_paper.peers.dropout", "the study uci's dropout")
    centre, spread = found.x.mean(0), found.x.std(0)
    shift, scale = float(found.y.mean()), float(found.y.std())
    findings: GaussianMixture = peer.mc_dropout(
        (found.x - centre) / spread,
        (found.y - shift) / scale,
        (new - centre) / spread,
        rate=0.1,
        draws=50,
        seed=seed,
    )
    return GaussianMixture(findings.means * scale + shift, findings.sds * scale)
