"""`ssla.fit`: from a trained network and its data to a Posterior.

Stands above `ssla.posterior`: it makes one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributions import Distribution

from ssla._checks import in_plain_torch
from ssla.curvature import Structure
from ssla.curvature.memory import DEFAULT_BUDGET
from ssla.data import held_out, open_source
from ssla.fitting import Reader, announced, checked_budget, checked_job, checked_weights, shared
from ssla.fitting.tuning import fitted
from ssla.fitting.variational import ROUGH
from ssla.likelihoods import Likelihood
from ssla.network import LAST_LAYER, Output, checked_output
from ssla.posterior import Posterior
from ssla.priors import Prior


@in_plain_torch
def fit(
    model: nn.Module,
    data: Any,
    *,
    likelihood: Likelihood,
    prior: Prior | Distribution | None = None,
    validation: Any = None,
    weights: str | list[str] | tuple[str, ...] = LAST_LAYER,
    structure: str | Structure = "auto",
    mode: str | None = None,
    gaussian: str | None = None,
    output: Output = None,
    memory_budget: int | None = None,
    progress: bool | None = None,
) -> Posterior:
    """Fit a Laplace posterior to a trained network, ready to predict distributions.

    Parameters
    ----------
    model:
        The trained network, in eval mode. It is copied, never written to.
    data:
        The training data: a DataLoader, (X, y) or (X, y, row weights) as tensors or arrays, or any
        iterable of such batches. Inputs may be tensors, tuples (called as model(*x)) or dicts
        (model(**x)). Row weights are frequencies: a row of weight 2 counts as if it were there
        twice.
    likelihood:
        What y is given the outputs: `ssla.likelihoods.Gaussian(noise="estimate")`, `Poisson()`, …
    prior:
        Over the free parameters: `ssla.priors.Gaussian(precision=1.0)`, …, or a torch.distributions
        distribution. If not given, a Gaussian with one precision for each layer, by the evidence
        and the scale of the trained weights; biases are centred on their trained values.
    validation:
        Rows that the network has not seen, in any form that `data` has, or a share of `data` to
        hold out (0.2), which says less if the network was trained on them. They choose the
        dispersion of the likelihood (noise, temperature of classes, overdispersion of counts; a
        given value is where the search starts), and what is not given of prior, mode and gaussian.
        Training rows cannot show that a network is over-confident. `posterior.report` says what
        these rows found.
    weights:
        "last_layer" (its bias included), "all" (frozen parameters, requires_grad=False, are left
        out and noted in the report; where all are frozen, all are taken), a module's name, or a
        list of parameter names.
    structure:
        "auto" (dense where it takes little time and memory, kfac otherwise; the report says which,
        and why), "dense", "kfac", "diag" or "low_rank", or an object such as
        `ssla.structures.LowRank(rank=50)`.
    mode:
        "polish" (θ̂ moves to the mode), "tilt" (the trained weights count as the mode) or "as_is".
        By default polish for a last layer, tilt otherwise. The last layer of a classifier without
        `prior` is polished only if it is not trained; the report says which of the two was chosen,
        and why.
    gaussian:
        "variational": the Gaussian nearest to the posterior in KL divergence, found in a few
        passes; or "laplace": the one at the mode, with the curvature there. By default variational,
        but for Gaussian noise, where they are the same.
    output:
        Which part of the network's answer holds the outputs, where it is not one tensor: a key or
        attribute ("logits"), an index (0), or a function of the answer.
    memory_budget:
        Bytes that intermediate results may take (1 GiB if not given).
    progress:
        Show how far the fit is: True (a bar; needs tqdm), False, or None: after two seconds, on a
        terminal only.

    Under an initialised `torch.distributed` group every rank gives its own shard, and all get the
    same posterior of all of them (see `ssla.distributed`).

    Example
    -------
    >>> noisy = ssla.likelihoods.Gaussian(noise="estimate")
    >>> post = ssla.fit(model, (X, y), likelihood=noisy)   # doctest: +SKIP
    >>> post.predict(X_new).interval(0.95)                 # doctest: +SKIP
    """
    with announced():
        budget, part = checked_budget(memory_budget), checked_output(output)
        training, unseen = held_out(data, validation)
        reader = Reader(training, model, checked_weights(weights), budget, progress, output=part)
        job = checked_job(
            Posterior, shared(reader), likelihood, prior, structure, mode, gaussian, budget
        )
    return fitted(job, unseen, isinstance(validation, float))


def fit_at_mode(
    model: nn.Module,
    data: Any,
    likelihood: Likelihood,
    prior: Prior,
    weights: str = LAST_LAYER,
    structure: str | Structure = "dense",
    rough: bool = False,
) -> Posterior:
    """As `fit` with a prior, but a last layer is polished where it has a mode, trained or not.

    For networks of which held-out rows choose the prior afterwards. rough: with a variational
    Gaussian of a lower accuracy, which is enough to choose a prior.
    """
    with announced():
        reader = Reader(open_source(data), model, weights, DEFAULT_BUDGET)
        job = checked_job(
            Posterior, shared(reader), likelihood, prior, structure, None, None, DEFAULT_BUDGET
        )
    return replace(job, judges=False, tolerance=ROUGH if rough else None).run()
