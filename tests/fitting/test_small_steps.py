"""Small steps of a fit, each alone: what they return for values that can be checked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import ssla
from ssla.curvature.dense import Dense
from ssla.distributed.engines import _merge_tree
from ssla.fitting.guard import warn_on_validation_rows
from ssla.fitting.mode import NoModeError, Polish
from ssla.fitting.passes import Chunk, Reader, thin_reader
from ssla.fitting.price import AIM, _choose_next_factor
from ssla.fitting.ranks import read_same_rows
from ssla.fitting.sums import factorise_for_uphill_step
from ssla.fitting.tuning import _choose_parabola_step
from ssla.fitting.watching import Spread, TargetRange
from ssla.values import join_chunks


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_a_merge_tree_keeps_the_order_of_the_shards(count):
    texts = [str(k) for k in range(count)]
    assert _merge_tree(texts, lambda a, b: a + b) == "".join(texts)


def test_without_a_group_rows_are_read_once_and_not_compared():
    assert read_same_rows(lambda: [1, 2], digest_of=lambda rows: 1 / 0) == [1, 2]


def test_a_parabola_step_ends_at_the_top_or_leaves_a_middle_that_is_known():
    assert _choose_parabola_step(0.0, 1.0, 3.0, -4.0, -1.0, -1.0) == pytest.approx(2.0)
    assert _choose_parabola_step(0.0, 1.0, 2.0, -1.0, 0.0, -1.0) == pytest.approx(1 - 0.3)
    assert _choose_parabola_step(0.0, 1.0, 3.0, 0.0, 1.0, 3.0) == pytest.approx(1 + 0.3 * 2)


def test_the_next_factor_aims_below_the_limit():
    # One price alone: inversely proportional to the factor.
    assert _choose_next_factor({1.0: 0.02}, 0.01) == pytest.approx(2 / AIM)
    # A price below the limit bounds the step.
    assert _choose_next_factor({1.0: 0.02, 3.0: 0.002}, 0.01) < 3.0


def test_chunks_join_to_all_rows_and_none_to_no_rows():
    f, K = torch.ones(2, 3), torch.ones(2, 3, 3)
    marginal = join_chunks(3, [(f, K), (2 * f, K)])
    assert marginal.mean.shape == (4, 3)
    assert marginal.mean.dtype == torch.float64
    assert join_chunks(3, []).covariance.shape == (0, 3, 3)


def test_a_constant_target_is_one_of_numbers():
    y = torch.tensor([2.0, 2.0])
    numbers = TargetRange(low=y.amin(0), high=y.amax(0))
    assert numbers.has_constant_target
    classes = TargetRange(low=y.long().amin(0), high=y.long().amax(0))
    assert not classes.has_constant_target
    assert not TargetRange().has_constant_target


def test_spreads_of_two_chunks_merge_to_that_of_all_rows():
    generator = torch.Generator().manual_seed(0)
    y, f = torch.randn(2, 9, 1, dtype=torch.float64, generator=generator)

    def spread_of(rows: slice) -> Spread:
        return Spread.from_chunk(y[rows], f[rows], None, 1e-16, 1e-16 * f[rows].abs())

    merged = spread_of(slice(0, 4)).merge(spread_of(slice(4, None)))
    expected = spread_of(slice(None))
    torch.testing.assert_close(merged.mean, expected.mean)
    torch.testing.assert_close(merged.squares, expected.squares)
    torch.testing.assert_close(merged.missed, expected.missed)


def test_a_thinned_reader_without_features_is_the_reader_itself():
    chunk = Chunk(torch.zeros(4, 1), torch.zeros(4), None, 0.0, None, None)
    reader = Reader(None, None, "last_layer", 1, kept=[chunk])
    assert thin_reader(reader, 1) is reader


def test_the_guard_warns_of_a_loss_beyond_two_standard_errors():
    weights = torch.ones(100, dtype=torch.float64)
    plug_in = torch.linspace(-1, 0, 100, dtype=torch.float64)
    warn_on_validation_rows(plug_in + 0.1, plug_in, weights)
    with pytest.warns(UserWarning, match=f"{0.5 + math.log(2):.4g} against 0.5 a row"):
        warn_on_validation_rows(plug_in - math.log(2), plug_in, weights)


def test_only_the_positive_part_of_an_indefinite_diagonal_prior_is_factorised():
    curvature = Dense(matrix=torch.diag(torch.tensor([1.0, 2.0, 3.0]).double()), dual=False)
    convex = torch.tensor([0.5, -4.0, 1.0], dtype=torch.float64)
    expected = curvature.with_prior(convex.clamp_min(0)).logdet()
    assert float(factorise_for_uphill_step(curvature, convex).logdet()) == float(expected)
    # A diagonal that leaves the sum positive definite is taken as it is.
    mild = torch.tensor([0.5, -1.0, 1.0], dtype=torch.float64)
    assert float(factorise_for_uphill_step(curvature, mild).logdet()) == pytest.approx(
        math.log(1.5 * 1.0 * 4.0)
    )
    with pytest.raises(ValueError, match="positive definite"):
        factorise_for_uphill_step(curvature, torch.diag(convex))


@pytest.mark.parametrize("reached", [True, False])
def test_what_polish_notes_after_tuning_is_in_the_report(reached, monkeypatch):
    """Whether the mode under the tuned prior is reached, or θ̂ stays where there is none."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, dtype=torch.float64, generator=generator)
    post = ssla.fit(
        nn.Linear(2, 1).double(),
        (x, torch.poisson(torch.exp(x[:, 0]), generator=generator)),
        likelihood=ssla.likelihoods.Poisson(),
        prior=ssla.priors.Gaussian(1.0),
        mode="polish",
    )
    find = Polish.find_mode

    def find_with_a_note(polish, *arguments):
        if not reached:
            raise NoModeError("none")
        polish.notes.append("a note of polish")
        return find(polish, *arguments)

    monkeypatch.setattr(Polish, "find_mode", find_with_a_note)
    tuned = post.tune()
    words = "a note of polish" if reached else "no mode nearby: θ̂ stays"
    assert any(words in note for note in tuned.report.notes)
    assert bool((tuned.theta == post.theta).all()) is not reached
