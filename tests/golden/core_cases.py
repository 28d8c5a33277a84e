"""Answers of the core: every likelihood, rung, structure and derived posterior, every method."""

from __future__ import annotations

import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from digests import Answers, asked, attempt, files_in, page_parts
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ssla
from ssla import likelihoods as L
from ssla import priors as P

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
        found[name] = attempt(ask)
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


def grid() -> Answers:
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
) -> Answers:
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


# --- every method, on posteriors with the defaults of fit -----------------------------------


def told(post: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
    """What a posterior says of itself, and its predictive at x."""
    return {
        "posterior": (post.theta, post.mean, post.log_evidence(), *post.marginal(x)),
        "names": (post.gaussian, post.convention, repr(post), sorted(post.parameters)),
        "report": str(post.report),
        "history": str(post.tuning_history),
    } | answers(post.predict(x), y)


def checked(case: str, make: Any, x: Tensor, y: Tensor) -> Answers:
    """All that the posterior tells, or the error of making it."""
    found = attempt(lambda: told(make(), x, y))
    parts = found if isinstance(found, dict) else {"error": found}
    yield from ((f"{case}: {what}", value) for what, value in parts.items())


def by_defaults() -> Answers:
    """No prior, no Gaussian, no structure given: what `fit` chooses, and each method on it."""
    for name in LIKELIHOODS:
        yield from fits(name)
        yield from changes(name)


def default_fit(name: str, data: Any = None, **options: Any) -> Any:
    """The posterior of a likelihood's network and rows."""
    likelihood, outputs, kind = LIKELIHOODS[name]
    module = network(outputs)
    given = rows(module, kind) if data is None else data
    return ssla.fit(module, given, likelihood=likelihood, **options)


def fits(name: str) -> Answers:
    """The options of `fit`."""
    _, outputs, kind = LIKELIHOODS[name]
    module = network(outputs)
    weights = torch.arange(ROWS, dtype=torch.float64) % 3
    x, y = rows(module, kind, TESTS, seed=3)
    made: dict[str, dict[str, Any]] = {
        "default": {},
        "validation": {"validation": rows(module, kind, 20, seed=9)},
        "validation share": {"validation": 0.5},
        "polish": {"mode": "polish"},
        "tilt": {"mode": "tilt"},
        "as is": {"mode": "as_is"},
        "row weights": {"data": (*rows(module, kind), weights)},
        "all weights": {"weights": "all"},
        "all weights, laplace": {"weights": "all", "gaussian": "laplace"},
        "laplace": {"gaussian": "laplace"},
        "one parameter": {"weights": ["2.weight"]},
        "small budget": {"memory_budget": 20_000},
        "flat": {"prior": P.Flat()},
    }
    for what, options in made.items():
        yield from checked(f"{name}, {what}", partial(default_fit, name, **options), x, y)


def changes(name: str) -> Answers:
    """Posteriors made from others, and each method."""
    likelihood, outputs, kind = LIKELIHOODS[name]
    module = network(outputs)
    data, unseen = rows(module, kind), rows(module, kind, 20, seed=9)
    more, (x, y) = rows(module, kind, 7, seed=5), rows(module, kind, TESTS, seed=3)
    tilt = {"mode": "tilt", "prior": P.Gaussian(2.0)}
    post, tilted = default_fit(name), default_fit(name, **tilt)
    changed = {
        "default updated": lambda: post.update(more),
        "tilted updated": lambda: tilted.update(more),
        "tilted merged": lambda: tilted.merge(default_fit(name, more, **tilt)),
        "default merged": lambda: post.merge(default_fit(name, more)),
        "default, other prior": lambda: post.with_prior(P.Gaussian(3.0)),
        "default, other prior, data": lambda: post.with_prior(P.Gaussian(3.0), data=data),
        "tuned by nll": lambda: post.tune("nll", data=unseen),
        "tuned by evidence": lambda: post.tune("evidence"),
        "tuned by evidence, one factor": lambda: post.tune(per_layer=False, over=("prior",)),
    }
    if name in ("gaussian", "gaussian estimate", "poisson", "categorical"):
        changed["tuned by loo"] = lambda: post.tune("loo")
        changed["tuned by crps in folds"] = lambda: post.tune("crps", data=data, folds=3)
    for what, make in changed.items():
        yield from checked(f"{name}, {what}", make, x, y)
    yield from methods(name, post, x, y)
    yield from kept(name, likelihood, module, post, x, y)


def methods(name: str, post: Any, x: Tensor, y: Tensor) -> Answers:
    """What is asked of a posterior beside its predictives."""

    def loo() -> tuple[Any, ...]:
        found = post.loo()
        numbers = (found.log_prob, found.lower, found.upper, found.influence, found.refitted)
        flags = (found.failed, found.doubtful, found.inaccurate, found.pit)
        return (*numbers, *flags, found.nll, found.coverage(0.8), str(found))

    def explain(**options: Any) -> tuple[Any, ...]:
        found = ssla.explain(post, x, **options)
        numbers = (*found.marginal, *found.influence, *found.split)
        return (*numbers, found.inputs, found.reference, found.failed, str(found))

    def gains(**options: Any) -> tuple[Any, ...]:
        found = ssla.label_next(post, x, **options)
        return (found.gain, found.order, found.best, found.doubt)

    def draws() -> tuple[Any, ...]:
        found = post.draw_functions(3, torch.Generator().manual_seed(4))
        return (found(x), found[1](x[:2]))

    def gradient() -> Tensor:
        place = x.clone().requires_grad_()
        post.predict(place, differentiable=True).mean.sum().backward()
        assert place.grad is not None
        return place.grad

    def increments(found: Any) -> tuple[Any, ...]:
        return (found.likelihood, found.prior, found.curvature, found.total)

    def sensitivity() -> tuple[Any, ...]:
        found = ssla.sensitivity(post, x, (0.1, 10.0))
        return (found.mean, found.stddev, found.mean_change, str(found))

    yield from asked(
        f"{name}, methods",
        {
            "loo": loo,
            "predictive_set": lambda: post.predictive_set(x, 0.8),
            "joint": lambda: tuple(post.joint(x)),
            "draws": draws,
            "explain": explain,
            "explain by variance": lambda: explain(top=3, by="variance", reference=[0.0, 1.0]),
            "label_next": gains,
            "label_next of targets": lambda: gains(targets=x[:2] + 1),
            "ssla": lambda: increments(ssla.ssla(post, x, y)),
            "assla": lambda: increments(ssla.assla(post, x, y)),
            "gradient": gradient,
            "local_sensitivity": lambda: tuple(ssla.local_sensitivity(post, x, y)),
            "sensitivity": sensitivity,
            "conflict": lambda: tuple(ssla.conflict(post)),
            "summary": lambda: str(ssla.metrics.summary(post.predict(x), y)),
            "unknown refit": lambda: post.predict(x, "outputs"),
            "fisher": lambda: post.predict(x, ssla.NoRefit(curvature="fisher")).log_prob(y),
            "empirical": lambda: post.predict(x, ssla.NoRefit(curvature="empirical")).log_prob(y),
            "one step": lambda: post.predict(x, ssla.OutputRefit(steps=1)).log_prob(y),
        },
    )


def kept(name: str, likelihood: Any, module: nn.Module, post: Any, x: Tensor, y: Tensor) -> Answers:
    """Files: saved and loaded, and as columns."""
    with tempfile.TemporaryDirectory(prefix="golden") as folder:
        path = Path(folder) / "posterior"
        custom = {"likelihood": likelihood} if name.startswith("custom") else {}
        yield f"{name}, files: saved", attempt(lambda: files_in(post.save(path)))
        yield from checked(f"{name}, loaded", lambda: ssla.load(path, module, **custom), x, y)

        def columns() -> Any:
            names = ["a", "b"]
            scorer = ssla.Scorer(path, (0.5, 0.9), model=module, inputs=names, **custom)
            return scorer(dict(zip(names, x.T.numpy(), strict=True)))

        yield f"{name}, files: scorer", attempt(columns)


def refitted() -> Answers:
    """Real refits of all weights: dear, so for two rows of a few likelihoods."""
    for name in ("gaussian", "poisson", "categorical"):
        likelihood, outputs, kind = LIKELIHOODS[name]
        module = network(outputs)
        x, y = rows(module, kind, 2, seed=3)
        for gaussian in ("laplace", None):
            post = ssla.fit(
                module, rows(module, kind), likelihood=likelihood, weights="all", gaussian=gaussian
            )
            for refit in ("weights", "auto"):
                found = attempt(lambda: answers(post.predict(x, refit), y))
                parts = found if isinstance(found, dict) else {"error": found}
                case = f"{name}, all weights refitted, {gaussian or 'default'}, {refit}"
                yield from ((f"{case}: {what}", value) for what, value in parts.items())


def exported() -> Answers:
    """Graphs for torch: Gaussian noise and classes (a graph of counts takes half a minute)."""
    for name in ("gaussian estimate", "categorical", "heteroscedastic"):
        likelihood, outputs, kind = LIKELIHOODS[name]
        module = network(outputs)
        x, _ = rows(module, kind, TESTS, seed=3)
        post = ssla.fit(module, rows(module, kind), likelihood=likelihood)

        def run(post: Any = post, x: Tensor = x) -> tuple[Any, ...]:
            with tempfile.TemporaryDirectory(prefix="golden") as folder:
                path = Path(folder) / "model.pt2"
                told = str(post.export(path, levels=(0.1, 0.9)))
                return (told, *torch.export.load(path).module()(x))

        yield f"{name}, exported", attempt(run)


class Named(nn.Module):
    """Two inputs by name, and an answer with two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network(3)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        """Logits and something else."""
        return {"other": left, "logits": self.body(torch.stack([left, right], 1))}


def forms() -> Answers:
    """Forms of data, models, priors and likelihoods that the other cases do not have."""
    module, twelve = network(1), network(12)
    data, (x, y) = rows(module, "real"), rows(module, "real", TESTS, seed=3)
    classes, (u, v) = rows(twelve, "class", 60), rows(twelve, "class", TESTS, seed=3)
    noise, soft = L.Gaussian(noise="estimate"), L.Categorical()
    loader = DataLoader(TensorDataset(*data), batch_size=7)
    arrays = tuple(np.asarray(part) for part in data)
    for structure in ("auto", *STRUCTURES):
        for gaussian in ("laplace", None):
            options = {"likelihood": soft, "structure": structure, "gaussian": gaussian}
            case = f"twelve classes, {structure}, {gaussian or 'default'}"
            yield from checked(case, partial(ssla.fit, twelve, classes, **options), u, v)
    unseen = rows(twelve, "class", 30, seed=9)
    single = network(1).float(), tuple(part.float() for part in data)
    single_classes = network(4).float(), rows(network(4), "class")
    cast = single_classes[1][0].float(), single_classes[1][1]
    yield from checked(
        "twelve classes, kfac, validation",
        lambda: ssla.fit(twelve, classes, likelihood=soft, structure="kfac", validation=unseen),
        u,
        v,
    )
    made = {
        "loader": lambda: ssla.fit(module, loader, likelihood=noise),
        "batches": lambda: ssla.fit(module, list(loader), likelihood=noise),
        "arrays": lambda: ssla.fit(module, arrays, likelihood=noise),
        "float32": lambda: ssla.fit(single[0], single[1], likelihood=noise),
        "float32, all weights": lambda: ssla.fit(
            single[0], single[1], likelihood=noise, weights="all"
        ),
        "float32 student": lambda: ssla.fit(single[0], single[1], likelihood=L.StudentT(4.0, 0.5)),
        "low rank object": lambda: ssla.fit(
            module, data, likelihood=noise, weights="all", structure=ssla.structures.LowRank(rank=4)
        ),
        "prior by layer": lambda: ssla.fit(
            module,
            data,
            likelihood=noise,
            weights="all",
            prior=P.Gaussian({"0": 2.0, "2": 0.5}),
        ),
        "student prior": lambda: ssla.fit(
            module, data, likelihood=noise, prior=P.StudentT(df=4.0, scale=1.0)
        ),
        "torch prior": lambda: ssla.fit(
            module, data, likelihood=noise, prior=torch.distributions.Normal(0.0, 1.0)
        ),
    }
    for what, make in made.items():
        yield from checked(f"forms, {what}", make, x, y)
    more = {
        "float32 classes": (lambda: ssla.fit(single_classes[0], cast, likelihood=soft), 4, "class"),
        "tempered classes": (
            lambda: ssla.fit(twelve, classes, likelihood=L.Categorical(temperature=2.0)),
            12,
            "class",
        ),
        "counts, identity": (
            lambda: ssla.fit(
                _positive(), rows(network(1), "count"), likelihood=L.Poisson(link="identity")
            ),
            1,
            "count",
        ),
        "natural parameters": (
            lambda: ssla.fit(
                network(2),
                rows(network(2), "real"),
                likelihood=L.HeteroscedasticGaussian(parameters="natural"),
            ),
            2,
            "real",
        ),
    }
    for what, (make, outputs, kind) in more.items():
        yield from checked(f"forms, {what}", make, *rows(network(outputs), kind, TESTS, seed=3))
    yield from asked("forms, named parts", {"answers": _named})
    yield from asked("forms, explicit model", {"answers": _explicit})


def _positive() -> nn.Module:
    """A network whose last layer is linear and positive."""
    module = nn.Sequential(network(6), nn.Softplus(), nn.Linear(6, 1).double()).eval()
    with torch.no_grad():
        module[2].weight.fill_(0.3)
        module[2].bias.fill_(0.2)
    return module


def _named() -> tuple[Any, ...]:
    x, y = rows(network(3), "class")
    batch = {"left": x[:, 0], "right": x[:, 1], "labels": y}
    post = ssla.fit(Named().eval(), [batch], likelihood=L.Categorical(), output="logits")
    p = post.predict({"left": x[:3, 0], "right": x[:3, 1]})
    return (p.probs, str(post.report))


def _explicit() -> tuple[Any, ...]:
    model = ssla.ExplicitModel(
        lambda y, t: y * t[0].log() - t[0] - torch.lgamma(y + 1),
        [2.0, 4, 3, 0, 5],
        [3.0],
        P.Gamma(6.0, 2.0, link="identity"),
    )
    found = model.increments([0.0, 3.0, 8.0])
    return (found.likelihood, found.prior, found.curvature, found.total)


def costs() -> Answers:
    """Estimates of memory and time are computed, not measured."""
    module = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 12))
    for weights in ("last_layer", "all"):
        for structure in ("auto", *STRUCTURES):
            options = {"weights": weights, "structure": structure, "gaussian": False, "refits": 10}
            found = ssla.estimate_cost(module, 100_000, **options)
            value = (found.statistics, found.fits, found.seconds, repr(found))
            yield f"cost, {weights}, {structure}", value


def pages() -> Answers:
    """Pages of posteriors; those of estimators are in `estimator_cases`."""
    for name in ("gaussian estimate", "poisson", "categorical"):
        likelihood, outputs, kind = LIKELIHOODS[name]
        module = network(outputs)
        post = ssla.fit(module, rows(module, kind), likelihood=likelihood)
        test = rows(module, kind, 12, seed=3)
        found = attempt(lambda: page_parts(ssla.html_report(post, *test).text))
        parts = found if isinstance(found, dict) else {"error": found}
        yield from ((f"{name}, page: {what}", value) for what, value in parts.items())


def cases() -> Answers:
    """All of the core."""
    for part in (grid, by_defaults, forms, refitted, exported, costs, pages):
        yield from part()
