"""Refits in output space: memory of many classes."""

import pytest
import torch

from ssla import likelihoods as L
from ssla.predictive import from_marginal
from ssla.refit import outputs

G = torch.Generator().manual_seed(0)
F = torch.randn(7, 12, dtype=torch.float64, generator=G)
A = torch.randn(7, 12, 12, dtype=torch.float64, generator=G)
K = 0.1 * A @ A.mT


def test_the_plug_in_takes_no_roots(monkeypatch):
    """Roots repeated for each class took 47 GB at 4,500 rows and 150 classes."""

    def refuse(values):
        raise AssertionError("a root that is not used")

    monkeypatch.setattr(outputs.linalg, "covariance_root", refuse)
    found = from_marginal(L.Categorical(), F, K, "plug_in").probs
    assert (found - F.softmax(1)).abs().max() < 1e-14


@pytest.mark.parametrize("refit", ["none", "newton"])
@pytest.mark.parametrize("entries", [1, 12 * 144, 30 * 144])
def test_portions_change_no_answer(monkeypatch, refit, entries):
    whole = from_marginal(L.Categorical(), F, K, refit).probs
    monkeypatch.setattr(outputs, "ENTRIES_AT_ONCE", entries)
    assert (from_marginal(L.Categorical(), F, K, refit).probs - whole).abs().max() < 1e-14
