"""What used to end in an error of torch's own: integers, lengths, no rows, parallel and
compiled modules, answers in parts.
"""

import subprocess
import sys
import types
import warnings
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors, structures
from ssla.predictive import affine
from support.cases import CASES

RUNGS = ("plug_in", "none", "newton", "output", "weights", "auto")
FIT = {"likelihood": L.Gaussian(noise=0.5), "prior": priors.Gaussian(precision=3.0)}


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = numbers(30, 3), numbers(30, seed=1)


def net(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double().eval()


# --- integers ------------------------------------------------------------------------------


class Tokens(nn.Module):
    """Mean of embeddings of ids (N, T), then a hidden layer used at every place: a Kronecker
    form with T places.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.inner, self.head = nn.Embedding(6, 4), nn.Linear(4, 3), nn.Linear(3, 1)
        self.double()

    def forward(self, ids):
        return self.head(torch.tanh(self.inner(self.table(ids))).mean(1))


class IdsAndNumbers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(7, 1)
        self.double()

    def forward(self, ids, x):
        return self.head(torch.cat([self.table(ids), x], 1))


class Scaled(nn.Module):
    """Takes integers as well as fractions."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1).double()

    def forward(self, x):
        return self.head(x.double() / 255)


@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_integers_at_predict_are_cast_to_the_models_dtype(weights):
    post = ssla.fit(net(), (X, Y), weights=weights, **FIT)
    whole = torch.arange(12).reshape(4, 3)
    expected = post.predict(whole.double())
    for x in (whole, whole.int(), whole.tolist(), whole.numpy()):
        assert torch.equal(post.predict(x).variance, expected.variance)
    assert torch.equal(
        post.predict(whole % 2 == 0).mean, post.predict((whole % 2 == 0).double()).mean
    )


def test_integers_stay_integers_where_they_were_at_fit():
    ids = torch.arange(120).reshape(30, 4) % 6
    post = ssla.fit(Tokens(), (ids, Y), **FIT)
    expected = post.predict(ids[:5]).mean
    for x in (ids[:5].int(), ids[:5].double(), ids[:5].float()):
        assert torch.equal(post.predict(x).mean, expected)
    with pytest.raises(
        ValueError,
        match=r"failed on the inputs x \(N, 4\) of torch.float64.*indices are whole numbers",
    ):
        post.predict(ids[:5] + 0.5)
    with pytest.raises(
        ValueError,
        match=r"failed on the inputs x \(N, 4\) of torch.int64: index out of range.*their emb",
    ):
        post.predict(ids[:5] + 3)
    both = ssla.fit(IdsAndNumbers(), ((ids[:, 0], X), Y), **FIT)
    mixed = both.predict((ids[:2, 0], torch.ones(2, 3, dtype=torch.long))).mean
    assert torch.equal(
        mixed, both.predict((ids[:2, 0], torch.ones(2, 3, dtype=torch.float64))).mean
    )


def test_fractions_are_kept_where_the_module_took_integers_at_fit_and_takes_both():
    post = ssla.fit(Scaled(), ((100 * X).long(), Y), **FIT)
    assert not torch.equal(post.predict(X[:2] + 0.5).mean, post.predict(X[:2].round()).mean)


# --- lengths -------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["dense", "kfac", "diag", "low_rank"])
@pytest.mark.parametrize("weights", ["last_layer", "all", ["inner.weight", "head.weight"]])
def test_sequences_of_several_lengths_are_summed_and_predicted(structure, weights):
    long, short = torch.arange(96).reshape(12, 8) % 6, torch.arange(54).reshape(18, 3) % 6
    batches = [(long, Y[:12]), (short, Y[12:])]
    fit = lambda data: ssla.fit(
        Tokens(), data, weights=weights, structure=structure, mode="tilt", **FIT
    )
    post = fit(batches)
    apart = fit(batches[:1]).merge(fit(batches[1:]))  # each length by itself
    assert torch.allclose(post.statistics.gradient, apart.statistics.gradient, atol=1e-12)
    probe = numbers(post.theta.numel(), seed=5)
    S, S_apart = (p.statistics.curvature.push(probe) for p in (post, apart))
    assert torch.allclose(S, S_apart, atol=1e-10 * float(S.abs().max()))
    other = torch.arange(25).reshape(5, 5) % 6
    assert torch.equal(post.predict(other).mean, post.predict(other.double()).mean)
    assert post.marginal(other).covariance.shape == (5, 1, 1)


def test_kfac_over_several_lengths_counts_every_place_once():
    """A and G by hand: sums over rows and places, divided by the number of places of all rows
    together.
    """
    long, short = torch.arange(96).reshape(12, 8) % 6, torch.arange(54).reshape(18, 3) % 6
    model = Tokens()
    post = ssla.fit(
        model,
        [(long, Y[:12]), (short, Y[12:])],
        weights="all",
        structure="kfac",
        mode="tilt",
        **FIT,
    )
    a, d = [], []
    for ids in (long, short):
        for row in ids:
            at = model.table(row).detach()
            before = model.inner(at).detach().requires_grad_(True)
            model.head(torch.tanh(before).mean(0)).backward()
            a.append(torch.cat([at, torch.ones(len(at), 1, dtype=torch.float64)], 1))
            d.append(before.grad)
    a, d = torch.cat(a), torch.cat(d)
    factors = next(f for f in post.statistics.curvature.layers if f.A.shape == (5, 5))
    assert torch.allclose(factors.A, a.mT @ a, atol=1e-10)
    assert torch.allclose(factors.G, d.mT @ d / 0.25, atol=1e-10)
    assert factors.count == len(a) == 12 * 8 + 18 * 3


class Signal(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv1d(2, 3, 3).double(), nn.Linear(3, 1).double()

    def forward(self, x):
        return self.head(torch.tanh(self.conv(x)).mean(2))


@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_signals_of_several_lengths_are_fitted_predicted_and_refitted(weights):
    likelihood, data = (
        L.StudentT(df=4.0, scale=0.5),
        [(numbers(20, 2, 9), Y[:20]), (numbers(10, 2, 6), Y[20:])],
    )
    post = ssla.fit(
        Signal(),
        data,
        weights=weights,
        mode="polish",
        likelihood=likelihood,
        prior=priors.Gaussian(precision=20.0),
        gaussian="laplace",
    )
    x = numbers(2, 2, 12, seed=4)
    assert post.predict(x, refit="weights").diagnostics.rung == ("weights", "weights")
    with pytest.raises(
        ValueError, match=r"failed on the inputs x \(N, 2, 2\).*At fit they were x \(N, 2, 9\)"
    ):
        post.predict(numbers(2, 2, 2))


def test_columns_are_no_length():
    post = ssla.fit(net(), (X, Y), **FIT)
    for columns in (1, 2, 4):
        with pytest.raises(
            ValueError, match=r"x must have shape \(N, 3\) as at fit, but one row of it is \(\d,\)"
        ):
            post.predict(numbers(2, columns))
    with pytest.raises(
        ValueError,
        match=r"must have shape \(N, 3\) as at fit.*\(N, 1, length\), the length may vary",
    ):
        ssla.fit(net(), [(X, Y), (X[:, :1], Y)], **FIT)


# --- no rows -------------------------------------------------------------------------------


def targets(likelihood, outputs):
    support = likelihood.support_for(outputs)
    if support.kind == "class":
        return torch.arange(30) % support.count
    if support.kind == "vector":
        return numbers(30, outputs)
    return (torch.arange(30) % 4).double() if support.kind == "count" else Y.abs() + 0.1


def fitted(name, weights):
    likelihood, f, _ = CASES[name]
    model = net(f.shape[1])
    with torch.no_grad():
        if name in ("natural", "scaled natural", "poisson identity"):  # outputs inside their domain
            model[2].weight.mul_(0.01)
            model[2].bias.copy_(torch.tensor([0.0, -1.0] if "natural" in name else [3.0]))
    return ssla.fit(
        model,
        (X, targets(likelihood, f.shape[1])),
        likelihood=likelihood,
        prior=priors.Gaussian(),
        gaussian="laplace",
        weights=weights,
        mode="tilt",
    )


def answers(predictive, kind, outputs):
    """Everything that a predictive can be asked -> the shape of the answer, and the shape that
    it must have for no rows.
    """
    vector, probs = kind == "vector", kind == "class"
    y = torch.empty(0, outputs) if vector else torch.empty(0)
    each = (0, outputs) if vector else (0,)
    mean = tuple(predictive.probs.shape) if probs and predictive.mean.dim() == 2 else each
    for what in ("mean", "variance", "stddev", "epistemic", "aleatoric"):
        yield what, getattr(predictive, what).shape, mean
    yield "mode", predictive.mode.shape, each
    yield "mass", predictive.mass.shape, (0,)
    yield "log_prob", predictive.log_prob(y).shape, (0,)
    yield (
        "log_prob of two",
        predictive.log_prob(y.unsqueeze(1).expand(0, 2, *y.shape[1:])).shape,
        (0, 2),
    )
    yield "sample", predictive.sample(5, torch.Generator().manual_seed(0)).shape, (5, *each)
    if probs:
        yield "probs", predictive.probs.shape, (0, predictive.probs.shape[1])
        yield "interval", predictive.interval(0.9).shape, predictive.probs.shape
        yield "hdr", predictive.hdr(0.9).shape, predictive.probs.shape
        return
    yield "interval", predictive.interval(0.9).shape, (*each, 2)
    yield "icdf", predictive.icdf(0.5).shape, each
    yield "icdf of three", predictive.icdf((0.1, 0.5, 0.9)).shape, (*each, 3)
    yield "cdf", predictive.cdf(y).shape, each
    region = predictive.hdr(0.9)
    if vector:
        yield "covariance", predictive.covariance.shape, (0, outputs, outputs)
        yield "region", region.contains(y).shape, (0,)
    else:
        yield "hdr", region.lower.shape, (0, region.upper.shape[1])


@pytest.mark.parametrize("name", CASES)
def test_no_rows_have_an_empty_answer(name):
    likelihood, f, _ = CASES[name]
    outputs = f.shape[1]
    kind = likelihood.predictive.support_for(outputs).kind
    y = torch.empty(0, outputs) if kind == "vector" else torch.empty(0)
    for weights in ("last_layer", "all"):
        post = fitted(name, weights)
        mean, K = post.marginal(X[:0])
        assert mean.shape == (0, outputs)
        assert K.shape == (0, outputs, outputs)
        assert (
            ssla.ssla(post, X[:0], y).total.shape == ssla.assla(post, X[:0], y).total.shape == (0,)
        )
        for refit in RUNGS:
            if weights == "all" and kind == "vector" and refit in ("weights", "auto"):
                continue  # refused for any rows
            predictive = post.predict(X[:0], refit=refit)
            assert "0 rows" in str(predictive.diagnostics)
            assert predictive.increments(y).total.shape == (0,)
            for what, found, expected in answers(predictive, kind, outputs):
                assert tuple(found) == tuple(expected), (weights, refit, what)
    both = ssla.mixture([predictive, predictive])
    derived = (
        [both]
        if kind in ("class", "count")
        else [both, affine(predictive, 1.0, 2.0), affine(both, 1.0, 2.0)]
    )
    for part in derived:
        for what, found, expected in answers(part, kind, outputs):
            assert tuple(found) == tuple(expected), (type(part.law).__name__, what)


def test_no_rows_of_an_unusual_network_are_not_given_to_it():
    """A module need not take an empty batch: it is not called."""

    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()

        def forward(self, x):
            assert len(x), "empty"
            return self.inner(x)

    for weights in ("last_layer", "all"):
        post = ssla.fit(Picky(), (X, Y), weights=weights, **FIT)
        assert post.predict(X[:0]).interval(0.9).shape == (0, 2)
        with pytest.raises(ValueError, match=r"as at fit"):
            post.predict(X[:0, :2])


# --- transformers, parallel and compiled modules -------------------------------------------


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(4, 1)
        self.double().eval()

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


def trained(model, x, y, precision, noise=0.5):
    """At its mode under Gaussian noise and prior, by L-BFGS."""
    model.requires_grad_(True)
    optimiser = torch.optim.LBFGS(
        model.parameters(), max_iter=300, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )

    def loss():
        optimiser.zero_grad()
        value = ((model(x)[:, 0] - y) ** 2).sum() / noise**2 / 2
        value = value + precision / 2 * sum((p**2).sum() for p in model.parameters())
        value.backward()
        return value

    optimiser.step(loss)
    return model.eval()


def test_all_weights_of_a_transformer_are_refitted():
    x, y, enabled = numbers(30, 3, 4), Y, torch.backends.mha.get_fastpath_enabled()
    model = trained(Encoder().train(), x, y, 30.0)
    post = ssla.fit(
        model,
        (x, y),
        weights="all",
        likelihood=L.Gaussian(noise=0.5),
        prior=priors.Gaussian(precision=30.0),
    )
    increments = ssla.ssla(post, x[:1], y[:1], ssla.WeightRefit(on_failure="raise"))
    log_density = ssla.WeightRefit()(post, x[:1])
    theta = log_density.modes(y[:1])[0]
    names = post.network.layout.unpack(theta)
    twin = Encoder()  # at θ̃ the gradient of the augmented objective is that of the tilt
    twin.load_state_dict(names)
    twin.requires_grad_(True)
    whole, target = torch.cat([x, x[:1]]), torch.cat([y, y[:1]])
    with torch.enable_grad():
        value = -((twin(whole)[:, 0] - target) ** 2).sum() / 0.5 - 15 * sum(
            (p**2).sum() for p in twin.parameters()
        )
    value.backward()
    gradient = post.network.layout.pack({name: p.grad for name, p in twin.named_parameters()})
    tilt = post.statistics.gradient + post.bound_prior.gradient(post.theta)
    assert torch.allclose(gradient, tilt, atol=1e-6)
    assert torch.isfinite(increments.total).all()
    assert torch.backends.mha.get_fastpath_enabled() == enabled


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, lambda inner: nn.Sequential(nn.DataParallel(inner[:2]), inner[2])]
)
@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_data_parallel_modules_answer_as_the_module_inside(wrap, weights, tmp_path):
    options = {
        "weights": weights,
        "likelihood": L.StudentT(df=4.0, scale=0.5),
        "gaussian": "laplace",
        "prior": priors.Gaussian(precision=30.0),
        "mode": "polish",
    }
    model = wrap(net())
    post, plain = ssla.fit(model, (X, Y), **options), ssla.fit(net(), (X, Y), **options)
    for refit in ("output", "weights"):
        assert torch.allclose(
            post.predict(X[:2], refit=refit).mean,
            plain.predict(X[:2], refit=refit).mean,
            atol=1e-10,
        )
    assert all("module." in name for name in post.report.names) or not isinstance(
        model, nn.DataParallel
    )
    post.save(tmp_path / "p")
    assert torch.equal(ssla.load(tmp_path / "p", model).predict(X).mean, post.predict(X).mean)
    if isinstance(model, nn.DataParallel):
        named = ssla.fit(model, (X, Y), **{**options, "weights": ["module.2.weight"]})
        assert named.report.names == ("module.2.weight",)
    assert isinstance(model, nn.DataParallel) or isinstance(
        model[0], nn.DataParallel
    )  # not changed


