"""The private copy: parallel wrappers are replaced, compiled modules refused."""

import warnings

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.network.copying import copy_privately
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


def batch_norm_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def test_the_copy_has_the_same_values_and_shares_none_of_them():
    model = batch_norm_net()
    copy = copy_privately(model)
    assert copy is not model
    ours, theirs = copy.state_dict(), model.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value)
        assert ours[name].data_ptr() != value.data_ptr()
    assert not any(p.requires_grad for p in copy.parameters())
    assert all(p.requires_grad for p in model.parameters())
    assert copy.training == model.training


def test_tied_parameters_stay_tied_in_the_copy():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    copy = copy_privately(model)
    assert copy[1].weight is copy[0].weight
    assert copy[0].weight is not model[0].weight


@pytest.mark.parametrize("place", ["outside", "inside", "both"])
def test_parallel_wrappers_are_replaced_under_the_same_names(place):
    inner = batch_norm_net().eval()
    if place in ("inside", "both"):
        inner = nn.Sequential(nn.DataParallel(inner[:2]), inner[2])
    model = nn.DataParallel(inner) if place in ("outside", "both") else inner
    copy = copy_privately(model)
    assert not any(isinstance(layer, nn.DataParallel) for layer in copy.modules())
    assert list(copy.state_dict()) == list(model.state_dict())
    assert [type(layer).__name__ for layer in copy.modules()] == [
        type(layer).__name__ for layer in model.modules()
    ]
    assert torch.equal(copy(X.float()), model(X.float()))


def test_a_module_that_cannot_be_copied_is_refused_with_the_reason():
    model = batch_norm_net()
    model.kept = model[0].weight * 2  # has a graph
    with pytest.raises(ValueError, match=r"could not be copied \(.*Remove tensors with gradients"):
        copy_privately(model)
