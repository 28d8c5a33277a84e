"""Distance of predictives from the truth for last layers of five likelihoods.

The truth is a long NUTS run.

    python benchmarks/accuracy/last_layers.py [--cases digits poisson …] [--gaussian laplace variational]
    [--seeds 3] [--draws 1500]
                                     [--weights 20] [--precision 1.0] [--activation tanh] [--decay
                                     1.0] [--json FILE] [--quick]

Each seed trains a small network with weight decay and early stopping, then its features are fixed.
The last layer has the prior N(0, 1/precision) on its weights and biases. NUTS (numpyro, float64,
four chains) samples exactly this posterior: its gradient is compared with torch's before each run.
Prints the mean KL(truth ‖ predictive) over test inputs, at home and out of distribution (OOD), as
mean ± standard deviation over seeds:

    plug-in               the mode of the last layer
    <gaussian>, output    ssla, predict(refit="output")
    <gaussian>, integral  p(y|f) integrated over the same Gaussian of f, by a fixed low-discrepancy
    set
    …, few                output and refit="weights" on the first --weights inputs only
    moment-matched        the Gaussian of f with the moments of the NUTS draws, integrated: what a Gaussian can reach
    *halves*              two chains against the other two. The error of the truth itself is about a quarter of it; KLs below
                          that, and values just below zero, are not resolved.

OOD: digits with permuted pixels; digits 5 to 9 for a network of digits 0 to 4; inputs outside the
training range for the others. `passes` of fit are those over the data or over stored features: one,
one for each Newton step, one for each round. Seconds are of the processor, on one thread. Needs
numpyro.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax
import jax.numpy as jnp
import numpy as np
import small_networks as networks
import torch
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import MCMC, NUTS
from small_networks import LAPLACE, VARIATIONAL, Split
from torch import Tensor, nn

import ssla
from ssla import likelihoods as L

CHAINS = 4
POINTS = 4096  # of the integrals over f
GRID = 401  # values of a continuous y
MOST_COUNTS = 2000
HOME, OOD = "home", "OOD"

jax.config.update("jax_enable_x64", True)


# --- cases --------------------------------------------------------------------------------------


def normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def curve(
    n: int, seed: int, target: Callable[[Tensor, torch.Generator], Tensor], outputs: int
) -> Split:
    """One input between −2.5 and 2.5; OOD inputs are 3 to 5 from the centre."""
    generator = torch.Generator().manual_seed(seed)
    x = 5 * torch.rand(2 * n + 40, 1, dtype=torch.float64, generator=generator) - 2.5
    y = target(x[:, 0], generator)
    ood = torch.cat([torch.linspace(-5, -3, 10), torch.linspace(3, 5, 10)]).double()[:, None]
    return Split(x[:n], y[:n], x[n : 2 * n], y[n : 2 * n], x[2 * n :], y[2 * n :], ood, outputs)


def moons(n: int, seed: int) -> Split:
    split = networks.moons(seed, n, n, 100)
    return split._replace(
        **{name: getattr(split, name).double() for name in ("y", "y_held", "y_test")}, outputs=1
    )


def counts(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.poisson((0.7 + torch.sin(1.5 * x)).exp(), generator=generator)


def uneven(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.sin(1.5 * x) + 0.3 * torch.exp(0.4 * x) * normal(len(x), generator=generator)


def heavy(x: Tensor, generator: torch.Generator) -> Tensor:
    chi = (normal(4, len(x), generator=generator) ** 2).sum(0)
    return torch.sin(1.5 * x) + 0.3 * normal(len(x), generator=generator) * (4 / chi).sqrt()


@dataclass(frozen=True)
class Case:
    likelihood: L.Likelihood
    split: Callable[[int], Split]
    hidden: tuple[int, ...]
    log_prob: Callable[[Any, Any], Any]  # in jax, up to a constant:  y (n,), f (n, C) -> (n,)


def categorical(y: Any, f: Any) -> Any:
    return jnp.take_along_axis(jax.nn.log_softmax(f, 1), y.astype(int)[:, None], 1)[:, 0]


def bernoulli(y: Any, f: Any) -> Any:
    return y * f[:, 0] - jax.nn.softplus(f[:, 0])


def poisson(y: Any, f: Any) -> Any:
    return y * f[:, 0] - jnp.exp(f[:, 0])


def heteroscedastic(y: Any, f: Any) -> Any:
    return -0.5 * (f[:, 1] + (y - f[:, 0]) ** 2 * jnp.exp(-f[:, 1]))


def student_t(y: Any, f: Any) -> Any:
    return -2.5 * jnp.log1p(((y - f[:, 0]) / 0.3) ** 2 / 4)


CASES = {
    "digits": Case(
        L.Categorical(), lambda seed: networks.digits(seed, 600, 200, 200), (50, 50), categorical
    ),
    "digits 0-4": Case(
        L.Categorical(),
        lambda seed: networks.few_digits(seed, 450, 150, 200),
        (50, 50),
        categorical,
    ),
    "bernoulli 60": Case(L.Bernoulli(), lambda seed: moons(60, seed), (10,), bernoulli),
    "poisson 40": Case(L.Poisson(), lambda seed: curve(40, seed, counts, 1), (10,), poisson),
    "mean and variance 60": Case(
        L.HeteroscedasticGaussian(), lambda seed: curve(60, seed, uneven, 2), (10,), heteroscedastic
    ),
    "mean and variance 200": Case(
        L.HeteroscedasticGaussian(),
        lambda seed: curve(200, seed, uneven, 2),
        (10,),
        heteroscedastic,
    ),
    "student t 60": Case(
        L.StudentT(4.0, 0.3), lambda seed: curve(60, seed, heavy, 1), (10,), student_t
    ),
}


# --- the truth ----------------------------------------------------------------------------------


def features(model: nn.Sequential, x: Tensor) -> Tensor:
    """Inputs of the last layer, with a column of ones (N, p + 1)."""
    with torch.no_grad():
        phi = model[:-1](x)
    return torch.cat([phi, torch.ones(len(x), 1, dtype=x.dtype)], 1)


@dataclass(frozen=True)
class Truth:
    theta: Tensor  # (draws, C, p + 1), chain after chain
    seconds: float
    r_hat: float
    divergent: int


def sample(
    case: Case, phi: Tensor, y: Tensor, mode: Tensor, precision: float, draws: int, seed: int
) -> Truth:
    """NUTS over θ = θ̂ + L z (C, p + 1), L Lᵀ the inverse of the Fisher information plus the
    prior at the mode θ̂.
    """
    law, shape = case.likelihood, mode.shape
    fisher = torch.einsum("na,ncd,nb->cadb", phi, law.fisher(phi @ mode.mT), phi).reshape(
        mode.numel(), -1
    )
    lower = torch.linalg.cholesky(fisher + precision * torch.eye(mode.numel(), dtype=torch.float64))
    L_ = torch.linalg.solve_triangular(
        lower.mT, torch.eye(mode.numel(), dtype=torch.float64), upper=True
    )
    inputs, targets, centre, scale = (
        jnp.asarray(part.double().numpy()) for part in (phi, y, mode.flatten(), L_)
    )

    def energy(theta: Any) -> Any:
        f = inputs @ theta.reshape(shape).T
        return 0.5 * precision * (theta**2).sum() - case.log_prob(targets, f).sum()

    _same_posterior(law, phi, y, mode, precision, energy)
    start = time.process_time()
    sampler = MCMC(
        NUTS(potential_fn=lambda z: energy(centre + scale @ z)),
        num_warmup=min(max(draws // 2, 200), 500),
        num_samples=draws,
        num_chains=CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    key = jax.random.PRNGKey(seed)
    start_points = 0.3 * jax.random.normal(key, (CHAINS, mode.numel()))
    sampler.run(key, init_params=start_points[0] if CHAINS == 1 else start_points)
    z = np.asarray(sampler.get_samples(group_by_chain=True))
    seconds = time.process_time() - start
    theta = torch.from_numpy(np.asarray(centre) + z.reshape(-1, mode.numel()) @ np.asarray(scale).T)
    r_hat = float(np.max(split_gelman_rubin(theta.reshape(z.shape).numpy())))
    return Truth(
        theta.reshape(-1, *shape),
        seconds,
        r_hat,
        int(sampler.get_extra_fields()["diverging"].sum()),
    )


def _same_posterior(
    law: L.Likelihood,
    phi: Tensor,
    y: Tensor,
    mode: Tensor,
    precision: float,
    energy: Callable[[Any], Any],
) -> None:
    """The gradient that NUTS uses is that of ssla's likelihood and prior, near the mode."""
    theta = (
        mode + 0.1 * normal(*mode.shape, generator=torch.Generator().manual_seed(0))
    ).requires_grad_(True)
    value = 0.5 * precision * (theta**2).sum() - law.log_prob(y, phi @ theta.mT).sum()
    (ours,) = torch.autograd.grad(value, theta)
    theirs = torch.from_numpy(
        np.array(jax.grad(energy)(jnp.asarray(theta.detach().flatten().numpy())))
    )
    torch.testing.assert_close(theirs, ours.flatten(), rtol=1e-9, atol=1e-9)


