"""Small steps of the refits of the weights, each alone."""

import torch

from ssla.refit.weights.anderson import Ascent, _prefer_uphill
from ssla.refit.weights.last_layer_curvature import _is_inverse
from ssla.refit.weights.last_layer_products import _Whitening, number_distinct_inputs
from ssla.refit.weights.linearised import join_row_weights
from ssla.refit.weights.refit_rows import Block


def _normal(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _block(rows, weights=None):
    return Block(_normal(rows, 3), _normal(rows, 2), torch.zeros(rows), weights)


def test_a_guess_is_taken_where_it_points_uphill():
    gradient = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    guess = torch.tensor([[2.0, 1.0], [-1.0, 0.0], [torch.nan, 0.0]])
    direction, slope = torch.full((3, 2), 0.5), torch.full((3,), 0.25)
    chosen, rise = _prefer_uphill(guess, gradient, direction, slope)
    assert chosen.tolist() == [[2.0, 1.0], [0.5, 0.5], [0.5, 0.5]]
    assert rise.tolist() == [2.0, 0.25, 0.25]


def test_a_later_ascent_of_some_tasks_adds_its_evaluations():
    first = Ascent.not_started(torch.zeros(3, 2))
    done = torch.ones(2, dtype=torch.bool)
    later = Ascent(torch.ones(2, 2), torch.zeros(2), torch.tensor([4, 5]), done)
    both = first.continued_by(torch.tensor([0, 2]), later)
    assert both.steps.tolist() == [4, 0, 5]
    assert both.converged.tolist() == [True, False, True]
    assert both.point.tolist() == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    assert not first.converged.any()


def test_an_inverse_is_accepted_by_its_product_with_a_vector():
    factor = _normal(5, 5)
    H = factor @ factor.mT + torch.eye(5)
    v = _normal(5)
    assert _is_inverse(H.tril(), torch.linalg.inv(H), v)
    assert not _is_inverse(H.tril(), 1.01 * torch.linalg.inv(H), v)


def test_row_weights_are_one_in_blocks_without_weights():
    assert join_row_weights([_block(2), _block(1)]) is None
    weighted = _block(2, torch.tensor([0.5, 2.0], dtype=torch.float64))
    assert join_row_weights([_block(1), weighted]).tolist() == [1.0, 0.5, 2.0]


def test_whitened_features_are_those_of_the_basis():
    basis = torch.linalg.cholesky(_normal(3, 3) @ _normal(3, 3).mT + torch.eye(3))
    block = _block(4)
    white = _Whitening(basis, torch.float64).whiten_block(block)
    assert torch.allclose(white.x @ basis.mT, block.x)
    assert torch.equal(white.f, block.f)
    assert _Whitening(None, torch.float64).whiten_features(block.x) is block.x


def test_inputs_are_numbered_with_the_first_task_of_each():
    index, first = number_distinct_inputs(torch.tensor([7, 2, 7, 5]))
    assert index.tolist() == [2, 0, 2, 1]
    assert first.tolist() == [1, 3, 0]
