"""The default mode of a last layer: tilt where it is trained, polish where it is not."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

import ssla
from ssla.data import open_source
from ssla.fitting.arguments import checked_plan
from ssla.fitting.passes import Reader
from ssla.fitting.trained import LOGITS, STRONGER, Verdict, judge_classes, judge_numbers
from ssla.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    NegativeBinomial,
    Poisson,
    StudentT,
    Tempered,
    custom,
)

CLASSES = 3
HEADS = ("trained", "random", "zero", "small", "wrong")


def rows(n: int = 150, classes: int = CLASSES, rare: bool = False) -> tuple[Tensor, Tensor]:
    """Features around a centre for each class; `rare`: one class in twenty rows."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % classes
    if rare:
        y = (torch.arange(n) % 20 == 0).long()
    centres = 1.5 * torch.randn(classes, 4, dtype=torch.float64, generator=generator)
    return centres[y] + torch.randn(n, 4, dtype=torch.float64, generator=generator), y


def head(x: Tensor, y: Tensor, kind: str, outputs: int = CLASSES) -> nn.Linear:
    """A last layer alone, trained by scikit-learn or not trained."""
    torch.manual_seed(1)
    layer = nn.Linear(x.shape[1], outputs).double().eval()
    if kind == "random":
        return layer
    found = LogisticRegression(C=0.3).fit(x.numpy(), y.numpy())
    factor = {"trained": 1.0, "zero": 0.0, "small": 0.03, "wrong": -1.0}[kind]
    with torch.no_grad():
        layer.weight.copy_(factor * torch.from_numpy(found.coef_))
        layer.bias.copy_(factor * torch.from_numpy(found.intercept_))
    return layer


def verdict(
    layer: nn.Module, data: Any, likelihood: Likelihood, structure: str = "dense"
) -> Verdict:
    reader = Reader(open_source(data), layer, "last_layer", 2**30)
    plan = checked_plan(ssla.Posterior, reader, likelihood, None, structure, None, None, 2**30)
    plan, sums, target = plan.run_pass(None)
    assert target.classes is not None
    return judge_classes(sums, target.classes, likelihood)


# --- the figures ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", HEADS)
def test_figures_equal_those_of_autograd(kind: str) -> None:
    x, y = rows()
    layer = head(x, y, kind)
    ones = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
    theta = torch.cat([layer.weight, layer.bias[:, None]], 1).detach()

    def log_likelihood(w: Tensor) -> Tensor:
        return torch.log_softmax(ones @ w.reshape(CLASSES, -1).mT, 1)[torch.arange(len(y)), y].sum()

    flat = theta.flatten()
    g = torch.autograd.functional.jacobian(log_likelihood, flat)
    S = -torch.autograd.functional.hessian(log_likelihood, flat)
    weak = ones.square().sum() / len(x) / LOGITS**2 * torch.eye(len(flat), dtype=torch.float64)
    inverse = torch.linalg.inv(S + weak)
    frequencies = torch.bincount(y).double() / len(y)
    learned = log_likelihood(flat) - frequencies.log()[y].sum()
    missing = (0.5 * g @ inverse @ g - torch.trace(S @ inverse)).clamp_min(0)

    found = verdict(layer, (x, y), Categorical())
    assert found.learned == pytest.approx(float(learned), rel=1e-9)
    assert found.missing == pytest.approx(float(missing), rel=1e-9, abs=1e-9)


def test_at_the_maximum_nothing_is_missing() -> None:
    x, y = rows()
    layer = head(x, y, "trained")
    prior = ssla.priors.Gaussian(1e-6)
    best = ssla.fit(
        layer, (x, y), likelihood=Categorical(), prior=prior, mode="polish", gaussian="laplace"
    ).parameters
    layer.load_state_dict(best)
    found = verdict(layer, (x, y), Categorical())
    assert found.missing == 0
    assert found.trained


def test_row_weights_are_frequencies() -> None:
    x, y = rows(60)
    weights = 1.0 + (torch.arange(60) % 3).double()
    layer, often = head(x, y, "small"), weights.long()
    one = verdict(layer, (x, y, weights), Categorical())
    other = verdict(
        layer, (x.repeat_interleave(often, 0), y.repeat_interleave(often)), Categorical()
    )
    assert one == pytest.approx(other, rel=1e-9)


def test_batches_add_up() -> None:
    x, y = rows(60)
    layer = head(x, y, "small")
    batches = list(zip(x.split(7), y.split(7), strict=True))
    assert verdict(layer, batches, Categorical()) == pytest.approx(
        verdict(layer, (x, y), Categorical()), rel=1e-9
    )


@pytest.mark.parametrize("kind", HEADS)
def test_units_of_the_features_do_not_matter(kind: str) -> None:
    x, y = rows()
    layer = nn.Sequential(nn.Linear(4, CLASSES, bias=False)).double().eval()
    layer[0].weight.data = head(x, y, kind).weight.data
    other = copy.deepcopy(layer)
    other[0].weight.data /= 1000
    assert verdict(layer, (x, y), Categorical()) == pytest.approx(
        verdict(other, (1000 * x, y), Categorical()), rel=1e-6
    )


