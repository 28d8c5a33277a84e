"""Small functions that laws share: runs, atoms, draws by weight, joined nodes, wider regions."""

from __future__ import annotations

import torch

from ssla.likelihoods.support import Counts, Real
from ssla.predictive.count_law import _fill_empty_blocks, _find_in_blocks
from ssla.predictive.interpolation import _separate_counts
from ssla.predictive.law import find_runs, gather_rows, select_highest
from ssla.predictive.mixture_laws import _find_region_above, draw_indices
from ssla.predictive.refitted import MARGIN, _widen_quantiles


def rows_of(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_runs_are_found_with_both_ends_and_padding():
    inside = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    first, last = find_runs(inside)
    assert first.tolist() == [[0, 3], [1, -1], [-1, -1]]
    assert last.tolist() == [[1, 3], [2, -1], [-1, -1]]


def test_the_fewest_atoms_that_reach_the_level_are_selected():
    shares = rows_of([0.1, 0.6, 0.3], [0.2, 0.2, 0.6])
    assert select_highest(shares, shares, 0.6).tolist() == [
        [False, True, False],
        [False, False, True],
    ]
    assert select_highest(shares, shares, 0.7).sum(1).tolist() == [2, 2]


def test_an_empty_block_does_not_cut_a_run():
    inside = torch.tensor([[True, False, True, False, False]])
    empty = torch.tensor([[False, True, False, False, True]])
    assert _fill_empty_blocks(inside, empty).tolist() == [[True, True, True, False, False]]


def test_targets_are_found_in_the_block_that_holds_them():
    cumulative = rows_of([0.0, 0.2, 0.2, 1.0])
    block, share = _find_in_blocks(cumulative, rows_of([0.1, 0.6]), right=True)
    assert block.tolist() == [[0, 2]]
    assert torch.allclose(share, rows_of([0.5, 0.5]))


def test_indices_are_drawn_by_their_weights():
    weights = rows_of([0.0, 1.0])[0]
    assert draw_indices(weights, 3, 2, None).tolist() == [[1, 1]] * 3
    assert draw_indices(weights, 0, 2, None).shape == (0, 2)


def test_a_region_ends_where_log_p_is_linear_between_nodes():
    region = _find_region_above(rows_of([0.0, 1.0, 2.0]), rows_of([-1.0, 1.0, -3.0]), rows_of(0.0))
    assert torch.allclose(region.lower, rows_of([0.5]))
    assert torch.allclose(region.upper, rows_of([1.25]))


def test_equal_counts_are_pushed_apart_below_the_top():
    assert _separate_counts(rows_of([0.0, 0.0, 1.0]), rows_of(9.0)).tolist() == [[0, 1, 2]]
    assert _separate_counts(rows_of([1.0, 2.0, 2.0]), rows_of(2.0)).tolist() == [[0, 1, 2]]


def test_wider_quantiles_contain_the_ends_and_never_shrink():
    quantiles = rows_of([-3.0, -1.0, 0.0, 1.0, 3.0])
    wider = _widen_quantiles(quantiles, rows_of([-2.0, 5.0]), Real())
    assert torch.allclose(wider, rows_of([-3.0, -1.0, 0.0, 1.0, 5.0 * MARGIN]))
    counts = _widen_quantiles(quantiles + 10, rows_of([9.0, 20.0]), Counts())
    assert torch.allclose(counts[:, -1], rows_of(10 + 10 * MARGIN))


def test_pieces_are_gathered_in_the_order_of_their_rows():
    class Part:
        def __init__(self, *rows):
            self.rows = torch.tensor(rows)

    values = gather_rows([Part(2, 0), Part(1)], [rows_of([2.0], [0.0]), rows_of([1.0])])
    assert values.flatten().tolist() == [0.0, 1.0, 2.0]
