"""Workers use the same part of a result and the same free parameters as one process."""

from concurrent.futures import ThreadPoolExecutor

import torch

import ssla
from ssla import likelihoods as L
from ssla import priors
from support.networks import data, mlp
from support.parts import CLASSES, Parts
from support.plain_network import X


def test_a_part_of_the_answer_on_workers():
    options = {
        "likelihood": L.Categorical(),
        "prior": priors.Gaussian(),
        "gaussian": "laplace",
        "weights": "all",
        "output": "logits",
    }
    with ThreadPoolExecutor(2) as pool:
        found = ssla.distributed.fit(
            Parts("dict"), [(X[:12], CLASSES[:12]), (X[12:], CLASSES[12:])], client=pool, **options
        )
    alone = ssla.fit(Parts("dict"), (X, CLASSES), **options)
    assert torch.allclose(found.predict(X).probs, alone.predict(X).probs, atol=1e-10)


def test_a_frozen_body_leaves_the_last_layer_on_workers_too():
    x, y = data(60)
    net = mlp()
    net[0].requires_grad_(False)
    last = ssla.fit(net, (x, y), likelihood=L.Gaussian(noise=0.3), prior=priors.Gaussian())
    with ThreadPoolExecutor(1) as pool:
        shards = [(x[:30], y[:30]), (x[30:], y[30:])]
        many = ssla.distributed.fit(
            net,
            shards,
            client=pool,
            likelihood=L.Gaussian(noise=0.3),
            prior=priors.Gaussian(),
            weights="all",
        )
    assert torch.allclose(many.theta, last.theta, rtol=1e-10)