@pytest.mark.parametrize("kind", HEADS)
def test_tempering_scales_the_figures(kind: str) -> None:
    x, y = rows()
    layer = head(x, y, kind)
    one, other = (
        verdict(layer, (x, y), law) for law in (Categorical(), Tempered(Categorical(), 0.25))
    )
    assert [0.25 * part for part in one] == pytest.approx(other, rel=1e-9)


@pytest.mark.parametrize("structure", ["dense", "kfac", "diag", "low_rank"])
@pytest.mark.parametrize("kind", HEADS)
def test_every_structure_comes_to_the_same_mode(structure: str, kind: str) -> None:
    x, y = rows()
    assert verdict(head(x, y, kind), (x, y), Categorical(), structure).trained == (
        kind == "trained"
    )


def test_one_class_only_is_not_learned() -> None:
    x, _ = rows(20)
    assert not verdict(nn.Linear(4, 2).double(), (x, torch.zeros(20).long()), Categorical()).trained


# --- the fit -------------------------------------------------------------------------------


def likelihood_and_outputs(name: str) -> tuple[Likelihood, int]:
    return {"bernoulli": (Bernoulli(), 1), "tempered": (Tempered(Categorical(), 0.5), CLASSES)}.get(
        name, (Categorical(), CLASSES)
    )


@pytest.mark.parametrize("gaussian", ["variational", "laplace"])
@pytest.mark.parametrize("law", ["categorical", "bernoulli", "tempered"])
@pytest.mark.parametrize("kind", ["trained", "random", "zero"])
def test_the_default_is_the_mode_that_it_names(kind: str, law: str, gaussian: str) -> None:
    likelihood, outputs = likelihood_and_outputs(law)
    x, y = rows(classes=2 if outputs == 1 else CLASSES)
    layer = head(x, y, kind, outputs)
    mode = "tilt" if kind == "trained" else "polish"
    default = ssla.fit(layer, (x, y), likelihood=likelihood, gaussian=gaussian)
    asked = ssla.fit(layer, (x, y), likelihood=likelihood, gaussian=gaussian, mode=mode)
    assert default.report.mode == mode
    assert torch.equal(default.predict(x[:5]).probs, asked.predict(x[:5]).probs)
    said = (
        f"mode='{mode}' was chosen, because the last layer is "
        f"{'' if kind == 'trained' else 'not '}trained"
    )
    assert said in str(default.report)
    assert "was chosen" not in str(asked.report)
    stays = all(
        torch.equal(default.parameters[name], value) for name, value in layer.named_parameters()
    )
    assert stays == (kind == "trained")


@pytest.mark.parametrize("kind", ["trained", "random"])
def test_a_mode_that_is_given_decides_and_a_prior_does_not(kind: str) -> None:
    x, y = rows()
    layer, options = head(x, y, kind), {"likelihood": Categorical(), "gaussian": "laplace"}
    mode = "tilt" if kind == "trained" else "polish"
    assert ssla.fit(layer, (x, y), prior=ssla.priors.Gaussian(), **options).report.mode == mode
    assert ssla.fit(layer, (x, y), mode="polish", **options).report.mode == "polish"
    assert ssla.fit(layer, (x, y), mode="tilt", **options).report.mode == "tilt"


def test_other_weights_than_a_last_layer_are_not_judged() -> None:
    x, y = rows()
    whole = ssla.fit(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), head(x, y, "random")).double(),
        (x, y),
        likelihood=Categorical(),
        weights="all",
    )
    assert whole.report.mode == "tilt"
    assert "was chosen" not in str(whole.report)


def test_a_rare_class_is_learned_only_beyond_its_frequency() -> None:
    """A head that has found the frequency, and nothing else, is polished."""
    x, y = rows(400, 2, rare=True)
    layer = nn.Linear(4, 2).double()
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.copy_(torch.tensor([0.95, 0.05]).log())
    assert ssla.fit(layer, (x, y), likelihood=Categorical()).report.mode == "polish"
    assert ssla.fit(head(x, y, "trained", 1), (x, y), likelihood=Bernoulli()).report.mode == "tilt"


def test_data_that_can_be_read_once_are_judged_in_that_pass() -> None:
    x, y = rows()
    for kind, mode in (("trained", "tilt"), ("random", "polish")):
        layer = head(x, y, kind)
        once = ssla.fit(
            layer, iter(list(zip(x.split(40), y.split(40), strict=True))), likelihood=Categorical()
        )
        assert once.report.mode == mode
    with pytest.warns(UserWarning, match="these can be read only once"):
        tight = ssla.fit(
            head(x, y, "trained"),
            iter(list(zip(x.split(40), y.split(40), strict=True))),
            likelihood=Categorical(),
            memory_budget=15000,
        )
    assert tight.report.mode == "tilt"
    assert tight.report.passes == 1


