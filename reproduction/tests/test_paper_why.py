"""The numbers in the prose of docs/paper.md: each is found again from the code, a closed form or the
data, and not only written.
"""

import csv
import math
import os
from pathlib import Path

import numpy as np
import pytest

from ssla_paper.heteroscedastic import data, published
from ssla_paper.heteroscedastic.claims import STEP
from ssla_paper.modularity import DIFFERENCES, NOISE, POINT, PRINTED, PUBLISHED, VARIANCES
from ssla_paper.page import WHY
from ssla_paper.uci import data as uci
from ssla_paper.uci.published import SCORED, constant_width

FOLDER = Path(os.environ.get("SSLA_DATA", "nowhere"))
PROSE = " ".join(WHY.split())


def printed_cells(leverage):
    """How many of the 30 printed cells of the modularity tables a leverage h gives: closed forms
    of a linear model, with the prior in the refit and not in the curvature.
    """
    information = POINT**2 / leverage / NOISE**2
    logdet = -0.5 * math.log1p(leverage)
    values = {}
    for prior, variance in VARIANCES.items():
        total = NOISE**2 + POINT**2 / (information + 1 / variance)
        values[prior] = (
            logdet,
            logdet,
            logdet - 0.5 / total,
            logdet - 0.5 / NOISE**2,
        )
    count = 0
    for prior, cells in values.items():
        found = (*cells, cells[2] - cells[3], cells[2] - values["1e6"][2])
        told = (*PUBLISHED[prior], *DIFFERENCES[prior])
        count += sum(abs(a - b) <= PRINTED for a, b in zip(found, told, strict=True))
    return count


def test_the_leverages_that_give_every_printed_cell():
    assert "any h from 0.053138 to 0.053155" in PROSE
    assert "all 30 printed cells" in PROSE
    assert {printed_cells(h) for h in np.linspace(0.053138, 0.053155, 35)} == {30}
    assert printed_cells(0.053136) < 30
    assert printed_cells(0.053157) < 30
    assert printed_cells(0.05317) == 28


def test_the_width_of_assla_and_the_floor_of_laplace():
    assert "0.3985" in PROSE
    assert round(published.constant_width(), 4) == round(constant_width(30), 4) == 0.3985
    assert "NLL is at least 0.919" in PROSE
    assert round(0.5 * math.log(2 * math.pi), 3) == 0.919  # −log N(ŷ; ŷ, 1), and K only adds


def test_the_sizes_of_the_published_runs():
    assert "at most ten epochs" in PROSE
    assert published.EPOCHS == 10
    assert "25 rows, four points each" in PROSE
    assert len(data.toy().test[1]) == 25
    assert STEP == 100 / 25 == 4
    assert "for the four larger sets 50 test rows" in PROSE
    assert sum(one.medium for one in uci.SETS.values()) == 4
    assert SCORED == 50


@pytest.mark.skipif(
    not (FOLDER / "bike_sharing_hour.csv").exists(), reason="SSLA_DATA does not name the UCI sets"
)
def test_what_two_sets_predict():
    bike, orders = columns("bike_sharing_hour"), columns("daily_demand_orders")
    assert "(correlation 0.988)" in PROSE
    assert round(float(np.corrcoef(bike["temp"], bike["atemp"])[0, 1]), 3) == 0.988
    assert "a sum from its three terms" in PROSE
    total = sum(orders[f"Order type {kind}"] for kind in "ABC")
    np.testing.assert_allclose(total, orders["Target (Total orders)"], atol=1.5e-3)


def columns(name):
    """The numeric columns of a set by name."""
    with (FOLDER / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    text = {"dteday"}
    return {key: np.array([float(row[key]) for row in rows]) for key in rows[0] if key not in text}
