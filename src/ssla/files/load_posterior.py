"""Loads a posterior from a file that `save_posterior` wrote.

What the file holds is validated before it is used. This module imports `ssla.posterior`, which does
not import it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ssla._checks import check_name, in_plain_torch
from ssla.curvature import Operator
from ssla.curvature.memory import DEFAULT_BUDGET
from ssla.files.container import FileError, convert_to_file_error, read_model
from ssla.files.encoding import NAMES, Decoder
from ssla.files.save_posterior import KIND
from ssla.likelihoods import Likelihood
from ssla.network import (
    VALUES,
    Opening,
    Output,
    check_evaluation_mode,
    check_output_argument,
    describe_difference,
    fingerprint,
    reopen_network,
)
from ssla.posterior import Posterior
from ssla.priors import CONVENTIONS, Prior
from ssla.report import AS_IS, LAPLACE, POLISH, TILT, VARIATIONAL, Report
from ssla.values import Statistics, Variational

MODES = (POLISH, TILT, AS_IS)
# The largest number in a file: squares and products of such numbers do not overflow.
LARGEST = 1e100


@in_plain_torch
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    likelihood: Likelihood | None = None,
    prior: Prior | None = None,
    output: Output = None,
) -> Posterior:
    """Load a posterior that `posterior.save(path)` wrote. Its predictions have the same bits.

    model: the same network with the same weights, in eval mode; it is copied and never modified. No
    data are needed. likelihood, prior, output: needed only if the saved one was custom code
    (`likelihoods.custom(…)`, a function as output=), which a file cannot contain.

    >>> post.save("posterior")                                       # doctest: +SKIP
    >>> ssla.load("posterior", model).predict(x).interval(0.95)      # doctest: +SKIP
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            "load needs the network itself, a torch.nn.Module, as its second argument, but got "
            f"{type(model).__name__}."
        )
    content, tensors = read_model(path, KIND)
    return decode_posterior(
        content, tensors, model, Path(path), likelihood, prior, check_output_argument(output)
    )


def decode_posterior(
    content: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    model: nn.Module,
    source: Path,
    likelihood: Likelihood | None = None,
    prior: Prior | None = None,
    output: Output = None,
) -> Posterior:
    """Make a posterior from the content and tensors of a file, and validate it.

    model: the network, as in `load`. source: the file, for errors. likelihood, prior, output: see
    `load`; None for what the file holds. Raises FileError for content that is damaged, forged, or
    of another network, and ValueError for a module in training mode.
    """
    decoder = Decoder(tensors)
    with convert_to_file_error(source):
        stated_fingerprint = content["network"]
        opening = decoder.decode(content["opening"], Opening)
        budget = content["memory_budget"]
        if not isinstance(stated_fingerprint, dict):
            raise TypeError("the network has no fingerprint")

    check_evaluation_mode(model)  # an error of the module is not a FileError
    with convert_to_file_error(source):
        _compare_fingerprint(stated_fingerprint, model, source)
        network = reopen_network(model, opening, _choose_output(decoder, content, output, source))
        report = decoder.decode(content["report"], Report)
        likelihood_at_fit: Likelihood = _decode_or_take_given(
            decoder, content["likelihood"], "likelihood", likelihood, source
        )
        prior_at_fit: Prior = _decode_or_take_given(
            decoder, content["prior"], "prior", prior, source
        )
        theta = decoder.decode(content["theta"], Tensor)
        statistics = decoder.decode(content["statistics"], Statistics)
        convention = check_name("convention", content["convention"], CONVENTIONS)
        variational: Variational | None = None
        if "variational" in content:
            variational = decoder.decode(content["variational"], Variational)

        # A budget is a setting of this machine, not part of the answer: a bad one is replaced.
        has_budget = isinstance(budget, int) and budget > 0
        posterior = Posterior(
            network,
            likelihood_at_fit,
            prior_at_fit,
            theta,
            statistics,
            report.mode,
            report,
            budget if has_budget else DEFAULT_BUDGET,
            convention=convention,
            variational=variational,
        )
        _check_posterior(posterior)

    return posterior


def _choose_output(
    decoder: Decoder, content: Mapping[str, Any], output: Output, source: Path
) -> Output:
    """Return the argument output= with which the network is opened again.

    output: the given one, or None. A stored name or index may be given again. Raises FileError if
    the given one differs from it, or if code is missing or superfluous. source: the file, for
    errors.
    """
    stored = content.get("output")  # absent if the result of the module is f
    is_custom = isinstance(stored, dict)
    if not is_custom and output is not None:
        if output != check_output_argument(stored):
            raise FileError(
                f"{source} was saved with output={stored!r}, but output= is {output!r}. Omit it."
            )
        output = None
    return check_output_argument(_decode_or_take_given(decoder, stored, "output", output, source))


def _compare_fingerprint(stated: Mapping[str, Any], model: nn.Module, source: Path) -> None:
    """Raise FileError if the fingerprint of the module is not the stated one, with the difference.

    source: the file, for the error.
    """
    unlike = describe_difference(stated, fingerprint(model))
    if unlike == VALUES:
        raise FileError(
            f"{source} belongs to other weights of this network: it was trained further, or its "
            "weights were not loaded. Load the state_dict of the network that was fitted, then "
            "load the posterior."
        )

    if unlike:
        raise FileError(
            f"{source} belongs to another network: {unlike}. Build the module as it was when the "
            "posterior was saved."
        )


