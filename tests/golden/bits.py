"""The bits of every answer: SHA-256 of the float64 bytes for each likelihood, rung, structure and
derived posterior.

    python tests/golden/bits.py write     # after a change that is meant to change numbers
    python tests/golden/bits.py check     # after one that is not: lists what differs

One thread, fixed seeds. The bits depend on the processor and on the versions of torch and numpy, so
this is a tool for refactoring on one machine and not a test; `tests/golden/test_golden.py` loads
the posteriors kept beside it on any machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ssla
from ssla import likelihoods as L
from ssla import priors as P

FILE = Path(__file__).with_name("bits.json")
ROWS, TESTS = 24, 5


def _gamma(y: Tensor, f: Tensor) -> Tensor:
    """Gamma with shape 3 and mean e^f."""
    rate = 3.0 * torch.exp(-f[..., 0])
    return 3.0 * torch.log(rate) + 2.0 * torch.log(y) - rate * y - math.lgamma(3.0)


LIKELIHOODS: dict[str, tuple[Any, int, str]] = {
    "gaussian": (L.Gaussian(noise=0.4), 1, "real"),
    "gaussian estimate": (L.Gaussian(noise="estimate"), 1, "real"),
    "gaussian vector": (
        L.Gaussian(noise=torch.tensor([0.4, 0.8], dtype=torch.float64)),
        2,
        "vector",
    ),
    "heteroscedastic": (L.HeteroscedasticGaussian(), 2, "real"),
    "student": (L.StudentT(df=4.0, scale=0.5), 1, "real"),
    "poisson": (L.Poisson(), 1, "count"),
    "negative binomial": (L.NegativeBinomial(dispersion=0.4), 1, "count"),
    "bernoulli": (L.Bernoulli(), 1, "binary"),
    "categorical": (L.Categorical(), 4, "class"),
    "tempered": (L.Tempered(L.Poisson(), beta=0.5), 1, "count"),
    "custom gamma": (L.custom(_gamma, support="positive", outputs=1), 1, "positive"),
}
RUNGS = ("plug_in", "none", "newton", "output", "weights", "auto")
STRUCTURES = ("dense", "kfac", "diag", "low_rank")


def network(outputs: int, seed: int = 0) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    module = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs)).double().eval()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return module


def rows(module: nn.Module, kind: str, count: int = ROWS, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and targets that the network explains."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, generator=g, dtype=torch.float64)
    with torch.no_grad():
        f = module(x)
    noise = 0.4 * torch.randn(f.shape, generator=g, dtype=torch.float64)
    y: Tensor = {
        "real": f[:, 0] + noise[:, 0],
        "vector": f + noise,
        "positive": (f[:, 0] + noise[:, 0]).exp(),
        "count": torch.poisson(f[:, 0].exp(), generator=g),
        "binary": (
            torch.rand(count, generator=g, dtype=torch.float64) < torch.sigmoid(f[:, 0])
        ).double(),
        "class": torch.distributions.utils.probs_to_logits(torch.softmax(f + 3 * noise, 1)).argmax(
            1
        ),
    }[kind]
    return x, y


def digest(value: Any) -> str:
    if isinstance(value, Tensor):
        return hashlib.sha256(
            value.detach().to("cpu").double().contiguous().numpy().tobytes()
        ).hexdigest()[:8]
    if isinstance(value, tuple) and not isinstance(value, str):
        return hashlib.sha256("|".join(digest(part) for part in value).encode()).hexdigest()[:8]
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


def answers(p: Any, y: Tensor) -> dict[str, Any]:
    """Everything that a predictive answers."""
    found = {
        name: getattr(p, name)
        for name in ("mean", "variance", "mode", "mass", "epistemic", "aleatoric")
    }
    found |= {
        "log_prob": p.log_prob(y),
        "interval": p.interval(0.9),
        "sample": p.sample(3, torch.Generator().manual_seed(2)),
    }
    for name, ask in {
        "cdf": lambda: p.cdf(y),
        "icdf": lambda: p.icdf([0.1, 0.5]),
        "hdr": lambda: (lambda r: r if isinstance(r, Tensor | tuple) else r.contains(y))(
            p.hdr(0.8)
        ),
        "probs": lambda: p.probs,
        "increments": lambda: (lambda i: (i.likelihood, i.prior, i.curvature, i.total))(
            p.increments(y)
        ),
    }.items():
        try:
            found[name] = ask()
        except (AttributeError, TypeError):
            found[name] = "none"
    d = p.diagnostics
    return found | {
        "flags": (
            d.fallback,
            d.unconverged,
            d.inaccurate,
            d.refit,
            d.convention,
            d.rung or (),
            d.reason or (),
        )
    }


def cases() -> Iterator[tuple[str, Any]]:
    for name, (likelihood, outputs, kind) in LIKELIHOODS.items():
        module = network(outputs)
        data, (x, y) = rows(module, kind), rows(module, kind, TESTS, seed=3)
        for weights in ("last_layer", "all"):
            for structure in STRUCTURES:
                post = ssla.fit(
                    module,
                    data,
                    likelihood=likelihood,
                    prior=P.Gaussian(),
                    gaussian="laplace",
                    weights=weights,
                    structure=structure,
                )
                here = f"{name}, {weights}, {structure}"
                yield f"{here}: posterior", (post.theta, post.log_evidence(), *post.marginal(x))
                for rung in RUNGS:
                    if (
                        rung in ("weights", "auto") and (structure != "dense" or weights == "all")
                    ) or kind == "vector" == rung:
                        continue
                    try:
                        yield from (
                            (f"{here}, {rung}: {what}", v)
                            for what, v in answers(post.predict(x, rung), y).items()
                        )
                    except ValueError as error:
                        yield f"{here}, {rung}: error", type(error).__name__
        yield from derived(name, likelihood, module, data, kind, x, y)


def derived(
    name: str, likelihood: Any, module: nn.Module, data: Any, kind: str, x: Tensor, y: Tensor
) -> Iterator[tuple[str, Any]]:
    """Other priors and conventions, tuning, more data, mixtures, other units, sets of priors."""
    post = ssla.fit(module, data, likelihood=likelihood, prior=P.Gaussian(), gaussian="laplace")
    others = {
        "prior": post.with_prior(P.Gaussian(3.0)),
        "laplace prior": post.with_prior(P.Laplace(1.0)),
        "tuned": post.tune(),
        "updated": post.update(rows(module, kind, 7, seed=5)),
    }
    if kind != "class":  # a softmax is not determined without a prior
        for convention in ("paper", "additive"):
            others[convention] = post.with_prior(P.Gaussian(0.3), convention=convention)
    for what, other in others.items():
        predictive = other.predict(x)
        yield f"{name}, {what}: posterior", (other.theta, other.log_evidence())
        yield from (
            (f"{name}, {what}: {part}", value) for part, value in answers(predictive, y).items()
        )
    mixed = ssla.mixture([post.predict(x), others["prior"].predict(x)], weights=[1, 2])
    yield from ((f"{name}, mixture: {part}", value) for part, value in answers(mixed, y).items())
    if kind in ("real", "vector"):
        scaled = ssla.predictive.affine(post.predict(x), 3.0, 2.0)
        yield from (
            (f"{name}, affine: {part}", value) for part, value in answers(scaled, 3 + 2 * y).items()
        )
    s = ssla.sensitivity(post, x, (0.1, 10.0))
    yield f"{name}, sensitivity", (s.mean, s.stddev, s.log_prob(y), s.mean_change)
    if name in ("gaussian", "student"):
        credal = ssla.credal(post, x, P.Box(mean=(-0.1, 0.1), precision=(0.5, 2.0)))
        yield f"{name}, credal", (*credal.cdf(y), *credal.quantile(0.1), credal.interval(0.9))


def bits() -> dict[str, str]:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: dict[str, str] = {}
        for name, value in cases():
            case, _, what = name.partition(": ")
            found[case] = f"{found.get(case, '')} {what}={digest(value)}".strip()
        return found


def main(task: str) -> int:
    found = bits()
    if task == "write":
        FILE.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
        print(f"{len(found)} cases written to {FILE}")
        return 0
    kept = json.loads(FILE.read_text())
    changed = []
    for case in sorted(kept.keys() | found.keys()):
        parts = set(kept.get(case, "").split()) ^ set(found.get(case, "").split())
        if parts:
            changed.append(
                f"{case}: {', '.join(sorted({part.partition('=')[0] for part in parts}))}"
            )
    print("\n".join(changed) or f"the answers of all {len(found)} cases have the same bits")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "check"))