@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_compiled_modules_are_refused_in_words(weights):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        whole = [torch.jit.script(net()), torch.jit.trace(net(), X[:2])]
        part = nn.Sequential(torch.jit.script(net()), nn.Linear(1, 1).double())
    for model in whole:
        with pytest.raises(
            ValueError,
            match=r"The network is a torch.jit module.*Give the nn.Module that was scripted",
        ):
            ssla.fit(model, (X, Y), weights=weights, **FIT)
    with pytest.raises(
        ValueError, match=r"The network's part '0' is a torch.jit module.*compute its outputs once"
    ):
        ssla.fit(part, (X, Y), weights=weights, **FIT)


# --- answers in parts ------------------------------------------------------------------------


@dataclass
class Answer:
    hidden: torch.Tensor
    logits: torch.Tensor
    loss: float | None = None


@dataclass(slots=True)
class Slotted:
    hidden: torch.Tensor
    logits: torch.Tensor


Named = namedtuple("Named", "hidden logits")
FORMS = {
    "dataclass": (Answer, "logits"),
    "slots": (Slotted, "logits"),
    "named": (Named, "logits"),
    "named by index": (Named, 1),
    "dict": (lambda hidden, logits: {"hidden": hidden, "logits": logits}, "logits"),
    "object": (
        lambda hidden, logits: types.SimpleNamespace(hidden=hidden, logits=logits),
        "logits",
    ),
    "tuple": (lambda hidden, logits: (hidden, logits), 1),
    "list": (lambda hidden, logits: [hidden, logits], -1),
    "function": (
        lambda hidden, logits: (hidden, {"logits": logits}),
        lambda answer: answer[1]["logits"],
    ),
}