def test_the_note_is_kept_by_save_update_and_a_new_prior(tmp_path: Path) -> None:
    x, y = rows()
    layer = head(x, y, "trained")
    post = ssla.fit(layer, (x[:100], y[:100]), likelihood=Categorical())
    post.save(tmp_path / "post")
    more = post.update((x[100:], y[100:]))
    for found in (
        ssla.load(tmp_path / "post", layer),
        more,
        post.with_prior(ssla.priors.Gaussian(2.0)),
        post.tune(),
    ):
        assert found.report.mode == "tilt"
        assert "mode='tilt' was chosen" in str(found.report)
        assert torch.equal(found.theta, post.theta)


# --- numbers and counts --------------------------------------------------------------------


OTHERS: dict[str, tuple[Likelihood, int]] = {
    "gaussian, noise estimated": (Gaussian(noise="estimate"), 1),
    "gaussian": (Gaussian(noise=0.3), 1),
    "two targets": (Gaussian(noise="estimate"), 2),
    "mean and log variance": (HeteroscedasticGaussian(), 2),
    "student": (StudentT(df=4.0, scale=0.3), 1),
    "poisson": (Poisson(), 1),
    "negative binomial": (NegativeBinomial(dispersion=0.2), 1),
    "custom": (custom(lambda y, f: -0.5 * ((y - f[..., 0]) / 0.3) ** 2 - 0.286, outputs=1), 1),
}


def numbers(name: str, unit: float = 1.0) -> tuple[nn.Linear, Tensor, Tensor]:
    """A last layer that the targets come from."""
    generator = torch.Generator().manual_seed(2)
    likelihood, outputs = OTHERS[name]
    law = (
        Gaussian(noise=0.3)
        if name in ("gaussian, noise estimated", "two targets", "custom")
        else likelihood
    )
    x = torch.randn(200, 4, dtype=torch.float64, generator=generator)
    layer = nn.Linear(4, outputs).double().eval()
    with torch.no_grad():
        layer.weight.copy_(torch.randn(outputs, 4, generator=generator))
        layer.bias.fill_(0.5)
        if name == "mean and log variance":
            layer.weight[1] *= 0.3
            layer.bias[1] = -2.0
        y = law.sample(layer(x), 1, generator)[0].reshape(
            -1, outputs if outputs == 2 and "two" in name else 1
        )
        layer.weight *= unit
        layer.bias *= unit
    return layer, x, (unit * y).squeeze(1) if y.shape[1] == 1 else unit * y


@pytest.mark.parametrize("structure", ["dense", "kfac", "diag"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_trained_head_of_numbers_is_kept_and_an_untrained_one_is_polished(
    name: str, structure: str
) -> None:
    likelihood, _ = OTHERS[name]
    layer, x, y = numbers(name)
    kept = ssla.fit(layer, (x, y), likelihood=likelihood, structure=structure, gaussian="laplace")
    assert kept.report.mode == "tilt"
    assert torch.equal(kept.theta, kept.network.theta)
    assert "best constant prediction" in str(kept.report)
    torch.manual_seed(0)
    for untrained in (0.0, -1.0):
        other = copy.deepcopy(layer)
        with torch.no_grad():
            other.weight *= untrained
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a wrong head is far from its targets
            found = ssla.fit(
                other, (x, y), likelihood=likelihood, structure=structure, gaussian="laplace"
            )
        assert found.report.mode == "polish"


@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_units_of_the_targets_do_not_matter(unit: float) -> None:
    name = "gaussian, noise estimated"
    for factor, mode in ((1.0, "tilt"), (0.0, "polish")):
        layer, x, y = numbers(name, unit)
        with torch.no_grad():
            layer.weight *= factor
        assert ssla.fit(layer, (x, y), likelihood=OTHERS[name][0]).report.mode == mode


def test_the_gain_of_gaussian_noise_is_that_of_least_squares() -> None:
    """learned and missing by sums of squares in NumPy, with the noise that suits each
    prediction.
    """
    layer, x, y = numbers("gaussian, noise estimated")
    with torch.no_grad():
        layer.weight *= 0.5
    reader = Reader(open_source((x, y)), layer, "last_layer", 2**30)
    plan = checked_plan(
        ssla.Posterior, reader, Gaussian(noise=1.0), None, "dense", None, None, 2**30
    )
    plan, sums, target = plan.run_pass(None)
    assert target.numbers is not None
    found = judge_numbers(sums, target.numbers, Gaussian(noise=1.0), True)
    assert found is not None
    ones = torch.cat([x, torch.ones(200, 1).double()], 1).numpy()
    r = (y - layer(x)[:, 0]).detach().numpy()
    total, own = float(((y - y.mean()) ** 2).sum()), float((r**2).sum())
    assert found.learned == pytest.approx(100 * np.log(total / own))
    sigma2, best = own / 200, 0.0
    tau = (ones**2).sum() / 200 / (9 * total / 200)
    for factor in STRONGER:
        H = ones.T @ ones / sigma2 + factor * tau * np.eye(5)
        step = np.linalg.solve(H, ones.T @ r / sigma2)
        after = float(((r - ones @ step) ** 2).sum())
        used = np.trace(np.linalg.solve(H, ones.T @ ones / sigma2))
        best = max(best, 100 * np.log(own / after) - used)
    assert found.missing == pytest.approx(best)
