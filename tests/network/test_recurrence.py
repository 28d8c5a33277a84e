"""Recurrent layers step by step: the answers of torch's fused functions."""

import itertools

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.network.watch import Probe

KINDS = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_is_that_of_torch(kind, dtype):
    torch.manual_seed(0)
    for layers, bias, both, batch_first, started in itertools.product([1, 2], *[[False, True]] * 4):
        layer = (
            KINDS[kind](
                3, 4, num_layers=layers, bias=bias, bidirectional=both, batch_first=batch_first
            )
            .to(dtype)
            .eval()
        )
        x = torch.randn(5, 6, 3, dtype=dtype)
        rows = 5 if batch_first else 6
        start = torch.randn(2, layers * (1 + both), rows, 4, dtype=dtype)
        given = (None,) if not started else ((start[0], start[1]) if kind == "LSTM" else start[0],)
        with torch.no_grad():
            expected = layer(x, *given)
            with Probe() as probe:
                found = layer(x, *given)
        tolerance = 1e-6 if dtype == torch.float32 else 1e-13
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        times = 6 if batch_first else 5
        assert len(probe.calls) == layers * (1 + both) * (1 + times)


class Packed(nn.Module):
    """A packed sequence, which stays with torch's own function."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.GRU(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x):
        lengths = torch.full((len(x),), x.shape[1] - 1)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.head(self.body(packed)[1][-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_packed_sequences_are_diagonal(dtype):
    torch.manual_seed(0)
    model, x, y = Packed().to(dtype).eval(), torch.randn(8, 4, 2, dtype=dtype), torch.arange(8) % 2
    post = ssla.fit(
        model,
        (x, y),
        likelihood=L.Categorical(),
        weights="all",
        structure="kfac",
        prior=priors.Gaussian(2.0),
        gaussian="laplace",
    )
    assert post.report.blocks == {"body": "diag", "head": "kfac"}
    assert bool(torch.isfinite(post.predict(x).probs).all())
