"""Answers do not depend on the torch contexts that the caller has entered.

Every question is asked outside any context first: these answers are the reference, and they are
compared bit by bit.
"""

import contextlib
import copy
import inspect
import math
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ssla
from ssla import likelihoods as L
from ssla import priors

ROWS, NEW = 24, 2
SCALE = 0.5


def log_prob(y, f):
    """The logistic density around f."""
    z = (y - f[..., 0]) / SCALE
    return -z - 2 * torch.nn.functional.softplus(-z) - math.log(SCALE)


def fisher(f):
    return torch.full_like(f, 1 / (3 * SCALE**2)).unsqueeze(-1)


def mean(f):
    return f[..., 0]


def variance(f):
    return torch.full_like(f[..., 0], (math.pi * SCALE) ** 2 / 3)


LIKELIHOODS = {
    "gaussian": ("real", 1, lambda: L.Gaussian(noise=0.4)),
    "heteroscedastic": ("real", 2, L.HeteroscedasticGaussian),
    "student": ("real", 1, lambda: L.StudentT(df=4.0, scale=0.5)),
    "poisson": ("count", 1, L.Poisson),
    "categorical": ("class", 3, L.Categorical),
    "custom": ("real", 1, lambda: L.custom(log_prob, fisher=fisher, mean=mean, variance=variance)),
}


def trained(name):
    """A network in float32 near its mode under a prior of precision one, with its rows."""
    kind, outputs, likelihood = LIKELIHOODS[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 2, generator=generator)
    signal = (1.5 * x[:, 0]).tanh()
    y = signal + 0.4 * torch.randn(ROWS, generator=generator)
    if kind == "count":
        y = torch.poisson(signal.exp(), generator=generator)
    if kind == "class":
        y = (y > -0.5).long() + (y > 0.5)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            )
    optimiser = torch.optim.LBFGS(
        model.parameters(), max_iter=300, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )

    def loss():
        optimiser.zero_grad()
        total = (
            -likelihood().log_prob(y if kind == "class" else y.double(), model(x.double())).sum()
        )
        total = total + 0.5 * sum((parameter**2).sum() for parameter in model.parameters())
        total.backward()
        return total

    optimiser.step(loss)
    return model.float().eval(), (x, y)


CASES = {name: trained(name) for name in LIKELIHOODS}


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def global_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


CONTEXTS = {
    "none": contextlib.nullcontext,
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "cpu": lambda: torch.device("cpu"),
    "meta": lambda: torch.device("meta"),
    "meta for all": lambda: global_device("meta"),
    "deterministic": deterministic,
}


def answers_of(predictive, y):
    """Every question that a predictive of this kind answers."""
    found = {
        name: getattr(predictive, name)
        for name in ("mean", "variance", "stddev", "mode", "mass", "epistemic", "aleatoric")
    }
    found["log_prob"] = predictive.log_prob(y)
    found["interval"] = predictive.interval(0.9)
    found["hdr"] = predictive.hdr(0.9)
    found["increments"] = predictive.increments(y).total
    found["sample"] = predictive.sample(4, torch.Generator().manual_seed(1))
    if predictive.kind == "class":
        found["probs"] = predictive.probs
    else:
        found["cdf"] = predictive.cdf(y)
        found["icdf"] = predictive.icdf([0.1, 0.5])
    return found


def fitted(name, weights, data=None, **options):
    model, rows = CASES[name]
    likelihood = LIKELIHOODS[name][2]()
    rows = rows if data is None else data
    return ssla.fit(
        model, rows, likelihood=likelihood, prior=priors.Gaussian(1.0), weights=weights, **options
    )


