"""Tempered asks its base: no member of the protocol has a default there by oversight."""

import pytest

from ssla import likelihoods as L
from support.cases import CASES

# What holds of a density of y, or of refits at a new y, which are those of `predictive`.
OF_THE_NEW_OBSERVATION = {
    "has_log_average",
    "covariance_for",
    "curvature",
    "differentiable",
    "locate_target",
    "has_boundary",
    "log_average",
    "log_prob_at_nodes",
    "may_be_piecewise_linear",
    "quadratic",
    "refit_at_boundary",
    "centre_and_deviation",
    "scored_by_average",
    "several_modes",
    "starting_points",
    "is_piecewise_linear",
    "unequal_units",
}
MEMBERS = {name for name in vars(L.Likelihood) if not name.startswith("_")}


def test_every_member_is_asked_of_the_base_or_is_of_the_new_observation():
    own = {name for name in vars(L.Tempered) if name in MEMBERS}
    assert MEMBERS - own == OF_THE_NEW_OBSERVATION


@pytest.mark.parametrize("name", CASES)
def test_what_is_true_of_every_power_is_that_of_the_base(name):
    base = CASES[name][0]
    hot = L.Tempered(base, 0.5)
    for asked in (
        "linear_domain",
        "links",
        "needs_noise_estimate",
        "concave",
        "averages_differ",
        "softmax",
    ):
        assert getattr(hot, asked) == getattr(base, asked)
    assert hot.power == 0.5 * base.power
    assert hot.predictive is base.predictive
    assert not hot.quadratic
