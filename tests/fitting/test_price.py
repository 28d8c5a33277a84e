"""Without validation rows, doubt that costs too much on memorised training rows is limited."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ssla
from ssla import likelihoods as L
from ssla.fitting.price import MOST_PRICE
from ssla.priors import Gaussian
from ssla.report import TILT


def memorised(outputs: int, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
    """A last layer that is right with certainty on all of its rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 12, generator=generator, dtype=torch.float64)
    model = nn.Linear(12, outputs).double().eval()
    with torch.no_grad():
        model.weight.copy_(torch.randn(outputs, 12, generator=generator))
        model.bias.zero_()
        f = model(x)
        y = f.argmax(1) if outputs > 1 else (f[:, 0] > 0).long()
        margin = (
            f.topk(2).values @ torch.tensor([1.0, -1.0]).double() if outputs > 1 else f[:, 0].abs()
        )
        kept = margin > 0.5
        model.weight.mul_(20)
    return model.to(dtype), x[kept].to(dtype), y[kept]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("gaussian", ["laplace", "variational"])
@pytest.mark.parametrize(
    ("law", "outputs"), [(L.Bernoulli(), 1), (L.Categorical(), 4)], ids=["Bernoulli", "Categorical"]
)
def test_the_price_on_memorised_rows_is_limited(
    law: object, outputs: int, gaussian: str, dtype: torch.dtype
) -> None:
    model, x, y = memorised(outputs, dtype)
    posterior = ssla.fit(model, (x, y), likelihood=law, gaussian=gaussian)
    assert posterior.report.mode == TILT
    own = -float(posterior.predict(x).log_prob(y).double().mean())
    network = -float(law.log_prob(y, model(x).detach().double()).mean())
    assert network < 0.01
    assert own - network <= MOST_PRICE + network + 2e-4
    assert own - network >= 0.5 * MOST_PRICE  # no more than needed
    assert "memorised" in str(posterior.report)
    precision = posterior.bound_prior.precision(posterior.theta)
    assert f"{float(precision[0]):.3g}"[:3] in posterior.report.prior


def test_a_prior_that_is_given_stays() -> None:
    model, x, y = memorised(4)
    posterior = ssla.fit(
        model, (x, y), likelihood=L.Categorical(), prior=Gaussian(0.01), mode="tilt"
    )
    assert posterior.prior.precision == 0.01
    assert "memorised" not in str(posterior.report)


def test_rows_that_are_not_memorised_are_left_to_the_evidence() -> None:
    model, x, _ = memorised(4)
    with torch.no_grad():
        model.weight.div_(20)
    y = L.Categorical().sample(model(x).detach(), 1, torch.Generator().manual_seed(1))[0]
    posterior = ssla.fit(model, (x, y), likelihood=L.Categorical(), mode="tilt")
    assert "memorised" not in str(posterior.report)


def test_validation_rows_without_an_error_warn_of_nothing() -> None:
    """They say little about doubt and temperature. Warnings are errors here."""
    model, x, y = memorised(4)
    train, unseen, new = ((x[a:b], y[a:b]) for a, b in ((0, 60), (60, 90), (90, None)))
    posterior = ssla.fit(model, train, likelihood=L.Categorical(), validation=unseen)
    own = -float(posterior.predict(new[0]).log_prob(new[1]).mean())
    assert own <= 0.05


def test_rows_of_weight_zero_have_no_price() -> None:
    """Wrong labels without a weight would otherwise count as a loss of the network, which
    allows more doubt.
    """
    model, x, y = memorised(4)
    weights = torch.cat([torch.ones(len(y)), torch.zeros(len(y))]).double()
    twice = (torch.cat([x, x]), torch.cat([y, (y + 1) % 4]), weights)
    plain, weighted = (
        ssla.fit(model, data, likelihood=L.Categorical(), mode="tilt") for data in ((x, y), twice)
    )
    assert "memorised" in str(weighted.report)
    price = -float((weighted.predict(x).log_prob(y)).mean())
    assert price <= 2 * MOST_PRICE
    assert price == pytest.approx(-float(plain.predict(x).log_prob(y).mean()), rel=0.5)