# --- predictives --------------------------------------------------------------------------------


def white_points(outputs: int) -> Tensor:
    """A fixed low-discrepancy set of N(0, I) (POINTS, C)."""
    u = torch.quasirandom.SobolEngine(outputs, scramble=True, seed=0).draw(
        POINTS, dtype=torch.float64
    )
    return torch.special.ndtri(u.clamp(1e-12, 1 - 1e-12))


def mixed(law: L.Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """log mean_s p(y|f_s) for f (S, C) and y (k,)."""
    parts = [law.log_prob(y, part.unsqueeze(1)).logsumexp(0) for part in f.split(2000)]
    return torch.stack(parts).logsumexp(0) - np.log(len(f))


def integral(law: L.Likelihood, mean: Tensor, K: Tensor, y: Tensor) -> Tensor:
    """log ∫ p(y|f) N(f; mean, K) df for mean (N, C), y (N, k)."""
    values, vectors = torch.linalg.eigh(K.double())
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    white = white_points(mean.shape[1])
    return torch.stack(
        [mixed(law, m + white @ r.mT, t) for m, r, t in zip(mean.double(), root, y, strict=True)]
    )


def targets(law: L.Likelihood, f: Tensor, outputs: int) -> tuple[Tensor, Tensor]:
    """Values of y and their weights (N, k), for draws f (S, N, C): sums over them are sums or
    integrals over y.
    """
    if isinstance(law, (L.Categorical, L.Bernoulli)):
        y = torch.arange(max(outputs, 2), dtype=torch.float64).expand(f.shape[1], -1)
        return y, torch.ones_like(y)
    drawn = law.sample(f, 1, torch.Generator().manual_seed(0))[0].double()  # (S, N)
    if isinstance(law, L.Poisson):
        top = min(2 * int(drawn.max()) + 20, MOST_COUNTS)
        y = torch.arange(top + 1, dtype=torch.float64).expand(f.shape[1], -1)
        return y, torch.ones_like(y)
    low, middle, high = drawn.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64), 0)
    scale = (high - low) / 2
    ends = [4 * ((end.values - middle) / scale) for end in (drawn.min(0), drawn.max(0))]
    share = torch.linspace(0, 1, GRID, dtype=torch.float64)[:, None]
    u = torch.asinh(ends[0]) * (1 - share) + torch.asinh(ends[1]) * share
    y = (middle + scale * torch.sinh(u)).mT.contiguous()
    step = (torch.asinh(ends[1]) - torch.asinh(ends[0])) / (GRID - 1)
    return y, (scale * step * torch.cosh(u)).mT.contiguous()