class Parts(nn.Module):
    """The outputs of `net` among other things; a linear layer comes after them."""

    def __init__(self, form):
        super().__init__()
        self.inner, self.form = net(2), form
        self.other = nn.Linear(4, 2).double()

    def forward(self, x):
        hidden = self.inner[:2](x)
        logits = self.inner[2](hidden)
        return FORMS[self.form][0](self.other(hidden), logits)


CLASSES = torch.arange(30) % 2


def in_parts(form, weights, structure="dense", **more):
    options = {
        "likelihood": L.Categorical(),
        "gaussian": "laplace",
        "prior": priors.Gaussian(precision=30.0),
        "structure": structure,
        **more,
    }
    if weights == "all":
        weights = ["inner.0.weight", "inner.0.bias", "inner.2.weight", "inner.2.bias"]
    plain = ssla.fit(
        net(2),
        (X, CLASSES),
        weights=[name[6:] for name in weights] if type(weights) is list else weights,
        **options,
    )
    return ssla.fit(
        Parts(form), (X, CLASSES), weights=weights, output=FORMS[form][1], **options
    ), plain


@pytest.mark.parametrize("weights", ["last_layer", "all", ["inner.0.weight", "inner.2.weight"]])
@pytest.mark.parametrize("form", FORMS)
def test_a_part_of_the_answer_is_the_output(form, weights, tmp_path):
    post, plain = in_parts(form, weights, mode="polish")
    for refit in ("output", "weights"):
        assert torch.allclose(
            post.predict(X[:3], refit=refit).probs,
            plain.predict(X[:3], refit=refit).probs,
            atol=1e-9,
        )
    assert ("logits" in post.report.output) == (FORMS[form][1] == "logits")
    assert all(
        name.startswith("inner.") for name in post.report.names
    )  # and not the linear layer that comes last
    post.save(tmp_path / "p")
    again = {"output": FORMS[form][1]} if form == "function" else {}
    assert torch.equal(
        ssla.load(tmp_path / "p", Parts(form), **again).predict(X).probs, post.predict(X).probs
    )


