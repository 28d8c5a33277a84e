"""The correction of the logarithm of a sum over few nodes."""

import math

import pytest
import torch

from ssla.likelihoods.integrals import _compute_jensen_correction


def test_it_is_half_the_relative_variance_of_a_sum_over_pairs_of_nodes():
    shares = torch.tensor([[0.4, 0.1, 0.2, 0.3], [0.25] * 4]).double()
    # The pairs of the first row are 0.6 and 0.4, with the variance 0.02 between them.
    assert _compute_jensen_correction(shares).tolist() == pytest.approx([0.5 * 2 * 0.02, 0.0])


def test_nothing_is_added_to_a_sum_of_zero():
    assert _compute_jensen_correction(torch.full((1, 4), math.nan)).tolist() == [0.0]
