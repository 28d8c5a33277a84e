"""Digests: equal for equal content, and for nothing else."""

from functools import partial

import numpy as np
import pytest
import torch

from ssla.maths.digests import digest

SCALE = 2.0


def closing_over(value, other=0):
    return lambda y: y * value + other


class Plain:
    def __init__(self, **held):
        vars(self).update(held)


@pytest.mark.parametrize(
    ("make", "same", "unlike"),
    [
        (lambda v: v, (1, 1.0), (1.0, 1.0 + 2**-52)),
        (lambda v: torch.tensor(v), ([1.0, 2.0], [1.0, 2.0]), ([1.0, 2.0], [2.0, 1.0])),
        (lambda v: dict(v), ([("a", 1), ("b", 2)], [("b", 2), ("a", 1)]), ([("a", 1)], [("a", 2)])),
        (closing_over, (0.1, 0.1), (0.1, 0.2)),
        (lambda v: [lambda y: y + SCALE, lambda y: y - SCALE][v], (0, 0), (0, 1)),
        (lambda v: partial(closing_over, v), (1, 1), (1, 2)),
        (lambda v: Plain(a=v, b=torch.ones(2)), (1, 1), (1, 2)),
        (lambda v: torch.distributions.Normal(0.0, v), (1.0, 1.0), (1.0, 1.1)),
        (lambda v: [torch.softmax, torch.sigmoid][v], (0, 0), (0, 1)),
        (lambda v: np.float32(v), (0.5, 0.5), (0.5, 0.25)),
        (lambda v: np.arange(v), (3, 3), (3, 4)),
    ],
)
def test_digests_are_equal_for_equal_content_only(make, same, unlike):
    assert digest(make(same[0])) == digest(make(same[1]))
    assert digest(make(unlike[0])) != digest(make(unlike[1]))


def test_digests_leave_out_caches_and_end_on_cycles():
    one, two = (
        torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2)) for _ in range(2)
    )
    assert two.precision_matrix.shape == (2, 2)
    assert digest(one) == digest(two)
    ring = Plain()
    ring.me = ring
    assert digest(ring) == digest(ring)