def surface(name, weights):
    """Answers of a posterior and of its predictive, by name."""
    x, y = CASES[name][1]
    new, at = x[:NEW], y[:NEW]
    post = fitted(name, weights)
    found = {f"predict {key}": value for key, value in answers_of(post.predict(new), at).items()}
    found |= {"theta": post.theta, "mean": post.mean, "evidence": post.log_evidence()}
    found |= {
        "marginal": post.marginal(new),
        "joint": post.joint(new),
        "assla": ssla.assla(post, new, at).total,
    }
    draws = post.draw_functions(2, torch.Generator().manual_seed(2))
    found |= {"functions": draws(new), "function": draws[1](new)}
    other = priors.custom(lambda theta: -(theta**2), independent=True)
    found["another prior"] = post.with_prior(other).marginal(new)
    found["update"] = post.update((x[:5], y[:5])).marginal(new)
    loo = post.loo()
    found |= {"loo": loo.log_prob, "loo nll": loo.nll, "loo pit": loo.pit}
    found["set"] = post.predictive_set(new, 0.8)
    reasons = ssla.explain(post, new)
    found |= {"influence": reasons.influence, "split": reasons.split, "inputs": reasons.inputs}
    found["label_next"] = ssla.label_next(post, x[5:9]).gain
    mixed = ssla.mixture([post.predict(new), post.predict(new, "none")])
    return found | {"mixture": mixed.mean, "mixture interval": mixed.interval(0.5)}


def refits(name):
    """Refits of the weights, of a last layer and of all."""
    x, y = CASES[name][1]
    new, at = x[:NEW], y[:NEW]
    found = answers_of(fitted(name, "last_layer").predict(new, "weights"), at)
    return found | {"all weights": ssla.ssla(fitted(name, "all"), new[:1], at[:1]).total}


