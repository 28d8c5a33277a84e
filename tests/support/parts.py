"""Networks whose result has several parts, one of which holds the outputs."""

import types
from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from support.plain_network import X, net


@dataclass
class Answer:
    hidden: torch.Tensor
    logits: torch.Tensor
    loss: float | None = None


@dataclass(slots=True)
class Slotted:
    hidden: torch.Tensor
    logits: torch.Tensor


Named = namedtuple("Named", "hidden logits")


FORMS = {
    "dataclass": (Answer, "logits"),
    "slots": (Slotted, "logits"),
    "named": (Named, "logits"),
    "named by index": (Named, 1),
    "dict": (lambda hidden, logits: {"hidden": hidden, "logits": logits}, "logits"),
    "object": (
        lambda hidden, logits: types.SimpleNamespace(hidden=hidden, logits=logits),
        "logits",
    ),
    "tuple": (lambda hidden, logits: (hidden, logits), 1),
    "list": (lambda hidden, logits: [hidden, logits], -1),
    "function": (
        lambda hidden, logits: (hidden, {"logits": logits}),
        lambda answer: answer[1]["logits"],
    ),
}


class Parts(nn.Module):
    """The outputs of `net` among other things; a linear layer comes after them."""

    def __init__(self, form):
        super().__init__()
        self.inner, self.form = net(2), form
        self.other = nn.Linear(4, 2).double()

    def forward(self, x):
        hidden = self.inner[:2](x)
        logits = self.inner[2](hidden)
        return FORMS[self.form][0](self.other(hidden), logits)


CLASSES = torch.arange(30) % 2


def in_parts(form, weights, structure="dense", **more):
    options = {
        "likelihood": L.Categorical(),
        "gaussian": "laplace",
        "prior": priors.Gaussian(precision=30.0),
        "structure": structure,
        **more,
    }
    if weights == "all":
        weights = ["inner.0.weight", "inner.0.bias", "inner.2.weight", "inner.2.bias"]
    plain = ssla.fit(
        net(2),
        (X, CLASSES),
        weights=[name[6:] for name in weights] if type(weights) is list else weights,
        **options,
    )
    return ssla.fit(
        Parts(form), (X, CLASSES), weights=weights, output=FORMS[form][1], **options
    ), plain
