"""What is said before the work agrees with what the work reports."""

import math

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla.curvature.seconds import count_nodes_of_row
from ssla.likelihoods.averages import RowNodes, _count_pairs
from ssla.maths.quadrature.normal import normal_nodes


def mlp():
    return nn.Sequential(
        nn.Linear(8, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1)
    ).eval()


@pytest.mark.filterwarnings("ignore:The network is")
@pytest.mark.parametrize("structure", ["dense", "diag", "kfac", "low_rank"])
@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_the_estimate_is_what_the_report_says(weights, structure):
    cost = ssla.estimate_cost(mlp(), 100, weights=weights, structure=structure)
    x = torch.randn(100, 8)
    report = ssla.fit(
        mlp(),
        (x, x[:, 0]),
        likelihood=L.Gaussian(noise=0.3),
        prior=ssla.priors.Gaussian(),
        weights=weights,
        structure=structure,
    ).report
    assert cost.parameters == report.parameters == (51 if weights == "last_layer" else 3051)
    if (weights, structure) == ("all", "low_rank"):  # its sketch was doubled, which cost a pass
        assert (report.memory, report.passes) == (2 * cost.statistics, 2)
        return
    assert cost.statistics == report.memory
    assert str(report.passes) in cost.passes


def test_kfac_grows_with_widths_and_not_with_parameters():
    wide = nn.Sequential(nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 10))
    cost = ssla.estimate_cost(wide, 10**6, weights="all", structure="kfac")
    assert cost.statistics == 7 * 8 * (2 * 1001**2 + 1000**2 + 10**2) + 8 * (
        1001 * 1000 + 1001 * 10
    )
    assert cost.fits


def test_what_cannot_fit_names_the_alternative():
    big = nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1000, 1000), nn.Linear(1000, 10)
    )
    cost = ssla.estimate_cost(big, 10**6, weights="all", structure="dense")
    assert not cost.fits
    text = str(cost)
    assert "BEYOND the budget of 1 GiB" in text
    assert "structure='kfac'" in text
    assert "structure='diag'" in text


def test_very_many_classes_fit_with_kronecker_factors():
    cost = ssla.estimate_cost(
        nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 10_000)),
        5000,
        structure="kfac",
        gaussian=False,
    )
    assert cost.fits
    assert not ssla.estimate_cost(
        nn.Linear(64, 10_000), 5000, structure="kfac"
    ).fits  # other targets have the full factor


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"Unknown structure 'kfca'. Did you mean 'kfac'\?"):
        ssla.estimate_cost(mlp(), 10, structure="kfca")
    with pytest.raises(ValueError, match=r"Did you mean '0.weight'\?"):
        ssla.estimate_cost(mlp(), 10, weights=["0.wieght"])
    with pytest.raises(ValueError, match="it has none"):
        ssla.estimate_cost(nn.Conv1d(1, 1, 1), 10)


def test_the_cost_of_refits_is_known_before_the_work():
    cost = ssla.estimate_cost(mlp(), 300, weights="all", refits=100)
    assert cost.gradients == (1500, 4000)
    assert cost.refit_memory <= cost.budget
    assert "100: 1,500 to 4,000 gradients over all rows (15 to 40 for each)" in str(cost)
    assert "refits" not in str(ssla.estimate_cost(mlp(), 300, weights="all"))
    with pytest.raises(ValueError, match="whole number from 0, but is -1"):
        ssla.estimate_cost(mlp(), 300, refits=-1)


def test_a_refusal_names_the_most_accurate_structure_that_fits_first():
    model = nn.Sequential(nn.Linear(600, 10)).eval()
    batches = [(torch.randn(10, 600), torch.arange(10))]  # the number of rows is not announced
    with pytest.raises(
        ValueError,
        match=r"Use structure='kfac' \(.*\) or structure='low_rank' .* or structure='diag'",
    ):
        ssla.fit(model, batches, likelihood=L.Categorical(), structure="dense", memory_budget=2**26)


@pytest.mark.parametrize(
    ("rows", "width", "outputs"),
    [(200, 8, 3), (10_000, 512, 10), (50_000, 768, 2), (5000, 512, 1000)],
)
def test_the_default_structure_is_dense_where_it_is_cheap(rows, width, outputs):
    model = nn.Sequential(nn.Identity(), nn.Linear(width, outputs))
    cost = ssla.estimate_cost(model, rows, gaussian=False)
    assert cost.structure == ("dense" if rows == 200 else "kfac")
    assert cost.fits
    assert "chosen: " in str(cost)
    assert cost.seconds < 180
    assert (
        cost.seconds < ssla.estimate_cost(model, rows, gaussian=False, structure="dense").seconds
        or rows == 200
    )
    assert math.isnan(ssla.estimate_cost(model, rows, structure="diag").seconds)


def test_the_estimate_chooses_what_the_fit_chooses():
    torch.manual_seed(0)
    x, y = torch.randn(5000, 200), torch.arange(5000) % 20
    model = nn.Sequential(nn.Identity(), nn.Linear(200, 20)).eval()
    post = ssla.fit(
        model, (x, y), likelihood=L.Categorical(), prior=ssla.priors.Gaussian(10.0), mode="tilt"
    )
    cost = ssla.estimate_cost(model, 5000, gaussian=False)
    assert post.report.structure == cost.structure == "kfac"
    assert f"chosen: {cost.choice}" in str(post.report)
    assert "dense would take about" in cost.choice


@pytest.mark.parametrize("classes", [3, 10, 64, 65, 300, 301, 1000, 5000])
@pytest.mark.parametrize("rows", [100, 4095, 4096, 5000, 20_000, 1_000_000])
def test_the_nodes_of_an_estimate_are_those_of_the_fit(rows, classes):
    own = RowNodes.for_rows(rows, classes)
    shared = len(normal_nodes(classes, _count_pairs(classes))[0])
    assert count_nodes_of_row(rows, classes) == (shared if own is None else own.count)


def test_the_seconds_of_an_estimate_are_those_that_were_measured():
    """CPU seconds of benchmarks/speed/head_speed.py on one thread (2026-11-18), within a factor of
    two.
    """
    measured = {
        (10_000, 512, 10): 0.94,
        (50_000, 512, 10): 3.25,
        (10_000, 512, 100): 4.17,
        (50_000, 768, 2): 4.60,
        (20_000, 2048, 10): 14.1,
        (5000, 512, 1000): 28.8,
    }
    for (rows, width, classes), seconds in measured.items():
        model = nn.Sequential(nn.Identity(), nn.Linear(width, classes))
        found = ssla.estimate_cost(model, rows, gaussian=False).seconds
        assert 0.5 < found / seconds < 2, (rows, width, classes, found)


def test_weights_mean_the_same_to_the_estimate_and_to_the_fit():
    """A module's name counts its parameters; a parameter's own name needs a list."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    assert ssla.estimate_cost(model, 100, weights="0").parameters == 3 * 4 + 4
    with pytest.raises(ValueError, match="names a parameter"):
        ssla.estimate_cost(model, 100, weights="0.weight")
    with pytest.raises(ValueError, match="empty list"):
        ssla.estimate_cost(model, 100, weights=[])
