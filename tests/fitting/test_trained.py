"""The default mode of a classifier's last layer: tilt where it is trained, polish where it is not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

import ssla
from ssla import fitting
from ssla.data import open_source
from ssla.fitting.trained import LOGITS, Verdict, judged
from ssla.likelihoods import Bernoulli, Categorical, Likelihood, Poisson, Tempered

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


def verdict(layer: nn.Module, data: Any, likelihood: Likelihood, structure: str = "dense") -> Verdict:
    reader = fitting.Reader(open_source(data), layer, "last_layer", 2**30)
    job = fitting.checked_job(reader, likelihood, None, structure, None, None, 2**30)
    sums, target = job._read(None)
    assert target.classes is not None
    return judged(sums, target.classes, likelihood)


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
    best = ssla.fit(layer, (x, y), likelihood=Categorical(), prior=ssla.priors.Gaussian(1e-6), gaussian="laplace").parameters
    layer.load_state_dict(best)
    found = verdict(layer, (x, y), Categorical())
    assert found.missing == 0
    assert found.trained


def test_row_weights_are_frequencies() -> None:
    x, y = rows(60)
    weights = 1.0 + (torch.arange(60) % 3).double()
    layer, often = head(x, y, "small"), weights.long()
    one = verdict(layer, (x, y, weights), Categorical())
    other = verdict(layer, (x.repeat_interleave(often, 0), y.repeat_interleave(often)), Categorical())
    assert one == pytest.approx(other, rel=1e-9)


def test_batches_add_up() -> None:
    x, y = rows(60)
    layer = head(x, y, "small")
    batches = list(zip(x.split(7), y.split(7), strict=True))
    assert verdict(layer, batches, Categorical()) == pytest.approx(verdict(layer, (x, y), Categorical()), rel=1e-9)


@pytest.mark.parametrize("kind", HEADS)
def test_units_of_the_features_do_not_matter(kind: str) -> None:
    x, y = rows()
    layer = nn.Sequential(nn.Linear(4, CLASSES, bias=False)).double().eval()
    layer[0].weight.data = head(x, y, kind).weight.data
    other = copy.deepcopy(layer)
    other[0].weight.data /= 1000
    assert verdict(layer, (x, y), Categorical()) == pytest.approx(verdict(other, (1000 * x, y), Categorical()), rel=1e-6)


@pytest.mark.parametrize("kind", HEADS)
def test_tempering_scales_the_figures(kind: str) -> None:
    x, y = rows()
    layer = head(x, y, kind)
    one, other = (verdict(layer, (x, y), law) for law in (Categorical(), Tempered(Categorical(), 0.25)))
    assert [0.25 * part for part in one] == pytest.approx(other, rel=1e-9)


@pytest.mark.parametrize("structure", ["dense", "kfac", "diag", "low_rank"])
@pytest.mark.parametrize("kind", HEADS)
def test_every_structure_comes_to_the_same_mode(structure: str, kind: str) -> None:
    x, y = rows()
    assert verdict(head(x, y, kind), (x, y), Categorical(), structure).trained == (kind == "trained")


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
    said = f"mode='{mode}' was chosen, because the last layer is {'' if kind == 'trained' else 'not '}trained"
    assert said in str(default.report)
    assert "was chosen" not in str(asked.report)
    stays = all(torch.equal(default.parameters[name], value) for name, value in layer.named_parameters())
    assert stays == (kind == "trained")


@pytest.mark.parametrize("kind", ["trained", "random"])
def test_a_prior_or_a_mode_that_is_given_decides(kind: str) -> None:
    x, y = rows()
    layer, options = head(x, y, kind), {"likelihood": Categorical(), "gaussian": "laplace"}
    assert ssla.fit(layer, (x, y), prior=ssla.priors.Gaussian(), **options).report.mode == "polish"
    assert ssla.fit(layer, (x, y), mode="polish", **options).report.mode == "polish"
    assert ssla.fit(layer, (x, y), mode="tilt", **options).report.mode == "tilt"


def test_other_targets_and_other_weights_are_not_judged() -> None:
    x, y = rows()
    counts = ssla.fit(nn.Linear(4, 1).double(), (x, y), likelihood=Poisson())
    assert counts.report.mode == "polish"
    assert "was chosen" not in str(counts.report)
    whole = ssla.fit(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), head(x, y, "random")).double(), (x, y), likelihood=Categorical(), weights="all"
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
        once = ssla.fit(layer, iter(list(zip(x.split(40), y.split(40), strict=True))), likelihood=Categorical())
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
    for found in (ssla.load(tmp_path / "post", layer), more, post.with_prior(ssla.priors.Gaussian(2.0)), post.tune()):
        assert found.report.mode == "tilt"
        assert "mode='tilt' was chosen" in str(found.report)
        assert torch.equal(found.theta, post.theta)
