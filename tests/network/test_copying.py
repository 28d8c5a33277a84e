"""The private copy: parallel wrappers are replaced, compiled modules refused."""

import warnings

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from support.plain_network import FIT, X, Y, net


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, lambda inner: nn.Sequential(nn.DataParallel(inner[:2]), inner[2])]
)
@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_data_parallel_modules_answer_as_the_module_inside(wrap, weights, tmp_path):
    options = {
        "weights": weights,
        "likelihood": L.StudentT(df=4.0, scale=0.5),
        "gaussian": "laplace",
        "prior": priors.Gaussian(precision=30.0),
        "mode": "polish",
    }
    model = wrap(net())
    post, plain = ssla.fit(model, (X, Y), **options), ssla.fit(net(), (X, Y), **options)
    for refit in ("output", "weights"):
        assert torch.allclose(
            post.predict(X[:2], refit=refit).mean,
            plain.predict(X[:2], refit=refit).mean,
            atol=1e-10,
        )
    assert all("module." in name for name in post.report.names) or not isinstance(
        model, nn.DataParallel
    )
    post.save(tmp_path / "p")
    assert torch.equal(ssla.load(tmp_path / "p", model).predict(X).mean, post.predict(X).mean)
    if isinstance(model, nn.DataParallel):
        named = ssla.fit(model, (X, Y), **{**options, "weights": ["module.2.weight"]})
        assert named.report.names == ("module.2.weight",)
    assert isinstance(model, nn.DataParallel) or isinstance(
        model[0], nn.DataParallel
    )  # not changed


@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_compiled_modules_are_refused_in_words(weights):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        whole = [torch.jit.script(net()), torch.jit.trace(net(), X[:2])]
        part = nn.Sequential(torch.jit.script(net()), nn.Linear(1, 1).double())
    for model in whole:
        with pytest.raises(
            ValueError,
            match=r"The network is a torch.jit module.*Give the nn.Module that was scripted",
        ):
            ssla.fit(model, (X, Y), weights=weights, **FIT)
    with pytest.raises(
        ValueError, match=r"The network's part '0' is a torch.jit module.*compute its outputs once"
    ):
        ssla.fit(part, (X, Y), weights=weights, **FIT)