def _decode_or_take_given(decoder: Decoder, value: Any, name: str, given: Any, source: Path) -> Any:
    """Return the value that a file holds, or the given custom code.

    The given code is taken if the file holds only its class.

    value: JSON. name: of the argument, for errors. given: the argument, or None. source: the file,
    for errors. Raises FileError if code is missing, of another class, or given without need.
    """
    # "own" is the name of the class of custom code (see `save_posterior`).
    class_name = value.get("own") if isinstance(value, dict) else None
    if class_name is None:
        if given is not None:
            raise FileError(
                f"{source} contains the {name}. Omit {name}=, or use posterior.with_prior for "
                "another prior."
            )
        return decoder.decode(value)

    if given is None:
        raise FileError(
            f"The {name} of {source} is custom code ({class_name}), which a file cannot contain. "
            f"Give it as {name}=."
        )

    if type(given).__name__ != class_name:
        raise FileError(
            f"The {name} of {source} was a {class_name}, but {name}= is a {type(given).__name__}."
        )

    return given


def _check_posterior(posterior: Posterior) -> None:
    """Raise ValueError if the parts of a posterior cannot belong together, as in a forged file.

    Sizes and ranges are checked, and that the prior has a density at θ̂. An error is also raised if
    the curvature cannot be factorised.
    """
    size = posterior.network.layout.size

    # For Gaussian noise the Laplace and the variational Gaussian are one, and only one is stored.
    if (posterior.variational is not None) != (
        posterior.gaussian == VARIATIONAL and not posterior.likelihood.quadratic
    ):
        raise ValueError("its report names another Gaussian than it holds")

    _check_vector("θ̂", posterior.theta, size)
    _check_vector("the mean", posterior.mean, size)
    _check_report(posterior)
    _check_likelihood(posterior)
    prior = posterior.bound_prior
    for function in (prior.log_prob, prior.gradient, prior.precision):
        if not bool(torch.isfinite(function(posterior.theta)).all()):
            raise ValueError("the prior has no density at θ̂")

    # The sums at θ̂, and those of the variational Gaussian where there is one.
    for sums, operator in (
        (posterior.statistics, posterior.operator),
        (posterior.sums, posterior.covariance),
    ):
        _check_sums(sums, operator, size)
        sums.curvature.check_layers(posterior.network.layer_shapes)


def _is_in_range(numbers: Tensor) -> bool:
    """Return whether numbers of any shape are finite, and small enough for squares and products."""
    return bool((numbers.abs() <= LARGEST).all())


def _check_vector(name: str, vector: Tensor, size: int) -> None:
    """Raise ValueError unless a vector is (size,) in float64, with numbers in range.

    name: of the vector, for the error.
    """
    if vector.dtype != torch.float64 or vector.shape != (size,) or not _is_in_range(vector):
        raise ValueError(f"{name} is not {size} finite numbers in float64 of at most {LARGEST:g}")


def _check_likelihood(posterior: Posterior) -> None:
    """Raise ValueError for a likelihood with another number of outputs, or without curvature."""
    likelihood = posterior.likelihood
    outputs = posterior.network.outputs
    likelihood.support_for(outputs)

    # A likelihood that does not allow every f need not have a curvature at f = 0. Custom code is
    # not part of the file.
    if type(likelihood) in NAMES and likelihood.linear_domain:
        fisher = likelihood.fisher(torch.zeros(1, outputs, dtype=torch.float64))
        positive = fisher.diagonal(dim1=-2, dim2=-1) > 0
        if not bool(torch.isfinite(fisher).all()) or not bool(positive.all()):
            raise ValueError("the likelihood has no finite positive curvature")


def _check_sums(sums: Statistics, operator: Operator, size: int) -> None:
    """Raise ValueError unless the sums are of `size` parameters and some data.

    operator: the factorised curvature of these sums and the prior, which must be positive definite.
    """
    _check_vector("gradient", sums.gradient, size)
    if getattr(sums.curvature, "size", size) != size:
        raise ValueError("the curvature does not belong to these parameters")

    # Any direction with a product other than zero. Equal entries have the product zero for classes:
    # probabilities do not change if all logits grow by the same number.
    direction = torch.linspace(1, 2, size, dtype=torch.float64)
    pushed = sums.curvature.push(direction)
    variances = operator.variances()
    vectors = (pushed, operator.solve(direction), variances)
    valid = all(vector.shape == (size,) and _is_in_range(vector) for vector in vectors)
    if not valid or not bool((variances > 0).all()):
        raise ValueError("the curvature does not belong to these parameters")
    if sums.n < 1 or not bool(pushed.any()):
        raise ValueError("it has no data")
    if not 0 < sums.weight < math.inf or not math.isfinite(sums.log_likelihood):
        raise ValueError("the sums over the data are not finite, or have no weight")


def _check_report(posterior: Posterior) -> None:
    """Raise ValueError unless a posterior's report has numbers in range and the network's sizes."""
    report = posterior.report
    network = posterior.network
    check_name("mode", report.mode, MODES)
    check_name("convention", report.convention, CONVENTIONS)
    if (report.parameters, report.names, report.outputs) != (
        network.layout.size,
        network.layout.names,
        network.outputs,
    ):
        raise ValueError("its report is of other parameters")

    check_name("gaussian", report.gaussian, (LAPLACE, VARIATIONAL))

    # n must be at least 1, and the other counts at least 0.
    counts = (report.n - 1, report.steps, report.passes, report.rounds, report.memory)
    numbers = (report.weight, report.residual, report.residual_after, report.output_shift)
    if not all(0 <= count < 1 << 63 for count in counts) or not all(
        0 <= number < math.inf for number in numbers
    ):
        raise ValueError("a number in its report is negative or not finite")
