"""Every method on the (μ, log σ²) network, or with its own best settings: one task is one seed and
a group of related methods.

All use the same 215 rows, of which networks keep the 15 of validation for stopping. Scores are of
standardised targets.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import ssla
from ssla.tables.networks.training import Architecture, Rows, Schedule, train_networks
from ssla_paper.heteroscedastic.data import Toy, toy
from ssla_paper.peers import GaussianMixture, MissingPeerError, scores
from ssla_paper.runner import Record

MEMBERS, HIDDEN = 5, (50, 50)
FRESH_SEED = 10_000  # far from the data seeds
LOW, HIGH, STEPS = -2.0, 2.0, 161
STRUCTURES = ("dense", "kfac", "diag")
THEIRS = {"dense": "full", "kfac": "kron", "diag": "diag"}
SHALLOW, SHALLOW_SD, DRAWS = (20,), 3.0, 100  # where mean-field families do not collapse
Answer = Any
Ask = Callable[[slice], Answer]  # rows of the new inputs -> a distribution for each


@dataclass(frozen=True, eq=False)
class Setting:
    """The rows, and the new inputs: `rows` test points first, then the grid of the figure, if
    any.
    """

    data: Toy
    new: Tensor
    y: Tensor
    seed: int

    @property
    def test(self) -> slice:
        return slice(0, len(self.y))

    @property
    def grid(self) -> slice:
        return slice(len(self.y), len(self.new))

    def cut(self, answer: GaussianMixture) -> Ask:
        return lambda rows: GaussianMixture(answer.means[:, rows], answer.sds[:, rows])


def setting(seed: int, fresh: int) -> Setting:
    """fresh > 0: the number of new test rows.

    0: the module's own 25, and a grid of inputs for the figure.
    """
    data = toy(seed)
    if fresh:
        x, y = data.fresh(fresh, FRESH_SEED + seed)
        return Setting(data, x, y, seed)
    x, y = data.test
    grid = torch.linspace(LOW, HIGH, STEPS, dtype=torch.float64)[:, None]
    return Setting(data, torch.cat([x, grid]), y, seed)


def done(at: Setting, methods: Iterator[tuple[str, Ask]]) -> Record:
    """Scores by method, up to the first whose library is missing; with a grid, the mean and the
    95% band there.
    """
    found: dict[str, Any] = {}
    bands: dict[str, Any] = {}
    failed: dict[str, int] = {}
    missing: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # counted below instead
        try:
            for name, ask in methods:
                answer = ask(at.test)
                found[name] = scores(answer, at.y, (0.95, 0.90, 0.75, 0.50))
                diagnostics = getattr(answer, "diagnostics", None)
                if diagnostics is not None:
                    failed[name] = int((diagnostics.inaccurate | diagnostics.unconverged).sum())
                if len(at.new) > len(at.y):
                    answer = ask(at.grid)
                    bands[name] = torch.cat(
                        [answer.mean[:, None], answer.interval(0.95)], 1
                    ).T.tolist()
        except MissingPeerError as error:
            missing["missing"] = str(error)
    record: Record = {
        "seed": at.seed,
        "points": len(at.y),
        "scores": found,
        "failed": failed,
        **missing,
    }
    if bands:
        pairs = {"train": at.data.train, "test": at.data.test}
        record |= {"bands": bands, "grid": at.new[at.grid, 0].tolist()}
        record |= {name: [x[:, 0].tolist(), y.tolist()] for name, (x, y) in pairs.items()}
    return record


def networks(
    data: Toy, seed: int, heteroscedastic: bool, members: int
) -> tuple[nn.Sequential, ...]:
    """Trained by the likelihood and the prior N(0, 1); with one output σ is trained too."""
    x, y = data.known
    held = torch.zeros(members, len(x), dtype=torch.bool)
    held[:, len(data.train[0]) :] = True
    likelihood = ssla.likelihoods.HeteroscedasticGaussian() if heteroscedastic else None
    rows = Rows(x.float(), y.float(), torch.ones(len(x)), held)
    architecture = Architecture(1, 2 if heteroscedastic else 1, HIDDEN)
    return tuple(
        net.double()
        for net in train_networks(architecture, likelihood, rows, Schedule(), seed).modules
    )


def _plug_in(nets: tuple[nn.Sequential, ...], new: Tensor) -> GaussianMixture:
    with torch.no_grad():
        f = torch.stack([net(new) for net in nets])
    return GaussianMixture(f[..., 0], (0.5 * f[..., 1]).exp())


def ours(seed: int, fresh: int, every: bool = True) -> Record:
    """The refits on one network and on five, beside the plug-in, the deep ensemble and the truth.

    every: refit weights with every structure too, which changes only the prior that the evidence
    selects.
    """
    at = setting(seed, fresh)
    nets = networks(at.data, seed, True, MEMBERS)

    def posterior(net: nn.Module, weights: str, structure: str) -> ssla.Posterior:
        likelihood = ssla.likelihoods.HeteroscedasticGaussian()
        return ssla.fit(
            net,
            at.data.known,
            likelihood=likelihood,
            prior=ssla.priors.Gaussian(),
            gaussian="laplace",
            weights=weights,
            structure=structure,
            mode="polish" if weights == "last_layer" else None,
        ).tune()

    def asked(of: ssla.Posterior, refit: str) -> Ask:
        return lambda rows: of.predict(at.new[rows], refit=refit)

    def methods() -> Iterator[tuple[str, Ask]]:
        mean, sd = at.data.truth(at.new)
        yield "truth", at.cut(GaussianMixture(mean[None], sd[None].clamp_min(1e-6)))
        yield "plug_in", at.cut(_plug_in(nets[:1], at.new))
        yield "ensemble", at.cut(_plug_in(nets, at.new))
        for structure in STRUCTURES:
            last = posterior(nets[0], "last_layer", structure)
            for refit in ("none", "newton", "output") + ("weights",) * (
                every or structure == "dense"
            ):
                yield f"{refit}-{structure}", asked(last, refit)
        yield "output-all", asked(posterior(nets[0], "all", "kfac"), "output")
        each = [posterior(net, "last_layer", "dense") for net in nets]
        yield (
            "output-ensemble",
            lambda rows: ssla.mixture([one.predict(at.new[rows]) for one in each]),
        )

    return done(at, methods())


def classical(seed: int, fresh: int) -> Record:
    """laplace-torch with noise and prior fitted: one σ for all inputs, or a factor on the σ(x)
    of the (μ, log σ²) network.
    """
    from ssla_paper.peers.laplace import laplace

    at = setting(seed, fresh)
    (constant,), both = (
        networks(at.data, seed, False, 1),
        networks(at.data, seed, True, MEMBERS)[0],
    )  # the network of ours
    mean, head = nn.Sequential(*list(both)[:-1], nn.Linear(HIDDEN[-1], 1).double()), both[-1]
    assert isinstance(head, nn.Linear)
    assert isinstance(mean[-1], nn.Linear)
    x, y = at.data.known
    with torch.no_grad():
        mean[-1].weight.copy_(head.weight[:1])
        mean[-1].bias.copy_(head.bias[:1])
        scale, new_scale = ((0.5 * both(rows)[:, 1]).exp() for rows in (x, at.new))

    def methods() -> Iterator[tuple[str, Ask]]:
        for name, structure in THEIRS.items():
            yield f"la-{name}", at.cut(laplace(constant, x, y, at.new, structure=structure))
            scaled = laplace(
                mean, x, y, at.new, structure=structure, scale=scale, new_scale=new_scale
            )
            yield f"la_scaled-{name}", at.cut(scaled)

    return done(at, methods())


def variational(seed: int, fresh: int, steps: int = 4000, mean_fields: bool = True) -> Record:
    """α-divergence (α = 1) and mean-field inference with one small hidden layer, where they do
    not collapse.
    """
    from ssla_paper.peers.alpha import black_box_alpha
    from ssla_paper.peers.variational import mean_field

    at = setting(seed, fresh)
    rows = (*at.data.known, at.new)

    def methods() -> Iterator[tuple[str, Ask]]:
        found = black_box_alpha(
            *rows,
            alpha=1.0,
            hidden=SHALLOW,
            prior_sd=SHALLOW_SD,
            steps=3 * steps // 4,
            draws=DRAWS,
            seed=seed,
        )
        yield "bb_alpha", at.cut(found)
        if not mean_fields:
            return
        yield (
            "mean_field",
            at.cut(
                mean_field(
                    *rows,
                    hidden=SHALLOW,
                    prior_sd=SHALLOW_SD,
                    heteroscedastic=True,
                    steps=steps,
                    draws=DRAWS,
                    seed=seed,
                )
            ),
        )

    return done(at, methods())


def collapsed(seed: int, fresh: int, steps: int = 4000) -> Record:
    """Mean field with the paper's two hidden layers of 50."""
    from ssla_paper.peers.variational import mean_field

    at = setting(seed, fresh)

    def methods() -> Iterator[tuple[str, Ask]]:
        found = mean_field(
            *at.data.known,
            at.new,
            hidden=HIDDEN,
            heteroscedastic=True,
            steps=steps,
            draws=DRAWS,
            seed=seed,
        )
        yield "mean_field_deep", at.cut(found)

    return done(at, methods())


def sampled(seed: int, fresh: int, draws: int = 200, hidden: tuple[int, ...] = HIDDEN) -> Record:
    """NUTS, with its convergence diagnostics."""
    from ssla_paper.peers.sampling import chain

    at = setting(seed, fresh)
    try:
        found = chain(
            *at.data.known,
            at.new,
            hidden=tuple(hidden),
            heteroscedastic=True,
            warmup=draws,
            draws=draws,
            seed=seed,
        )
    except MissingPeerError as error:
        return {"missing": str(error)}
    chains = {
        "r_hat": found.r_hat,
        "effective": found.effective,
        "divergent": found.divergent,
        "draws": draws,
    }
    return {**done(at, iter([("nuts", at.cut(found.answer))])), "chain": chains}