def kl(log_p: Tensor, log_q: Tensor, weights: Tensor) -> Tensor:
    """Over the values of y, by row. The part of p outside of them is not counted."""
    p = log_p.exp()
    return (torch.where(p > 0, p * (log_p - log_q), 0.0) * weights).sum(1)


def one(
    name: str, seed: int, gaussians: list[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One record for each predictive and place, and one of the run."""
    case = CASES[name]
    law, split = case.likelihood, case.split(seed)
    torch.manual_seed(seed)
    model = networks.perceptron(split.x.shape[1], case.hidden, split.outputs, options.activation)
    networks.train(
        model, law, split, seed, epochs=60 if options.quick else 300, precision=options.decay
    )
    prior = ssla.priors.Gaussian(options.precision)
    if options.quick:
        split = split._replace(x_test=split.x_test[:20], x_ood=split.x_ood[:20])
    new = torch.cat([split.x_test, split.x_ood])
    places = {HOME: slice(0, len(split.x_test)), OOD: slice(len(split.x_test), None)}
    # NUTS samples the posterior whose mode this is; a head that is kept as trained has another one.
    polish = {"mode": "polish"}
    base = networks.fit(model, split.x, split.y, law, LAPLACE, prior, **polish)
    weight, bias = base.parameters.values()
    mode = torch.cat([weight, bias[:, None]], 1)
    truth = sample(
        case, features(model, split.x), split.y, mode, options.precision, options.draws, seed
    )
    f = torch.einsum("np,scp->snc", features(model, new), truth.theta)
    y, widths = targets(law, f, split.outputs)
    density = torch.stack([mixed(law, part, t) for part, t in zip(f.unbind(1), y, strict=True)])
    halves = [
        torch.stack([mixed(law, p, t) for p, t in zip(half.unbind(1), y, strict=True)])
        for half in f.chunk(2)
    ]
    centred = f - f.mean(0)
    moments = f.mean(0), torch.einsum("snc,snd->ncd", centred, centred) / len(f)
    missing = float((1 - (density.exp() * widths).sum(1)).abs().max())
    run = {
        "case": name, "seed": seed, "nuts seconds": truth.seconds, "r hat": truth.r_hat, "divergent": truth.divergent,
        "draws": len(truth.theta), "largest mass outside the values of y": missing,
    }  # fmt: skip
    records: list[dict[str, Any]] = [run]

    def add(method: str, log_q: Tensor, rows: Tensor | slice = slice(None), **more: Any) -> None:
        found = torch.full((len(new),), torch.nan, dtype=torch.float64)
        found[rows] = kl(density[rows], log_q.double(), widths[rows])
        for place, part in places.items():
            records.append({"case": name, "seed": seed, "method": method, "place": place,
                            "kl": float(found[part].nanmean()), **more})  # fmt: skip

    add("plug-in", base.predict(new, refit="plug_in").log_prob(y))
    for gaussian in gaussians:
        start = time.process_time()
        post = networks.fit(model, split.x, split.y, law, gaussian, prior, **polish)
        middle = time.process_time()
        predictive = post.predict(new)
        log_q = predictive.log_prob(y)
        times = {
            "fit seconds": middle - start,
            "predict seconds": time.process_time() - middle,
            "inputs": len(new),
        }
        add(
            f"{gaussian}, output", log_q, **times, passes=1 + post.report.steps + post.report.rounds
        )
        add(f"{gaussian}, integral", integral(law, *post.marginal(new), y))
        if options.weights:
            rows = torch.cat(
                [torch.arange(len(new))[part][: options.weights] for part in places.values()]
            )
            start = time.process_time()
            log_q = post.predict(new[rows], refit="weights").log_prob(y[rows])
            seconds = time.process_time() - start
            add(f"{gaussian}, output, few", predictive.log_prob(y)[rows], rows)
            add(
                f"{gaussian}, weights, few",
                log_q,
                rows,
                **{"predict seconds": seconds, "inputs": len(rows)},
            )
    add("moment-matched", integral(law, *moments, y))
    records += [
        {"case": name, "seed": seed, "method": "*halves*", "place": place,
         "kl": float(kl(halves[0], halves[1], widths)[part].mean())} for place, part in places.items()
    ]  # fmt: skip
    return records


def show(name: str, records: list[dict[str, Any]]) -> None:
    """The table of one case."""
    mine = [r for r in records if r["case"] == name]
    runs, rows = [r for r in mine if "method" not in r], [r for r in mine if "method" in r]
    seconds = networks.spread([r["nuts seconds"] for r in runs], 1, "f")
    outside = max(r["largest mass outside the values of y"] for r in runs)
    print(
        f"\n{name}: {len(runs)} seeds, {runs[0]['draws']} draws; NUTS {seconds} s, largest R̂ "
        f"{max(r['r hat'] for r in runs):.3f}, {sum(r['divergent'] for r in runs)} divergent, "
        f"largest mass outside the values of y {outside:.0e}"
    )
    print(
        f"| {'KL from the truth':<24} | {HOME:<17} | {OOD:<17} | fit s  | predict s, rows | passes "
        "|"
    )
    print(f"|{'-' * 26}|{'-' * 19}|{'-' * 19}|--------|-----------------|--------|")
    for method in dict.fromkeys(r["method"] for r in rows):
        own = [r for r in rows if r["method"] == method]
        cells = [
            networks.spread([r["kl"] for r in own if r["place"] == place]) for place in (HOME, OOD)
        ]

        def mean(key: str, form: str, own: list[dict[str, Any]] = own) -> str:
            return format(np.mean([r[key] for r in own]), form) if key in own[0] else ""

        predict = (
            f"{mean('predict seconds', '.2f')}, {own[0]['inputs']}" if "inputs" in own[0] else ""
        )
        print(
            f"| {method:<24} | {cells[0]:<17} | {cells[1]:<17} | "
            f"{mean('fit seconds', '.2f'):>6} | {predict:>15} | {mean('passes', '.0f'):>6} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        default=list(CASES),
        choices=list(CASES),
        metavar="CASE",
        help=", ".join(CASES),
    )
    parser.add_argument(
        "--gaussian", nargs="+", default=[LAPLACE, VARIATIONAL], choices=[LAPLACE, VARIATIONAL]
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--draws", type=int, default=1500, help="of each of the four chains")
    parser.add_argument(
        "--weights", type=int, default=0, help='inputs at home and OOD for refit="weights"'
    )
    parser.add_argument(
        "--precision", type=float, default=1.0, help="of the prior of the last layer"
    )
    parser.add_argument(
        "--decay",
        type=float,
        default=1.0,
        help="precision of the weight decay that trains the network",
    )
    parser.add_argument("--activation", default="tanh", choices=list(networks.ACTIVATIONS))
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one seed, 200 draws, 40 inputs: only shows that everything runs",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.quick:
        options.seeds, options.draws = 1, 200
    gaussians = networks.available(options.gaussian)
    records: list[dict[str, Any]] = []
    with networks.quiet():
        for name in options.cases:
            for seed in range(options.seeds):
                records += one(name, seed, gaussians, options)
            show(name, records)
            networks.write_json(options.json, vars(options), records)


if __name__ == "__main__":
    main()