def choices():
    """What the data choose: prior, noise, the mode of shards."""
    model, (x, y) = CASES["gaussian"]
    post = ssla.fit(model, (x, y), likelihood=L.Gaussian(noise="estimate"))
    found = {
        "chosen": post.predict(x[:NEW]).variance,
        "tuned": post.tune().predict(x[:NEW]).variance,
    }
    parts = [
        fitted("poisson", "all", [part[rows] for part in CASES["poisson"][1]])
        for rows in (slice(12), slice(12, 24))
    ]
    found["merged"] = parts[0].merge(parts[1]).marginal(x[:NEW])
    loader = DataLoader(
        TensorDataset(x, y), batch_size=7, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    return found | {"loader": fitted("gaussian", "last_layer", loader).marginal(x[:NEW])}


def prior_sets():
    x, y = CASES["gaussian"][1]
    post = fitted("gaussian", "last_layer")
    many = ssla.sensitivity(post, x[:NEW], (0.5, 2.0, 3))
    box = ssla.credal(post, x[:1], priors.Box(mean=(-0.5, 0.5), precision=(0.5, 2.0)))
    found = {
        "mean": many.mean,
        "quantiles": many.quantiles([0.1, 0.5]),
        "probability": many.probability((0.0, 1.0)),
    }
    found |= {
        "conflict": ssla.conflict(post),
        "local": ssla.local_sensitivity(post, x[:NEW], y[:NEW]),
    }
    return found | {"bounds": box.mean}


def metrics():
    found = {}
    for name in ("student", "poisson", "categorical"):
        x, y = CASES[name][1]
        predictive = fitted(name, "last_layer").predict(x[:8])
        found[name] = tuple(ssla.metrics.summary(predictive, y[:8]).scores.values())
        if name != "categorical":
            found[f"{name} pit"] = ssla.metrics.pit(
                predictive, y[:8], torch.Generator().manual_seed(0)
            )
    return found


def files(folder):
    pytest.importorskip("safetensors")
    model, (x, _) = CASES["poisson"]
    fitted("poisson", "last_layer").save(folder / "posterior")
    found = {"loaded": ssla.load(folder / "posterior", model).marginal(x[:NEW])}
    columns = ssla.Scorer(folder / "posterior", 0.9, model=model)(x[:NEW].numpy())
    return found | {name: column for name, column in columns.items() if column.dtype.kind in "fi"}


def estimators(folder):
    tables = pytest.importorskip("ssla.sklearn")
    trees = pytest.importorskip("sklearn.tree")
    generator = np.random.default_rng(0)
    X = generator.normal(size=(40, 2))
    y = np.tanh(1.5 * X[:, 0]) + 0.3 * generator.normal(size=40)
    quick = {
        "members": 2,
        "hidden": (4,),
        "max_epochs": 3,
        "random_state": 0,
        "batch_size": 16,
        "trees": 0,
    }
    number = tables.SSLARegressor(**quick).fit(X, y)
    found = {"set": number.predictive_set(X[:3], 0.8), "interval": number.predict_interval(X[:3])}
    number.partial_fit(X[:5], y[:5]).save(folder / "estimator")
    found["loaded"] = tables.load(folder / "estimator").predict(X[:3])
    found["probs"] = tables.SSLAClassifier(**quick).fit(X, y > 0.3).predict_proba(X[:3])
    wrapped = tables.PredictiveRegressor(
        trees.DecisionTreeRegressor(max_depth=2, random_state=0), cv=2, random_state=0
    )
    return found | {"wrapped": wrapped.fit(X, y).predict_quantiles(X[:3])}


def report():
    return {
        "scores": str(
            ssla.html_report(fitted("student", "last_layer"), *CASES["student"][1]).facts["scores"]
        )
    }


def own_model():
    rows = torch.tensor([1.0, 2.0], dtype=torch.float64, device="cpu")
    model = ssla.ExplicitModel(
        lambda y, t: -0.25 * (y - t[0]) ** 2, rows, [4.0], priors.Gaussian(3.0, mean=1.0)
    )
    return {"mode": model.mode, "increments": model.increments([1.5]).total}


def flat(value):
    """The numbers of an answer, in one list of tensors, numbers and texts."""
    if isinstance(value, np.ndarray):
        return [torch.from_numpy(value)]
    if isinstance(value, tuple | list):
        return [item for part in value for item in flat(part)]
    return [value]


def same(found, expected):
    """Every answer has the bits of the reference, and autograd accepts it."""
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        for one, other in zip(flat(found[name]), flat(wanted), strict=True):
            if not isinstance(other, torch.Tensor):
                assert one == other, name
                continue
            assert one.dtype == other.dtype, name
            assert one.device == other.device, name
            assert not one.is_inference(), name
            assert torch.equal(one.nan_to_num(), other.nan_to_num()), name


def compare(ask, contexts=CONTEXTS):
    expected = ask()
    for name in contexts:
        with CONTEXTS[name]():
            found = ask()
        same(found, expected)


LEFT = ("inference_mode", "autocast", "meta")  # the contexts that the library leaves
SLOW = ("inference_mode", "autocast")  # for cases that take a second each


@pytest.mark.parametrize("weights", ["last_layer", "all"])
@pytest.mark.parametrize("name", ["gaussian", "student", "poisson", "categorical", "custom"])
def test_a_posterior_and_its_predictive(name, weights):
    contexts = {"categorical": LEFT, "gaussian": CONTEXTS, "poisson": LEFT}.get(name, SLOW)
    compare(partial(surface, name, weights), contexts)


def test_two_outputs_for_one_target():
    compare(partial(surface, "heteroscedastic", "last_layer"), SLOW)


@pytest.mark.parametrize("name", ["gaussian", "categorical", "custom"])
def test_refits_of_the_weights(name):
    compare(partial(refits, name), SLOW)


@pytest.mark.parametrize("ask", [choices, prior_sets, metrics, report, own_model])
def test_other_public_functions(ask):
    compare(ask, (*LEFT, "no_grad", "float64"))


@pytest.mark.parametrize("ask", [files, estimators])
def test_files_and_estimators(ask, tmp_path):
    compare(partial(ask, tmp_path), (*LEFT, "no_grad", "float64"))


# --- tensors that were made in inference mode ----------------------------------------------


def quadratic(weights, noise, precision):
    """A posterior with everything from outside: module, rows, row weights, noise, prior."""
    model, (x, y) = CASES["gaussian"]
    rows = (x.clone(), y.clone(), torch.ones(ROWS))
    likelihood, prior = L.Gaussian(noise=noise), priors.Gaussian(precision)
    return ssla.fit(copy.deepcopy(model), rows, likelihood=likelihood, prior=prior, weights=weights)


@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_tensors_of_inference_mode_are_accepted(weights):
    size = 4 if weights == "last_layer" else 13

    def settings():
        return torch.full((1,), 0.4, dtype=torch.float64), torch.full(
            (size,), 1.0, dtype=torch.float64
        )

    x, y = (part[:NEW] for part in CASES["gaussian"][1])
    expected = quadratic(weights, *settings())
    with torch.inference_mode():
        given = settings()
        new, at = x.clone(), y.clone()
        found = quadratic(weights, *given)
    for post in (found, quadratic(weights, *given)):
        for ask in (
            lambda post, x, y: ssla.ssla(post, x, y).total,
            lambda post, x, y: post.predict(x).log_prob(y),
            lambda post, x, y: ssla.explain(post, x).split.doubt,
        ):
            assert torch.equal(ask(post, new, at), ask(expected, x, y))
    gradients = []
    for start in (x, new):
        free = start.clone().requires_grad_(True)
        post = expected if start is x else found
        gradients += torch.autograd.grad(
            post.predict(free, differentiable=True).variance.sum(), free
        )
    assert torch.equal(*gradients)


def test_a_network_of_inference_mode_is_accepted():
    model, rows = CASES["poisson"]
    with torch.inference_mode():
        copied = copy.deepcopy(model)
    assert all(parameter.is_inference() for parameter in copied.parameters())
    found, expected = (
        ssla.fit(one, rows, likelihood=L.Poisson(), prior=priors.Gaussian(), weights="all")
        for one in (copied, model)
    )
    assert torch.equal(found.predict(rows[0]).mean, expected.predict(rows[0]).mean)


def test_a_function_with_a_tensor_of_inference_mode_is_refused_with_its_name():
    _, (x, y) = CASES["gaussian"]
    with torch.inference_mode():
        scale = torch.tensor(0.5)

    def density(y, f):
        return log_prob(y, f * scale)

    likelihood = L.custom(density, fisher=fisher, mean=mean, variance=variance)
    with pytest.raises(
        ValueError, match=r"log_prob of the likelihood uses a tensor .*inference_mode.*clone"
    ):
        ssla.fit(CASES["gaussian"][0], (x, y), likelihood=likelihood, prior=priors.Gaussian())
    prior = priors.custom(lambda theta: -((theta * scale) ** 2), independent=True)
    with pytest.raises(
        ValueError, match=r"log_prob of the prior uses a tensor .*inference_mode.*clone"
    ):
        fitted("gaussian", "last_layer").with_prior(prior)


# --- derivatives ---------------------------------------------------------------------------


def test_derivatives_of_a_custom_density_in_inference_mode():
    """The oracle: the logistic density has score tanh(z/2)/s and precision (1 − tanh²(z/2))/2s²."""
    y, f = (
        torch.tensor([0.3, -2.0], dtype=torch.float64),
        torch.tensor([[0.1], [0.4]], dtype=torch.float64),
    )
    half = ((y - f[:, 0]) / SCALE / 2).tanh()
    bound = priors.custom(lambda theta: -(theta**2), independent=True).bind(
        fitted("gaussian", "last_layer").network.layout
    )
    theta = torch.arange(4.0, dtype=torch.float64)
    for context in LEFT:
        with CONTEXTS[context]():
            found = L.custom(log_prob).derivatives(y, f)
            slopes = bound.gradient(theta), bound.precision(theta)
        torch.testing.assert_close(found.score[:, 0], half / SCALE, rtol=1e-12, atol=0)
        torch.testing.assert_close(
            found.precision[:, 0, 0], (1 - half**2) / (2 * SCALE**2), rtol=1e-12, atol=0
        )
        assert torch.equal(slopes[0], -2 * theta)
        assert torch.equal(slopes[1], torch.full_like(theta, 2.0))


def test_differentiable_answers():
    """As under no_grad: the numbers, without a graph.

    Under automatic casts with the gradient of the reference.
    """
    post = fitted("student", "all")
    x = CASES["student"][1][0][:NEW].clone().requires_grad_(True)

    def slope(name):
        with CONTEXTS[name]():
            total = post.predict(x, differentiable=True).mean.sum()
        return torch.autograd.grad(total, x)[0]

    for name in ("autocast", "meta"):
        assert torch.equal(slope(name), slope("none"))
    for name in ("inference_mode", "no_grad"):
        with CONTEXTS[name]():
            plain = post.predict(x, differentiable=True).mean
        assert not plain.requires_grad
        torch.testing.assert_close(plain, post.predict(x.detach()).mean)
    assert x.grad is None


# --- the contexts of the caller ------------------------------------------------------------


def state():
    casts = tuple(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    mode = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    return (
        *casts,
        *mode,
        torch.get_default_device(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )


@pytest.mark.parametrize("name", CONTEXTS)
def test_the_context_is_as_before_after_an_answer_and_after_an_error(name):
    post = fitted("gaussian", "last_layer")
    outside = state()
    with CONTEXTS[name]():
        before = state()
        assert post.predict(CASES["gaussian"][1][0]).interval(0.9).shape == (ROWS, 2)
        assert state() == before
        with pytest.raises(ValueError, match="level"):
            post.predict(CASES["gaussian"][1][0]).interval(2.0)
        assert state() == before
    assert state() == outside


class Recording(nn.Module):
    """Keeps the default device that its forward sees."""

    def __init__(self, seen):
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.seen = seen

    def forward(self, x):
        self.seen.append(torch.get_default_device())
        return self.linear(x)

    def __deepcopy__(self, _):
        return Recording(self.seen)


@pytest.mark.parametrize(
    ("given", "expected"), [("cuda:0", "cuda:0"), ("meta", "cpu"), ("cpu", "cpu")]
)
def test_the_callers_code_has_the_callers_default_device(given, expected):
    """A forward that makes positions, and a sampler with a generator, may rely on it.

    On "meta" neither could work.
    """
    seen = []
    x, y = CASES["gaussian"][1]

    class Batches:
        def __iter__(self):
            seen.append(torch.get_default_device())
            yield x, y

    model = Recording(seen).eval()
    with torch.device(given):
        ssla.fit(
            model, Batches(), likelihood=L.Gaussian(noise=0.4), prior=priors.Gaussian()
        ).predict(x)
    assert {str(device) for device in seen} == {expected}


def test_tensors_without_values_are_refused():
    x, y = CASES["gaussian"][1]
    post = fitted("gaussian", "last_layer")
    with pytest.raises(ValueError, match=r"device 'meta'.* no values"):
        post.predict(x.to("meta"))
    with pytest.raises(ValueError, match=r"device 'meta'.* no values"):
        post.predict(x).log_prob(y.to("meta"))
    with pytest.raises(ValueError, match=r"'0.weight' is on the device 'meta'.* no values"):
        ssla.fit(
            copy.deepcopy(CASES["gaussian"][0]).to("meta"), (x, y), likelihood=L.Gaussian(noise=0.4)
        )


def test_signatures_and_documentation_are_those_of_the_functions():
    assert list(inspect.signature(ssla.fit).parameters)[:3] == ["model", "data", "likelihood"]
    assert list(inspect.signature(ssla.Posterior.predict).parameters) == [
        "self",
        "x",
        "refit",
        "differentiable",
    ]
    assert "predictive distribution of y at x" in ssla.Posterior.predict.__doc__
    assert "epistemic + aleatoric" in ssla.Predictive.variance.__doc__
    assert ssla.Posterior.mean.fget.__name__ == "mean"
    assert pickle.loads(pickle.dumps(ssla.fit)) is ssla.fit
    assert pickle.loads(pickle.dumps(ssla.metrics.nll)) is ssla.metrics.nll
    post = fitted("gaussian", "last_layer")
    again = pickle.loads(pickle.dumps(post))
    assert torch.equal(again.theta, post.theta)
    with pytest.raises(AttributeError, match="probs"):
        _ = post.predict(CASES["gaussian"][1][0]).probs


def test_warnings_point_at_the_line_of_the_caller():
    model, (x, y) = CASES["gaussian"]
    with torch.inference_mode(), pytest.warns(UserWarning, match=r"docs/failures\.md") as caught:
        ssla.fit(model, (x[:1], y[:1]), likelihood=L.Gaussian(noise=0.4), prior=priors.Gaussian())
    assert {warning.filename for warning in caught} == {__file__}