@pytest.mark.parametrize("structure", ["kfac", "diag", "low_rank"])
@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_a_part_of_the_answer_with_every_structure(structure, weights):
    post, plain = in_parts("dataclass", weights, structure)
    assert torch.allclose(post.marginal(X).covariance, plain.marginal(X).covariance, atol=1e-10)


def test_the_part_of_an_answer_is_kept_in_a_file_and_must_match(tmp_path):
    post, _ = in_parts("dict", "all")
    post.save(tmp_path / "p")
    assert ssla.load(tmp_path / "p", Parts("dict"), output="logits").report.output == "'logits'"
    with pytest.raises(
        ssla.FileError, match=r"saved with output='logits', but output= is 'hidden'"
    ):
        ssla.load(tmp_path / "p", Parts("dict"), output="hidden")
    own, _ = in_parts("function", "all")
    own.save(tmp_path / "own")
    with pytest.raises(
        ssla.FileError, match=r"output of .* is custom code .*function.*Give it as output="
    ):
        ssla.load(tmp_path / "own", Parts("function"))
    with pytest.raises(ssla.FileError, match=r"output of .* was a function, but output= is a str"):
        ssla.load(tmp_path / "own", Parts("function"), output="logits")
    hidden = ssla.fit(
        Parts("dict"),
        (X, CLASSES),
        likelihood=L.Categorical(),
        prior=priors.Gaussian(),
        gaussian="laplace",
        weights="all",
        output="hidden",
    )
    logits = ssla.fit(
        Parts("dict"),
        (X, CLASSES),
        likelihood=L.Categorical(),
        prior=priors.Gaussian(),
        gaussian="laplace",
        weights="all",
        output="logits",
    )
    with pytest.raises(ValueError, match=r"their output differ: 'hidden' and 'logits'"):
        hidden.merge(logits)


