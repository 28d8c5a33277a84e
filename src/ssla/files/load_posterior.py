"""A posterior from a file that `save_posterior` wrote.

What the file holds is validated before it is used. Stands above `ssla.posterior`: it makes one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ssla._checks import in_plain_torch, one_of
from ssla.curvature import Operator
from ssla.curvature.memory import DEFAULT_BUDGET
from ssla.files.container import FileError, guarded, read
from ssla.files.encoding import NAMES, Decoder
from ssla.files.save_posterior import KIND
from ssla.likelihoods import Likelihood
from ssla.network import (
    VALUES,
    Opening,
    Output,
    check_mode,
    checked_output,
    difference,
    fingerprint,
    reopen,
)
from ssla.posterior import Posterior
from ssla.priors import CONVENTIONS, Prior
from ssla.report import AS_IS, LAPLACE, POLISH, TILT, VARIATIONAL, Report
from ssla.values import Statistics, Variational

MODES = (POLISH, TILT, AS_IS)
LARGEST = 1e100  # of a number in a file: squares and products of such numbers do not overflow


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
    content, tensors = read(path, KIND)
    return unpack(content, tensors, model, Path(path), likelihood, prior, checked_output(output))


def unpack(
    content: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    model: nn.Module,
    source: Path,
    likelihood: Likelihood | None = None,
    prior: Prior | None = None,
    output: Output = None,
) -> Posterior:
    """The posterior, validated and factorised."""
    decoder = Decoder(tensors)
    with guarded(source):
        stated = content["network"]
        opening = decoder.decode(content["opening"], Opening)
        budget = content["memory_budget"]
        if not isinstance(stated, dict):
            raise TypeError("the network has no fingerprint")
    check_mode(model)  # an error of the module is not a FileError
    with guarded(source):
        _compare(stated, model, source)
        stored = content.get("output")  # none if the result is f
        if not isinstance(stored, dict) and output is not None and output != checked_output(stored):
            raise FileError(
                f"{source} was saved with output={stored!r}, but output= is {output!r}. Omit it."
            )
        part = _given_or_stored(
            decoder, stored, "output", output if isinstance(stored, dict) else None, source
        )
        network = reopen(model, opening, checked_output(part))
        report = decoder.decode(content["report"], Report)
        posterior = Posterior(
            network,
            _given_or_stored(decoder, content["likelihood"], "likelihood", likelihood, source),
            _given_or_stored(decoder, content["prior"], "prior", prior, source),
            decoder.decode(content["theta"], Tensor),
            decoder.decode(content["statistics"], Statistics),
            report.mode,
            report,
            budget if isinstance(budget, int) and budget > 0 else DEFAULT_BUDGET,
            convention=one_of("convention", content["convention"], CONVENTIONS),
            variational=decoder.decode(content["variational"], Variational)
            if "variational" in content
            else None,
        )
        _check(posterior)
    return posterior


def _compare(stated: Mapping[str, Any], model: nn.Module, source: Path) -> None:
    """FileError if the module is not the one that was saved, with the difference."""
    unlike = difference(stated, fingerprint(model))
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


def _given_or_stored(decoder: Decoder, value: Any, what: str, given: Any, source: Path) -> Any:
    own = value.get("own") if isinstance(value, dict) else None
    if own is None:
        if given is not None:
            raise FileError(
                f"{source} contains the {what}. Omit {what}=, or use posterior.with_prior for "
                "another prior."
            )
        return decoder.decode(value)
    if given is None:
        raise FileError(
            f"The {what} of {source} is custom code ({own}), which a file cannot contain. Give it "
            f"as {what}=."
        )
    if type(given).__name__ != own:
        raise FileError(
            f"The {what} of {source} was a {own}, but {what}= is a {type(given).__name__}."
        )
    return given


def _check(posterior: Posterior) -> None:
    """ValueError for a forged file: wrong sizes or ranges, or a curvature that cannot be
    factorised.
    """
    size = posterior.network.layout.size
    if (posterior.variational is not None) != (
        posterior.gaussian == VARIATIONAL and not posterior.likelihood.quadratic
    ):
        raise ValueError("its report names another Gaussian than it holds")
    for what, tensor in (("θ̂", posterior.theta), ("the mean", posterior.mean)):
        if (
            tensor.dtype != torch.float64
            or tensor.shape != (size,)
            or not bool((tensor.abs() <= LARGEST).all())
        ):
            raise ValueError(
                f"{what} is not {size} finite numbers in float64 of at most {LARGEST:g}"
            )
    _check_report(posterior)
    posterior.likelihood.support_for(posterior.network.outputs)
    if (
        type(posterior.likelihood) in NAMES and posterior.likelihood.linear_domain
    ):  # every f is allowed, 0 too
        fisher = posterior.likelihood.fisher(
            torch.zeros(1, posterior.network.outputs, dtype=torch.float64)
        )
        if not bool(torch.isfinite(fisher).all()) or not bool(
            (fisher.diagonal(dim1=-2, dim2=-1) > 0).all()
        ):
            raise ValueError("the likelihood has no finite positive curvature")
    prior = posterior.bound_prior
    if not all(
        bool(torch.isfinite(part(posterior.theta)).all())
        for part in (prior.log_prob, prior.gradient, prior.precision)
    ):
        raise ValueError("the prior has no density at θ̂")
    for sums, operator in (
        (posterior.statistics, posterior.operator),
        (posterior.sums, posterior.covariance),
    ):
        _check_sums(sums, operator, size)
        sums.curvature.check_layers(posterior.network.layer_shapes)


def _check_sums(sums: Statistics, operator: Operator, size: int) -> None:
    """ValueError unless the sums are of `size` parameters and some data, and the operator is
    positive definite.
    """
    gradient = sums.gradient
    if (
        gradient.dtype != torch.float64
        or gradient.shape != (size,)
        or not bool((gradient.abs() <= LARGEST).all())
    ):
        raise ValueError(f"gradient is not {size} finite numbers in float64 of at most {LARGEST:g}")
    if getattr(sums.curvature, "size", size) != size:
        raise ValueError("the curvature does not belong to these parameters")
    direction = torch.linspace(
        1, 2, size, dtype=torch.float64
    )  # the same for all classes would give zero
    pushed, variances = sums.curvature.push(direction), operator.variances()
    parts = (pushed, operator.solve(direction), variances)
    if any(
        part.shape != (size,) or not bool((part.abs() <= LARGEST).all()) for part in parts
    ) or not bool((variances > 0).all()):
        raise ValueError("the curvature does not belong to these parameters")
    if sums.n < 1 or not bool(pushed.any()):
        raise ValueError("it has no data")
    if not 0 < sums.weight < math.inf or not math.isfinite(sums.log_likelihood):
        raise ValueError("the sums over the data are not finite, or have no weight")


def _check_report(posterior: Posterior) -> None:
    """ValueError unless the numbers of the report are in range and its sizes are those of the
    network.
    """
    report, network = posterior.report, posterior.network
    one_of("mode", report.mode, MODES)
    one_of("convention", report.convention, CONVENTIONS)
    if (report.parameters, report.names, report.outputs) != (
        network.layout.size,
        network.layout.names,
        network.outputs,
    ):
        raise ValueError("its report is of other parameters")
    one_of("gaussian", report.gaussian, (LAPLACE, VARIATIONAL))
    counts = (report.n - 1, report.steps, report.passes, report.rounds, report.memory)
    numbers = (report.weight, report.residual, report.residual_after, report.output_shift)
    if not all(0 <= count < 1 << 63 for count in counts) or not all(
        0 <= number < math.inf for number in numbers
    ):
        raise ValueError("a number in its report is negative or not finite")
