"""The ascent inside a box: its line search, and where it ends."""

import pytest
import torch

from ssla.maths.bfgs import Value, _Place, _search_line, maximise_in_box


def parabola(point):
    """A function with its top at 2 in each coordinate."""
    off = point - 2
    return -0.5 * float(off @ off), -off


def place(number):
    point = torch.tensor([number], dtype=torch.float64)
    return _Place(point, Value(*parabola(point)))


LOW, HIGH = torch.tensor([-5.0]).double(), torch.tensor([5.0]).double()


@pytest.mark.parametrize(("high", "top", "at_bound"), [(5.0, 2.0, False), (1.0, 1.0, True)])
def test_the_top_of_the_box_is_found(high, top, at_bound):
    start, low = torch.zeros(3, dtype=torch.float64), torch.full((3,), -5.0, dtype=torch.float64)
    result = maximise_in_box(parabola, start, low, torch.full_like(low, high))
    assert result.converged
    assert torch.allclose(result.point, torch.full_like(low, top), atol=1e-8)
    assert result.at_bound.tolist() == [at_bound] * 3
    assert result.evaluations >= len(result.points) == len(result.values)


def test_a_step_is_halved_until_the_function_rises():
    step = torch.tensor([3.0], dtype=torch.float64)  # from 1 to 4, then to 2.5
    there, evaluations = _search_line(parabola, place(1.0), step, LOW, HIGH, 1.0, 1e-12)
    assert there.point.tolist() == [2.5]
    assert evaluations == 2


def test_no_place_is_returned_where_no_step_rises():
    step = torch.tensor([1.0], dtype=torch.float64)
    there, evaluations = _search_line(parabola, place(2.0), step, LOW, HIGH, 1.0, 0.1)
    assert there is None
    assert evaluations == 4  # 1, 1/2, 1/4 and 1/8


def test_edges_that_the_gradient_pushes_at():
    at_edge = place(5.0)  # the gradient points inwards
    assert not at_edge.find_pushed_edges(LOW, HIGH, at_rest=True).any()
    low_edge = place(2.0)  # the gradient is zero
    assert low_edge.find_pushed_edges(torch.tensor([2.0]).double(), HIGH, at_rest=True).all()
    assert not low_edge.find_pushed_edges(torch.tensor([2.0]).double(), HIGH, at_rest=False).any()