def test_a_saved_part_is_the_same_in_a_fresh_process(tmp_path):
    post, _ = in_parts("dataclass", "all")
    post.save(tmp_path / "p")
    torch.save(post.predict(X).probs, tmp_path / "probs.pt")
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "import torch, ssla; from test_raw_errors import Parts, X\n"
        f"found = ssla.load({str(tmp_path / 'p')!r}, Parts('dataclass')).predict(X).probs\n"
        f"assert torch.equal(found, torch.load({str(tmp_path / 'probs.pt')!r}))"
    )
    where = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=where, timeout=120)


def test_answers_in_parts_name_their_parts():
    options = {"likelihood": L.Categorical(), "prior": priors.Gaussian(), "gaussian": "laplace"}
    fit = lambda form, **more: ssla.fit(Parts(form), (X, CLASSES), **options, **more)
    with pytest.raises(
        TypeError,
        match=r"returned a Answer with the tensors 'hidden', 'logits'. Name the part.*output='hidden'",
    ):
        fit("dataclass")
    with pytest.raises(TypeError, match=r"returned a tuple with the tensors 0, 1.*output=0"):
        fit("tuple")
    with pytest.raises(
        ValueError,
        match=r"no part 'logit': it is a dict with the tensors 'hidden', 'logits'\. Name one",
    ):
        fit("dict", output="logit")
    for index in (2, -3):
        with pytest.raises(
            ValueError, match=f"no part {index}: it is a tuple with the tensors 0, 1"
        ):
            fit("tuple", output=index)
    with pytest.raises(ValueError, match=r"no part 0: it is a dict"):
        fit("dict", output=0)
    with pytest.raises(
        ValueError, match=r"function output= failed on the network's result, a dict .*KeyError"
    ):
        fit("dict", output=lambda answer: answer["logit"])
    with pytest.raises(
        TypeError,
        match=r"one tensor of outputs, but returned a float without tensors.*output=lambda",
    ):
        fit("dict", output=lambda answer: 1.0)
    for output in (0, "logits"):  # an index would be one row of a tensor
        with pytest.raises(
            ValueError, match=r"returns one tensor, which has no part .*Omit output="
        ):
            ssla.fit(net(2), (X, CLASSES), output=output, **options)
    for output in (True, 1.5, ["logits"]):
        with pytest.raises(
            TypeError, match=r"output must name the part of the network's result.*'logits'"
        ):
            ssla.fit(net(2), (X, CLASSES), output=output, **options)
        with pytest.raises(TypeError, match=r"output must name the part"):
            ssla.estimate_cost(net(2), 10, output=output)


