"""All methods for classes, fitted to the same rows: five networks are trained, and each method uses
one or all of them.

The plug-in, temperature scaling and laplace-torch have the first network, early stopped on a tenth
of the rows (the temperature is from the held-out rows of each of the five). So has our default,
`ssla.fit` on all rows without prior, mode or gaussian. The other methods of ours have the Gaussian
at the mode: they polish the last layer on all rows and tune the prior's precision by the evidence,
or by the NLL of the held-out rows ("validated"). The deep ensemble and "ours, default × 5" have all
five.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import ssla
from ssla.likelihoods import Categorical
from ssla.tables.networks.folds import hold_out_rows
from ssla.tables.networks.training import Architecture, Rows, Schedule, train_networks
from ssla_paper.networks import Recipe
from ssla_paper.peers import MissingPeerError
from ssla_paper.peers.dropout_classes import dropout_classes
from ssla_paper.peers.laplace_classes import laplace_classes
from ssla_paper.peers.temperature import temperature
from ssla_paper.robustness.scores import entropy

MEMBERS, LEFT_OUT = 5, 0.1
NAMES = {
    "plug_in": "plug-in (MAP)",
    "temperature": "temperature scaling",
    "laplace": "laplace-torch, last layer",
    "ensemble": "deep ensemble (5)",
    "dropout": "MC dropout",
    "default": "ours, default",
    "default5": "ours, default × 5",
    "none": "ASSLA (none)",
    "newton": "ours, newton",
    "output": "ours at the mode, output",
    "weights": "SSLA (weights)",
    "validated": "ours at the mode, prior by held-out rows",
}
BASELINES = ("plug_in", "temperature", "laplace", "ensemble", "dropout")
OURS = ("default", "default5", "none", "newton", "output", "weights", "validated")
MOST_REFITTED = 5  # classes: a refit for each, of all last-layer weights


@dataclass(frozen=True, eq=False)
class Answer:
    """Probabilities (N, C), and if available an epistemic measure (N,)."""

    probs: Tensor
    epistemic: Tensor | None = None


@contextmanager
def quiet() -> Iterator[None]:
    """Silences warnings of `fit` and `tune`: the tables show their effect."""
    with warnings.catch_warnings():
        for start in (
            "polish moved",
            "The network is not at the mode",
            "Tuning ended at the edge",
            "On the training rows the predictive is worse",
            r"\d+ of \d+ predictives are",
        ):
            warnings.filterwarnings("ignore", start, UserWarning)
        for start in ("Tuning did not converge", "the variational Gaussian did not converge"):
            warnings.filterwarnings("ignore", start, RuntimeWarning)
        yield


@dataclass(frozen=True, eq=False)
class Methods:
    """Networks trained on x (n, d), y (n,); the fit of each method is computed when it is used."""

    x: Tensor
    y: Tensor
    classes: int
    seed: int
    held_out: Tensor  # (M, n)
    modules: tuple[nn.Module, ...]
    epochs: int

    def default(self, member: int = 0) -> ssla.Posterior:
        """What `ssla.fit` does if nothing else is asked for."""
        with quiet():
            return ssla.fit(self.modules[member], (self.x, self.y), likelihood=Categorical())

    @cached_property
    def first_default(self) -> ssla.Posterior:
        return self.default(0)

    @cached_property
    def defaults(self) -> tuple[ssla.Posterior, ...]:
        return (self.first_default, *(self.default(m) for m in range(1, len(self.modules))))

    def posterior(self, member: int = 0) -> ssla.Posterior:
        """The Gaussian at the mode: a last layer, dense, polished, the prior by the evidence."""
        with quiet():
            return ssla.fit(
                self.modules[member],
                (self.x, self.y),
                likelihood=Categorical(),
                prior=ssla.priors.Gaussian(),
                mode="polish",
                gaussian="laplace",
            ).tune()

    @cached_property
    def first(self) -> ssla.Posterior:
        return self.posterior(0)

    @cached_property
    def validated(self) -> ssla.Posterior:
        """The first network's, polished under the prior of its training; then the precision by
        the held-out rows, θ̂ kept.
        """
        out, module = self.held_out[0], self.modules[0]
        with quiet():
            part = ssla.fit(
                module,
                (self.x[~out], self.y[~out]),
                likelihood=Categorical(),
                prior=ssla.priors.Gaussian(),
                mode="polish",
                gaussian="laplace",
            )
            prior = part.tune(
                objective="nll", data=(self.x[out], self.y[out]), per_layer=False
            ).prior
            return ssla.fit(
                module,
                (self.x, self.y),
                likelihood=Categorical(),
                prior=ssla.priors.Gaussian(),
                mode="polish",
                gaussian="laplace",
            ).with_prior(prior)

    @cached_property
    def temperature(self) -> float:
        """From the held-out rows of all networks: one network is often right on all of its own,
        and then T does not exist.
        """
        logits = torch.cat([self._logits(m, self.x[rows]) for m, rows in enumerate(self.held_out)])
        return temperature(logits, torch.cat([self.y[rows] for rows in self.held_out]))

    @cached_property
    def laplace(self) -> Any:
        return laplace_classes(self.modules[0], self.x, self.y)

    @cached_property
    def dropout(self) -> Any:
        recipe = Recipe(batch_size=64, epochs=self.epochs, weight_decay=1 / len(self.x))
        return dropout_classes(
            self.x, self.y, self.held_out[0], self.classes, seed=self.seed, recipe=recipe
        )

    def _logits(self, member: int, x: Tensor) -> Tensor:
        with torch.no_grad():
            f: Tensor = self.modules[member](x)
        return f.double()

    def answer(self, name: str, x: Tensor, epistemic: bool = False) -> Answer:
        """The prediction of one method at x (N, d)."""
        if name in ("plug_in", "temperature"):
            warmth = self.temperature if name == "temperature" else 1.0
            return Answer(torch.softmax(self._logits(0, x) / warmth, 1))
        if name == "laplace":
            return Answer(self.laplace(x))
        if name in ("ensemble", "dropout"):
            draws = self.dropout(x) if name == "dropout" else self._softmaxes(x)
            return Answer(draws.mean(0), entropy(draws.mean(0)) - entropy(draws).mean(0))
        with quiet():
            if name == "default":
                predictive = self.first_default.predict(x)
            elif name == "default5":
                predictive = self.five(x, self.first_default.predict(x))
            else:
                predictive = (
                    self.validated.predict(x)
                    if name == "validated"
                    else self.first.predict(x, name)
                )
        return _answer(predictive, epistemic and name not in ("none", "newton"))

    def five(self, x: Tensor, first: ssla.Predictive) -> ssla.Predictive:
        """The mixture of our default on all networks; the first is passed in."""
        return ssla.mixture([first, *(posterior.predict(x) for posterior in self.defaults[1:])])

    def _softmaxes(self, x: Tensor) -> Tensor:
        return torch.stack([torch.softmax(self._logits(m, x), 1) for m in range(len(self.modules))])

    def answers(
        self, x: Tensor, names: Sequence[str], epistemic: bool = False
    ) -> tuple[dict[str, Answer], dict[str, str]]:
        """The predictions of several methods; and what to install for missing ones."""
        found: dict[str, Answer] = {}
        missing: dict[str, str] = {}
        with quiet():
            first = self.first_default.predict(x)
        for name in names:
            try:
                if name in ("default", "default5"):
                    found[name] = _answer(
                        first if name == "default" else self.five(x, first), epistemic
                    )
                else:
                    found[name] = self.answer(name, x, epistemic)
            except MissingPeerError as error:
                missing[name] = str(error)
        return found, missing

    def affordable(self, without: Sequence[str] = ()) -> list[str]:
        """All methods, but refits of the weights only where there are few classes."""
        return [
            name
            for name in NAMES
            if name not in without and (name != "weights" or self.classes <= MOST_REFITTED)
        ]


def _answer(predictive: Any, epistemic: bool) -> Answer:
    doubt = predictive.epistemic.reshape(len(predictive.probs), -1).sum(1) if epistemic else None
    return Answer(predictive.probs.double(), doubt)


def trained(
    x: Tensor, y: Tensor, classes: int, seed: int, epochs: int = 200, members: int = MEMBERS
) -> Methods:
    """2 × 50 ReLU networks under the prior N(0, 1), early stopped."""
    generator = torch.Generator().manual_seed(seed)
    held = hold_out_rows(len(x), members, LEFT_OUT, generator, y)
    architecture = Architecture(x.shape[1], classes, activation="relu")
    rows = Rows(x.float(), y, torch.ones(len(x)), held)
    found = train_networks(architecture, Categorical(), rows, Schedule(max_epochs=epochs), seed)
    return Methods(
        x, y, classes, seed, held, tuple(module.double() for module in found.modules), epochs
    )
