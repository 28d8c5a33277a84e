"""Several networks trained together, with targets of their own."""

import numpy as np
import pytest
import torch
from scipy import stats

from ssla.likelihoods import HeteroscedasticGaussian
from ssla.predictive.positive import Positive
from ssla.tables.networks import target_scales, training
from ssla.tables.networks.ensemble import choose_scale
from ssla.tables.networks.pieces import count_pieces, find_quantile_edges
from ssla.tables.networks.training import Architecture, Rows, Schedule, train_networks
from ssla.tables.networks.training_data import TrainingData

RNG = np.random.default_rng(0)
X = torch.from_numpy(RNG.normal(size=(120, 2)))
Y = torch.from_numpy(np.exp(0.7 * X[:, 0].numpy() + 0.3 * RNG.normal(size=120)))
ONES = torch.ones(120, dtype=torch.float64)
HELD = torch.arange(120).expand(2, -1) % 10 == torch.tensor([[3], [7]])


def trained(members, by_member=None):
    rows = Rows(X, Y, ONES, HELD.repeat(members // 2, 1), (), by_member)
    return train_networks(
        Architecture(2, 2, (8,)), HeteroscedasticGaussian(), rows, Schedule(10, None), 0
    )


def test_members_with_targets_of_their_own_are_those_of_the_same_targets():
    one, other = trained(4), trained(4, Y.expand(4, -1))
    assert torch.equal(one.losses, other.losses)
    scaled = torch.stack([Y, Y, 2 * Y, 2 * Y])
    mixed = trained(4, scaled)
    assert torch.equal(mixed.losses[:, :2], one.losses[:, :2])
    assert not torch.allclose(mixed.losses[:, 2:], one.losses[:, 2:])


def test_pieces_are_the_same_once_and_in_every_epoch(monkeypatch):
    edges = find_quantile_edges(X, ONES)
    rows = Rows(X, Y, ONES, HELD, edges)

    def losses():
        return train_networks(
            Architecture(2, 2, (8,), "relu", count_pieces(edges)),
            HeteroscedasticGaussian(),
            rows,
            Schedule(5, 16),
            0,
        ).losses

    once = losses()
    monkeypatch.setattr(training, "MOST_EXPANDED", 0)
    assert torch.allclose(losses(), once, atol=1e-12)


def test_the_scales_of_inputs_become_part_of_the_first_layer():
    """The modules predict held-out rows as well as the losses of the training say."""
    edges = find_quantile_edges(X, ONES)
    architecture = Architecture(2, 2, (8,), "relu", count_pieces(edges))
    found = train_networks(
        architecture,
        HeteroscedasticGaussian(),
        Rows(X, Y, ONES, HELD, edges),
        Schedule(10, None, 0.1),
        0,
    )
    assert architecture.build().state_dict().keys() == found.modules[0].state_dict().keys()
    for m, module in enumerate(found.modules):
        with torch.no_grad():
            loss = -HeteroscedasticGaussian().log_prob(Y[HELD[m]], module(X[HELD[m]])).mean()
        assert float(loss) == pytest.approx(
            float(found.losses[:, m].min()), abs=1e-6
        )  # their mean is taken in single precision


def test_the_best_scale_has_the_lowest_nll_of_y():
    """The NLL of y from the losses on the scale of the networks, against log_prob of the
    transformed law by hand.
    """
    targets = [
        target_scales.ScaledTarget.from_values(Y, ONES, name)
        for name in ("heteroscedastic", "positive")
    ]
    found = trained(4, torch.stack([target.y for target in targets]).repeat_interleave(2, 0))
    by_hand = []
    for m, module in enumerate(found.modules):
        target, rows = targets[m // 2], HELD[m % 2]
        f = module(X[rows]).detach()
        normal = torch.distributions.Normal(f[:, 0], (0.5 * f[:, 1]).exp())
        y = Y[rows].clone().requires_grad_(True)
        z = (
            (y if target.scale is None else target.scale.to_z(y))
            .sub(target.unit.shift)
            .div(target.unit.scale)
        )
        (slope,) = torch.autograd.grad(z.sum(), y)
        by_hand.append(float(-(normal.log_prob(z.detach()) + slope.log()).mean()))
    gain = np.array(by_hand[:2]) - np.array(by_hand[2:])
    found_gain = target_scales.compute_density_gains(
        targets, found.losses, TrainingData(X, Y, ONES, HELD)
    )
    assert np.allclose(found_gain, gain, atol=1e-10)
    for gains, chosen in (
        ((0.12, 0.02), 1),
        ((0.12, -0.02), 0),
        ((0.009, 0.009), 0),
        ((0.02, 0.02), 1),
    ):  # mean, error, least
        assert target_scales.choose_by_gains(torch.tensor(gains, dtype=torch.float64)) == chosen


def test_the_best_scale_of_small_counts_has_the_highest_probability_of_what_rounds_to_them():
    """Against the distribution functions of SciPy, on both scales."""
    y = Y.abs().round()
    targets = [
        target_scales.ScaledTarget.from_values(y, ONES, name)
        for name in ("heteroscedastic", "positive")
    ]
    found = trained(4, torch.stack([target.y for target in targets]).repeat_interleave(2, 0))
    modules = [found.modules[:2], found.modules[2:]]
    by_hand = np.zeros((2, 2))
    for k, target in enumerate(targets):
        for m, module in enumerate(modules[k]):
            f, rows = module(X[HELD[m]]).detach(), y[HELD[m]]
            ends = [rows - 0.5, rows + 0.5]
            low, high = (
                ((end if target.scale is None else target.scale.to_z(end)) - target.unit.shift)
                / target.unit.scale
                for end in ends
            )
            low, high, law = (
                low.numpy(),
                high.numpy(),
                stats.norm(f[:, 0].numpy(), np.exp(f[:, 1].numpy() / 2)),
            )
            by_hand[k, m] = np.log(
                law.cdf(high) - np.where(rows.numpy() == 0, 0, law.cdf(low))
            ).mean()
    data = TrainingData(X, y, ONES, HELD)
    gains = target_scales.compute_count_gains(targets, modules, data, HeteroscedasticGaussian())
    assert np.allclose(gains, by_hand[1] - by_hand[0], atol=1e-8)


def test_the_scale_of_positive_targets_begins_at_their_five_per_cent_quantile():
    y = torch.cat([torch.zeros(10), torch.arange(1.0, 102.0)]).double()
    scale = choose_scale(y, "positive")
    assert isinstance(scale, Positive)
    assert np.isclose(np.exp(scale.low), 6.0)
    assert np.isclose(np.exp(scale.high), 101.0, rtol=1e-5)
