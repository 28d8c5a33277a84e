"""A part of the network's result as its outputs: `output=`."""

import pytest
import torch

import ssla
from ssla import likelihoods as L
from ssla import priors
from support.parts import CLASSES, FORMS, Parts, in_parts
from support.plain_network import X, net


@pytest.mark.parametrize("weights", ["last_layer", "all", ["inner.0.weight", "inner.2.weight"]])
@pytest.mark.parametrize("form", FORMS)
def test_a_part_of_the_answer_is_the_output(form, weights, tmp_path):
    post, plain = in_parts(form, weights, mode="polish")
    for refit in ("output", "weights"):
        assert torch.allclose(
            post.predict(X[:3], refit=refit).probs,
            plain.predict(X[:3], refit=refit).probs,
            atol=1e-9,
        )
    assert ("logits" in post.report.output) == (FORMS[form][1] == "logits")
    assert all(
        name.startswith("inner.") for name in post.report.names
    )  # and not the linear layer that comes last
    post.save(tmp_path / "p")
    again = {"output": FORMS[form][1]} if form == "function" else {}
    assert torch.equal(
        ssla.load(tmp_path / "p", Parts(form), **again).predict(X).probs, post.predict(X).probs
    )


@pytest.mark.parametrize("structure", ["kfac", "diag", "low_rank"])
@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_a_part_of_the_answer_with_every_structure(structure, weights):
    post, plain = in_parts("dataclass", weights, structure)
    assert torch.allclose(post.marginal(X).covariance, plain.marginal(X).covariance, atol=1e-10)


def test_answers_in_parts_name_their_parts():
    options = {"likelihood": L.Categorical(), "prior": priors.Gaussian(), "gaussian": "laplace"}
    fit = lambda form, **more: ssla.fit(Parts(form), (X, CLASSES), **options, **more)
    with pytest.raises(
        TypeError,
        match=r"returned a Answer with the tensors 'hidden', 'logits'. "
        "Name the part.*output='hidden'",
    ):
        fit("dataclass")
    with pytest.raises(TypeError, match=r"returned a tuple with the tensors 0, 1.*output=0"):
        fit("tuple")
    with pytest.raises(
        ValueError,
        match=r"no part 'logit': it is a dict with the tensors 'hidden', 'logits'\. Name one",
    ):
        fit("dict", output="logit")
    for index in (2, -3):
        with pytest.raises(
            ValueError, match=f"no part {index}: it is a tuple with the tensors 0, 1"
        ):
            fit("tuple", output=index)
    with pytest.raises(ValueError, match=r"no part 0: it is a dict"):
        fit("dict", output=0)
    with pytest.raises(
        ValueError, match=r"function output= failed on the network's result, a dict .*KeyError"
    ):
        fit("dict", output=lambda answer: answer["logit"])
    with pytest.raises(
        TypeError,
        match=r"one tensor of outputs, but returned a float without tensors.*output=lambda",
    ):
        fit("dict", output=lambda answer: 1.0)
    for output in (0, "logits"):  # an index would be one row of a tensor
        with pytest.raises(
            ValueError, match=r"returns one tensor, which has no part .*Omit output="
        ):
            ssla.fit(net(2), (X, CLASSES), output=output, **options)
    for output in (True, 1.5, ["logits"]):
        with pytest.raises(
            TypeError, match=r"output must name the part of the network's result.*'logits'"
        ):
            ssla.fit(net(2), (X, CLASSES), output=output, **options)
        with pytest.raises(TypeError, match=r"output must name the part"):
            ssla.estimate_cost(net(2), 10, output=output)
