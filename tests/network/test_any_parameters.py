"""Any free parameters: half precision, and layers that differ from backpropagation."""

import copy

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from support.networks import data, trained

GAUSSIAN = L.Gaussian(noise=0.3)
X, Y = data(60)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("structure", ["kfac", "diag", "dense", "low_rank"])
def test_half_precision_keeps_its_structure_and_the_variances_of_double(dtype, structure):
    net = trained().to(dtype)
    options = {
        "likelihood": GAUSSIAN,
        "prior": priors.Gaussian(),
        "weights": "all",
        "structure": structure,
    }
    half = ssla.fit(net, (X, Y), **options)
    exact = ssla.fit(
        copy.deepcopy(net).double(), (X.to(dtype).double(), Y), **options
    )  # the same numbers, rounded nowhere else
    assert half.report.blocks == exact.report.blocks == dict.fromkeys(("0", "2"), structure)
    for scale in (1, 300):  # squares of the larger are beyond what float16 holds
        x = (scale * X[:20]).to(dtype)
        (f, K), (g, Q) = half.state.outputs_at(x), exact.state.outputs_at(x.double())
        eps = torch.finfo(dtype).eps
        assert ((f - g).abs().max() / g.abs().max()) < 4 * eps
        assert ((K - Q).abs().max() / Q.abs().max()) < 4 * eps


def test_layers_that_disagree_with_backpropagation_are_noted():
    class Odd(nn.Module):
        """Uses its weight once more where no watcher of torch functions sees it."""

        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

        def forward(self, x):
            with torch._C.DisableTorchFunction():
                more = x @ self.body.weight.mT
            return self.head((self.body(x) + more).tanh())

    post = ssla.fit(
        Odd().double().eval(),
        (X, Y),
        likelihood=GAUSSIAN,
        prior=priors.Gaussian(),
        weights="all",
        structure="kfac",
    )
    assert post.report.blocks == {"body": "diag", "head": "kfac"}
    assert any(
        "do not agree with backpropagation" in note and "body.weight" in note
        for note in post.report.notes
    )
