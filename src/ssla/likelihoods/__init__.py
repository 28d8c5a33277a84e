"""Likelihoods: log p(y|f), its score and curvature, in output space."""

from ssla.likelihoods.classes import Bernoulli, Categorical
from ssla.likelihoods.counts import NegativeBinomial, Poisson
from ssla.likelihoods.custom import Custom, custom
from ssla.likelihoods.gaussian import Gaussian
from ssla.likelihoods.heteroscedastic import HeteroscedasticGaussian
from ssla.likelihoods.likelihood import (
    BoundaryRefit,
    Derivatives,
    Likelihood,
)
from ssla.likelihoods.student_t import StudentT
from ssla.likelihoods.tempered import Tempered

__all__ = [
    "Bernoulli",
    "BoundaryRefit",
    "Categorical",
    "Custom",
    "Derivatives",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "NegativeBinomial",
    "Poisson",
    "StudentT",
    "Tempered",
    "custom",
]
