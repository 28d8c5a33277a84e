"""Every error says what was expected, what was given and what to do; nothing is changed."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import ssla
from ssla import likelihoods as L
from ssla import priors, structures

G = L.Gaussian(noise=0.5)
X, Y = (
    torch.randn(20, 3, generator=torch.Generator().manual_seed(0)),
    torch.randn(20, generator=torch.Generator().manual_seed(1)),
)


def net(*layers, outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), *(layers or (nn.ReLU(),)), nn.Linear(4, outputs)).eval()


def spoiled(values, index, value):
    out = values.clone()
    out[index] = value
    return out


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(x + torch.randn_like(x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, 3)
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.table(x))


class BatchMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(x - x.mean(0))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(x), x


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += 1
        return self.head(x)


class NoGradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()

    @torch.no_grad()
    def forward(self, x):
        return self.inner(x)


def broken():
    model = net()
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    return model


def with_buffer(value, norm=False):
    """A module with a buffer of its own, or with this variance in its batch norm."""
    model = net(nn.BatchNorm1d(4))
    if norm:
        model[1].running_var[0] = value
    else:
        model.register_buffer("bound", torch.tensor([0.0, value]))
    return model


def wide_network():
    """A row of its results takes far more than its last bias."""
    return nn.Sequential(nn.Linear(3, 400), nn.Tanh(), nn.Linear(400, 1))


def fit(model=None, data=(X, Y), likelihood=G, **options):
    return ssla.fit(net() if model is None else model, data, likelihood=likelihood, **options)


CASES = {
    "NaN in x": (lambda: fit(data=(spoiled(X, (3, 1), math.nan), Y)), r"x must be finite, but 1 of 60.*\[3, 1\].*impute"),
    "infinite y": (lambda: fit(data=(X, spoiled(Y, 2, math.inf))), r"y must be finite.*\[2\].*Drop or impute"),
    "NaN buffer": (lambda: fit(with_buffer(math.nan)), r"Buffer 'bound' must not have NaN, but 1 of its values are.*train it again"),
    "infinite variance of a norm": (lambda: fit(with_buffer(math.inf, True)), r"Buffer '1.running_var' must be finite.*again"),
    "NaN parameter": (lambda: fit(broken()), r"'0.weight' must be finite.*train it again"),
    "rows differ": (lambda: fit(data=(X, Y[:19])), r"x has 20 rows, but y has shape \(19,\)"),
    "wrong columns": (lambda: fit(data=(X[:, :2], Y)), r"failed on the inputs.*\(20, 2\).*number of columns"),
    "y with two columns": (lambda: fit(data=(X, torch.randn(20, 2))), r"y must have shape \(N,\) or \(N, 1\).*\(20, 2\)"),
    "empty arrays": (lambda: fit(data=(X[:0], Y[:0])), "data are empty"),
    "empty loader": (lambda: fit(data=[]), "data are empty.*drop_last"),
    "one row and no noise": (lambda: fit(data=(X[:1], Y[:1]), likelihood=L.Gaussian(noise="estimate")), "noise cannot be estimated: there is only one row"),
    "constant target": (lambda: fit(nn.Linear(3, 1), (X, torch.zeros(20)), L.Gaussian(noise="estimate")), "noise cannot be estimated.*constant"),
    "count below zero": (lambda: fit(data=(X, Y), likelihood=L.Poisson()), r"y must hold counts 0, 1, 2.*the first is .* in row"),
    "class too high": (lambda: fit(net(outputs=3), (X, torch.arange(20)), L.Categorical()), r"integers from 0 to 2.*the first is 3 in row 3"),
    "one-hot classes": (lambda: fit(net(outputs=3), (X, torch.eye(3)[torch.arange(20) % 3]), L.Categorical()), r"one-hot.*y.argmax\(1\)"),
    "target not positive": (lambda: fit(data=(X, Y), likelihood=L.custom(lambda y, f: -y / f[..., 0].exp() - f[..., 0], support="positive")), "numbers above zero"),
    "dropout in training": (lambda: fit(net(nn.Dropout(0.5)).train()), r"training mode and has dropout.*random. Call model.eval\(\) first"),
    "batch norm in training": (lambda: fit(net(nn.BatchNorm1d(4)).train()), r"training mode and has batch norm.*Call model.eval\(\) first"),
    "random module": (lambda: fit(Noisy()), r"different outputs for the same input.*eval"),
    "rows that interact": (lambda: fit(BatchMean()), "depends on the other rows"),
    "buffers that change": (lambda: fit(Counter()), r"changes its buffers in forward \(seen\)"),
    "two results": (lambda: fit(Pair()), "must return one tensor.*tuple with the tensors 0, "
                                         "1.*output=0"),
    "not a module": (lambda: fit(model="net.pt"), "must be a torch.nn.Module, but is a str"),
    "softmax at the end": (lambda: fit(nn.Sequential(nn.Linear(3, 2), nn.Softmax(1)), (X, (Y > 0).long()), L.Categorical()), "something comes after it.*raw outputs of a final nn.Linear"),
    "no linear layer": (lambda: fit(nn.Bilinear(3, 3, 1), ((X, X), Y)), "no linear layer was "
                                                                        "called.*weights='all'"),
    "weight norm": (lambda: fit(nn.Sequential(nn.Linear(3, 4), weight_norm(nn.Linear(4, 1)))), "computed from other parameters"),
    "tied last layer": (lambda: fit(Tied(), (torch.arange(3).repeat(7)[:20], torch.arange(20) % 3), L.Categorical()), "'table.weight'|'head.weight'.*tied to"),
    "unknown parameter": (lambda: fit(weights=["2.wieght"]), r"Unknown parameter '2.wieght'. Did you mean '2.weight'\?"),
    "unknown scope": (lambda: fit(weights="last_layers"), r"Unknown weights 'last_layers'. Did you mean 'last_layer'\?"),
    "a parameter as a string": (lambda: fit(weights="2.weight"), r"names a parameter. For that parameter alone write weights=\['2.weight'\]"),
    "no names": (lambda: fit(weights=[]), "empty list"),
    "outputs do not fit": (lambda: fit(likelihood=L.HeteroscedasticGaussian()), r"needs a network with 2 outputs \(mean and log variance\), but this one has 1"),
    "one logit for classes": (lambda: fit(data=(X, (Y > 0).long()), likelihood=L.Categorical()), r"at least two.*Bernoulli\(\)"),
    "noise for other outputs": (lambda: fit(likelihood=L.Gaussian(noise=torch.ones(3))), "noise for 3 outputs, but the network has 1"),
    "rate below zero": (lambda: fit(data=(X, Y.abs().round()), likelihood=L.Poisson(link="identity"), prior=priors.Gaussian()), "needs positive outputs.*link='log'"),
    "natural parameter above zero": (lambda: fit(net(outputs=2), likelihood=L.HeteroscedasticGaussian("natural")), "negative second output.*mean_log_variance"),
    "zero noise": (lambda: L.Gaussian(noise=0.0), "noise must be positive.*standard deviation"),
    "noise missing": (lambda: L.Gaussian(), "exactly one of them"),
    "noise misspelt": (lambda: L.Gaussian(noise="estmate"), '"estimate"'),
    "covariance not symmetric": (lambda: L.Gaussian(covariance=torch.tensor([[1.0, 2.0], [0.0, 1.0]])), "symmetric and positive definite"),
    "negative precision": (lambda: priors.Gaussian(precision=-1.0), r"prior precision must be positive.*Flat\(\)"),
    "flat prior, constant column": (lambda: fit(nn.Linear(3, 1), (X * torch.tensor([1.0, 1.0, 0.0]), Y), prior=priors.Flat()), "not positive definite.*constant or repeated input column.*Remedy"),
    "flat prior, few rows": (lambda: fit(data=(X[:3], Y[:3]), prior=priors.Flat()), "not positive definite.*fewer independent rows"),
    "unknown mode": (lambda: fit(mode="polisch"), r"Unknown mode 'polisch'. Did you mean 'polish'\?"),
    "unknown structure": (lambda: fit(structure="desne"), r"Did you mean 'dense'\?"),
    "unknown refit": (lambda: fit().predict(X, refit="outputs"), r"Unknown refit 'outputs'. Did you mean 'output'\?"),
    "unknown curvature": (lambda: ssla.NoRefit(curvature="observd"), r"Did you mean 'observed'\?"),
    "two steps": (lambda: ssla.OutputRefit(steps=2), "steps must be None"),
    "NaN at predict": (lambda: fit().predict(spoiled(X, (0, 0), math.nan)), "x must be finite"),
    "level in percent": (lambda: fit().predict(X).interval(95), "level must be strictly between 0 "
                                                                "and 1, but is 95. For 95% write "
                                                                "0.95"),
    "quantile above one": (lambda: fit().predict(X).icdf(1.5), "probabilities between 0 and 1"),
    "y of another length": (lambda: fit().predict(X).log_prob(Y[:7]), r"y must be a number, \(20,\)"),
    "negative weights": (lambda: fit(data=(X, Y, -torch.ones(20))), "Row weights must be finite "
                                                                    "and not negative"),
    "weights of another length": (lambda: fit(data=(X, Y, torch.ones(3))), r"Row weights must have shape \(20,\)"),
    "all weights zero": (lambda: fit(data=(X, Y, torch.zeros(20))), "All row weights are zero"),
    "a bare tensor": (lambda: fit(data=X), "data is a Tensor.*Give a DataLoader"),
    "batches without targets": (lambda: fit(data=[X, X, X, X]), r"Each batch must be \(x, y\)"),
    "text": (lambda: fit(data=([["a", "b", "c"]] * 20, Y)), "Expected numbers.*Encode text"),
    "likelihood by name": (lambda: fit(likelihood="gaussian"), "must be an object such as "
                                                               "ssla.likelihoods.Gaussian"),
    "generator read twice": (lambda: fit(data=((X, Y.abs().round()) for _ in range(1)), likelihood=L.Poisson(), memory_budget=1700), "can be read only once"),
    "everything beyond the budget": (lambda: fit(weights="all", memory_budget=100), r"needs 13.1 KiB, more than the memory budget of 100 B. Use fewer weights"),
    "kfac beyond the budget": (lambda: fit(weights="all", structure="kfac", memory_budget=2500), r"structure='kfac' with 21 free .* Use structure='diag'"),
    "a row beyond the budget": (lambda: fit(wide_network(), weights=["2.bias"], structure="diag", memory_budget=500), r"One row of the network.s intermediate results takes .* than the memory budget of 500 B"),
    "rank of nothing": (lambda: structures.LowRank(rank=0), r"LowRank\(rank=…\) must be a positive integer or None, but is 0"),
    "tail of everything": (lambda: structures.LowRank(tail=1.0), r"LowRank\(tail=…\) must be between 0 and 1"),
    "dense beyond the budget": (lambda: fit(weights="all", memory_budget=2500), r"needs 13.1 KiB, more than the memory budget of 2.44 KiB. Use structure='diag' \(1.97 KiB\), or"),
    "custom of the wrong shape": (lambda: fit(likelihood=L.custom(lambda y, f: -(f**2))), r"must return one value for each y.*f\[\.\.\., 0\]"),
    "custom support": (lambda: L.custom(lambda y, f: y, support="reals"), r"Did you mean 'real'\?"),
    "tempered estimate": (lambda: fit(likelihood=L.Tempered(L.Gaussian(noise="estimate"), 0.5)), "give the base's noise as a number"),
    "unresolved noise": (lambda: L.Gaussian(noise="estimate").log_prob(Y, X[:, :1]), "no value "
                                                                                     "yet: "
                                                                                     "ssla.fit "
                                                                                     "estimates it"),
    "other columns at predict": (lambda: fit().predict(X[:, :2]), r"x must have shape \(N, 3\) as at fit, but one row of it is \(2,\)"),
    "other parts at predict": (lambda: fit().predict((X, X)), r"parts it had at fit \(x\), but has \(x\[0\], x\[1\]\)"),
    "a likelihood's class": (lambda: fit(likelihood=L.Poisson), r"is the class Poisson. Write Poisson\("),
    "a number for a prior": (lambda: fit(prior=1.0), "prior must be an object such as"),
    "no structure": (lambda: fit(structure=None), "structure must be one of 'dense'"),
    "no refit": (lambda: fit().predict(X, refit=None), "refit must be one of"),
    "a refit's class": (lambda: fit().predict(X, refit=ssla.NoRefit), "refit must be one of"),
    "budget in words": (lambda: fit(memory_budget="1GB"), "memory_budget must be a number of bytes"),
    "gradients cut off": (lambda: fit(NoGradient(), weights="all"), "free parameters is "
                                                                    "zero.*no_grad"),
    "Cauchy": (lambda: L.StudentT(df=1.0, scale=1.0), "df must exceed 1"),
    "custom without a function": (lambda: L.custom("gaussian"), "log_prob must be a function"),
    "refit of a generator's data": (lambda: fit(data=((X, Y) for _ in range(1))).predict(X, refit=ssla.WeightRefit(logdet="frozen")).increments(Y), r"came from a generator, which can be read only once. Give all the data of the fit: refit=ssla.WeightRefit\(data="),
    "refit on fewer rows": (lambda: ssla.ssla(fit(), X, Y, ssla.WeightRefit(data=(X[:9], Y[:9]))), "data to refit on have 9 rows, but the posterior was fitted on 20"),
    "refit on other data": (lambda: ssla.ssla(fit(), X, Y, ssla.WeightRefit(data=(X, Y + 9))), "not those of the fit: the log likelihood's gradient.*Give the data of the fit"),
    "refit without data": (lambda: ssla.ssla(replace(fit(), source=None), X, Y), "does not hold them.*loaded from a file.*WeightRefit"),
    "refit tolerance": (lambda: ssla.WeightRefit(tolerance=0.0), "tolerance must be a number "
                                                                 "between 0 and 1"),
    "refit steps": (lambda: ssla.WeightRefit(max_steps=2.5), "max_steps must be a whole number "
                                                             "from 1"),
    "refit curvature": (lambda: ssla.WeightRefit(curvature="hesian"), r"Did you mean 'hessian'\?"),
    "refit logdet": (lambda: ssla.WeightRefit(logdet="exakt"), r"Did you mean 'exact'\?"),
    "refit failure": (lambda: ssla.WeightRefit(on_failure="rise"), r"Did you mean 'raise'\?"),
    "structure of a last layer": (lambda: ssla.ssla(fit(), X, Y, ssla.WeightRefit(logdet="structure")), "logdet='structure' is for weights='all'"),
    "Hessian of many weights": (lambda: ssla.ssla(fit(nn.Sequential(nn.Linear(3, 150), nn.Tanh(), nn.Linear(150, 1)), weights="all", structure="diag"), X, Y, ssla.WeightRefit(curvature="hessian")), "at most 500 weights, but this posterior has 751.*curvature='observed'"),
    "vector target on a network": (lambda: fit(net(outputs=2), (X, torch.stack([Y, Y], 1)), weights="all").predict(X, refit="weights"), r"no closed form for a vector target.*ssla.ssla\(posterior, x, y\)"),
    "auto target": (lambda: ssla.AutoRefit(target=-1.0), "target must be a number above zero"),
    "auto weights": (lambda: ssla.AutoRefit(weights="weights"), "weights must be a WeightRefit"),
    "ssla of a model": (lambda: ssla.ssla(net(), X, Y), "first argument must be a Posterior"),
    "ssla of other rows": (lambda: ssla.ssla(fit(), X, Y[:7]), r"y must have shape \(20,\) with one value for each input"),
    "ssla outside the support": (lambda: ssla.assla(fit(data=(X, Y.abs().round()), likelihood=L.Poisson()), X, Y), "y must hold counts"),
    "predict without a posterior": (lambda: ssla.predictive.predict(net(), X), "needs a "
                                                                               "Posterior, as "
                                                                               "ssla.fit returns "
                                                                               "it"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_message(case):
    make, message = CASES[case]
    x, y = X.clone(), Y.clone()
    with pytest.raises((ValueError, TypeError), match=message):
        make()
    assert torch.equal(x, X)
    assert torch.equal(y, Y)


def test_one_row_with_known_noise_is_fitted_and_warned_about():
    with pytest.warns(UserWarning, match="one row only"):
        post = fit(data=(X[:1], Y[:1]), prior=priors.Gaussian())
    assert "only one row" in str(post.report)
    assert torch.isfinite(post.predict(X).stddev).all()


def test_constant_columns_and_targets_are_reported():
    post = fit(data=(X * torch.tensor([1.0, 0.0, 1.0]), Y), prior=priors.Gaussian())
    assert "constant input columns: 1" in str(post.report)
    with pytest.warns(UserWarning, match="target is constant"):
        fit(data=(X, torch.ones(20)), prior=priors.Gaussian())


def test_an_error_in_the_middle_leaves_the_module_alone():
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="y must be finite"):
        fit(model, [(X, Y), (X, spoiled(Y, 0, math.nan))])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_interrupt_passes_through_and_leaves_the_module_alone():
    def batches():
        yield X, Y
        raise KeyboardInterrupt

    model = net()
    keys = {name: set(vars(m)) for name, m in model.named_modules()}
    with pytest.raises(KeyboardInterrupt):
        fit(model, batches())
    assert keys == {name: set(vars(m)) for name, m in model.named_modules()}


def test_a_prior_too_strong_for_the_targets_is_warned_about():
    """A network that is right about targets around 50 must not be lost silently to a standard
    normal prior.
    """
    x = torch.linspace(-2, 2, 80)[:, None]
    y = 50 + 10 * x[:, 0] + torch.randn(80, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(10.0)
        model.bias.fill_(50.0)
    for likelihood in (L.Gaussian(noise="estimate"), L.Gaussian(noise=10.0)):
        with pytest.warns(
            UserWarning,
            match=r"polish moved the network away.*residuals grew by a factor of.*mode='tilt'",
        ):
            ssla.fit(model, (x, y), likelihood=likelihood, prior=priors.Gaussian(), mode="polish")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # far from the mode of this prior
            kept = ssla.fit(model, (x, y), likelihood=likelihood, prior=priors.Gaussian())
        assert kept.report.mode == "tilt"
    weak = ssla.fit(
        model,
        (x, y),
        likelihood=L.Gaussian(noise="estimate"),
        prior=priors.Gaussian(precision=1e-4),
        mode="polish",
    )
    assert abs(weak.likelihood.noise - 1) < 0.3


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e6])
def test_targets_of_any_scale(scale):
    """With a prior that fits the scale of the weights the answer scales with the targets."""
    x = torch.randn(60, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = x[:, 0] + 0.3 * torch.randn(
        60, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    one = ssla.fit(model, (x, y), likelihood=L.Gaussian(noise="estimate"), prior=priors.Gaussian())
    scaled = ssla.fit(
        model,
        (x, scale * y),
        likelihood=L.Gaussian(noise="estimate"),
        prior=priors.Gaussian(1 / scale**2),
    )
    assert torch.allclose(scaled.predict(x).stddev / scale, one.predict(x).stddev, rtol=1e-6)
