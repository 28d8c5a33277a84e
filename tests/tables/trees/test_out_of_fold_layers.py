"""The last layer on out-of-fold predictions: its features and its start."""

import math

import torch

from ssla.tables.trees.beside_networks import average_network_outputs
from ssla.tables.trees.out_of_fold import (
    compute_log_features,
    compute_log_squares,
    fit_class_layer,
    make_linear,
)


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def test_log_squares_are_relative_to_their_mean():
    logs = compute_log_squares(double([1.0, -1.0]), double([1.0, 1.0]))
    assert torch.allclose(logs, double([math.log(1.01)] * 2))
    huge = compute_log_squares(double([1e200, -1e200]), double([1.0, 1.0]))
    assert torch.allclose(huge, logs)
    assert bool(torch.isfinite(compute_log_squares(double([0.0, 0.0]), double([1.0, 1.0]))).all())


def test_features_of_classes_are_logits_or_centred_logarithms():
    two = compute_log_features(double([[0.2, 0.8], [0.0, 1.0]]), 0.01)
    assert torch.allclose(two, double([[math.log(4)], [math.log(100)]]))
    three = compute_log_features(double([[0.2, 0.3, 0.5]]), 0.01)
    assert three.shape == (1, 3)
    assert abs(float(three.sum())) < 1e-12


def test_the_linear_layer_has_its_weights():
    layer = make_linear(double([[1.0, 2.0]]), double([3.0]))
    assert layer(double([[1.0, 1.0]])).tolist() == [[6.0]]


def test_probabilities_that_are_right_are_hardly_changed():
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(4000, generator=generator, dtype=torch.float64)
    y = (torch.rand(4000, generator=generator, dtype=torch.float64) < p).long()
    probs = torch.stack([1 - p, p], 1)
    layer = fit_class_layer(probs, y, torch.ones(4000, dtype=torch.float64))
    assert float((layer.predict(probs).probs - probs).abs().mean()) < 0.02


def test_outputs_of_networks_are_averaged_and_their_log_variance_is_bounded():
    modules = [
        make_linear(double([[0.0], [0.0]]), double([mean, log_variance]))
        for mean, log_variance in ((1.0, 50.0), (3.0, 50.0))
    ]
    mean, log_variance = average_network_outputs(modules, double([[0.0]]))
    assert mean.tolist() == [2.0]
    assert float(log_variance) < 50