def test_a_part_of_the_answer_on_workers():
    options = {
        "likelihood": L.Categorical(),
        "prior": priors.Gaussian(),
        "gaussian": "laplace",
        "weights": "all",
        "output": "logits",
    }
    with ThreadPoolExecutor(2) as pool:
        found = ssla.distributed.fit(
            Parts("dict"), [(X[:12], CLASSES[:12]), (X[12:], CLASSES[12:])], client=pool, **options
        )
    alone = ssla.fit(Parts("dict"), (X, CLASSES), **options)
    assert torch.allclose(found.predict(X).probs, alone.predict(X).probs, atol=1e-10)


# --- advice --------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [1.0, 1e-3])
def test_a_proper_prior_is_not_the_remedy_for_itself(precision):
    data = (X * torch.tensor([1.0, 1.0, 1e9]), numbers(30, 4))
    options = {"likelihood": L.Gaussian(noise=0.5), "structure": "kfac", "mode": "tilt"}
    with pytest.raises(
        ValueError, match=rf"proper \(at least {precision:g}\).*standardise the inputs"
    ) as caught:
        ssla.fit(net()[0], data, prior=priors.Gaussian(precision=precision), **options)
    assert "priors.Gaussian" not in str(caught.value)
    with pytest.raises(ValueError, match=r"not positive definite.*give a proper prior"):
        ssla.fit(net()[0], data, prior=priors.Flat(), **options)
    dense, tau = (
        structures.Dense(dual=False, matrix=torch.full((2, 2), 1e20, dtype=torch.float64), size=2),
        torch.ones(2).double(),
    )
    for proper in (tau, torch.diag(tau)):
        with pytest.raises(ValueError, match=r"proper \(at least 1\).*standardise the inputs"):
            dense.with_prior(proper)
    with pytest.raises(ValueError, match=r"give a proper prior"):
        dense.with_prior(0 * tau)
