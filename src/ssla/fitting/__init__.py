"""`fit`: from a trained network and its data to a Posterior.

One pass collects the sums at the trained θ. What happens next is the `mode` (method.md section 4):

  polish   Newton steps to the mode of ℓ_D + log π. With Gaussian noise and a last layer the objective is
           quadratic, so the mode follows from the sums: no further pass. Otherwise each step is a pass
           (over cached features while they fit the memory budget).
  tilt     θ̂ stays; the residual gradient is subtracted from the objective, so that θ̂ is its mode.
  as_is    θ̂ stays and is taken for the mode; a large residual gradient is warned about.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributions import Distribution

from ssla._checks import one_of
from ssla.data import Source, open_source
from ssla.fitting.job import Job
from ssla.fitting.passes import Data, Reader
from ssla.fitting.ranks import announced, shared
from ssla.likelihoods import Gaussian, Likelihood, Tempered
from ssla.network import LAST_LAYER, Output, checked_output
from ssla.posterior import AS_IS, POLISH, TILT, Posterior, Statistics
from ssla.priors import Gaussian as GaussianPrior
from ssla.priors import Prior, as_prior
from ssla.structures import Structure, resolve
from ssla.structures.memory import DEFAULT_BUDGET

__all__ = ["collect", "fit", "polish_again"]


def fit(
    model: nn.Module,
    data: Any,
    *,
    likelihood: Likelihood,
    prior: Prior | Distribution | None = None,
    weights: str | list[str] | tuple[str, ...] = LAST_LAYER,
    structure: str | Structure = "dense",
    mode: str | None = None,
    output: Output = None,
    memory_budget: int | None = None,
    progress: bool = False,
) -> Posterior:
    """Fit a Laplace posterior to a trained network, ready to predict distributions.

    Parameters
    ----------
    model:
        The trained network, in eval mode. It is copied, never written to.
    data:
        The training data: a DataLoader, (X, y) or (X, y, row weights) as tensors or arrays, or any iterable of
        such batches. Inputs may be tensors, tuples (called as model(*x)) or dicts (model(**x)). Row weights are frequencies:
        a row of weight 2 counts as if it were there twice.
    likelihood:
        What y is given the outputs: `ssla.likelihoods.Gaussian(noise="estimate")`, `Poisson()`, …
    prior:
        Over the free parameters; `ssla.priors.Gaussian(precision=1.0)` if not given. A torch.distributions distribution will do.
    weights:
        "last_layer" (its bias included), "all" (frozen parameters, requires_grad=False, are left out and noted in the report;
        where all are frozen, all are taken), a module's name, or a list of parameter names.
    structure:
        "dense", "kfac", "diag" or "low_rank", or an object such as `ssla.structures.LowRank(rank=50)`.
    mode:
        "polish", "tilt" or "as_is"; by default polish for a last layer, tilt otherwise.
    output:
        Which part of the network's answer holds the outputs, where it is not one tensor: a key or attribute ("logits"), an index
        (0), or a function of the answer.
    memory_budget:
        Bytes that intermediate results may take (1 GiB if not given).
    progress:
        Show a bar (needs tqdm).

    Under an initialised `torch.distributed` group every rank gives its own shard, and all get the same posterior of all of them
    (see `ssla.distributed`).

    Example
    -------
    >>> post = ssla.fit(model, (X, y), likelihood=ssla.likelihoods.Gaussian(noise="estimate"))   # doctest: +SKIP
    >>> post.predict(X_new).interval(0.95)                                                       # doctest: +SKIP
    """
    with announced():
        budget = checked_budget(memory_budget)
        reader = Reader(open_source(data), model, checked_weights(weights), budget, progress, output=checked_output(output))
        job = checked_job(shared(reader), likelihood, prior, structure, mode, budget)
    return job.run()


def checked_job(
    data: Data,
    likelihood: Likelihood,
    prior: Prior | Distribution | None,
    structure: str | Structure,
    mode: str | None,
    budget: int,
) -> Job:
    """The work, if its parts are what they should be."""
    if not isinstance(likelihood, type) and not isinstance(likelihood, Likelihood):
        raise TypeError(
            f"likelihood must be an object such as ssla.likelihoods.Gaussian(noise='estimate'), but is {likelihood!r}."
        )
    if isinstance(likelihood, type):
        raise TypeError(f"likelihood must be an object, but is the class {likelihood.__name__}. Write {likelihood.__name__}(…).")
    if isinstance(likelihood, Tempered) and isinstance(likelihood.base, Gaussian) and likelihood.base.estimated:
        raise ValueError("Tempered(Gaussian(noise='estimate')) is not defined: give the base's noise as a number.")
    if mode is not None:
        one_of("mode", mode, (POLISH, TILT, AS_IS))
    return Job(data, likelihood, GaussianPrior() if prior is None else as_prior(prior), resolve(structure), mode, budget)


def checked_weights(weights: Any) -> str | list[str] | tuple[str, ...]:
    if not isinstance(weights, str | list | tuple):
        raise TypeError(f"weights must be 'last_layer', 'all', a module's name or a list of parameter names, but is {weights!r}.")
    return weights


def checked_budget(memory_budget: Any) -> int:
    if memory_budget is not None and (isinstance(memory_budget, str) or memory_budget <= 0):
        raise ValueError(f"memory_budget must be a number of bytes, for example 2**30, but is {memory_budget!r}.")
    return DEFAULT_BUDGET if memory_budget is None else int(memory_budget)


def collect(posterior: Posterior, data: Any) -> tuple[Statistics, Source]:
    """The sums of more data at a posterior's θ̂, in one pass, and where they were read."""
    budget = posterior.memory_budget
    with announced():
        reader = Reader(open_source(data), None, LAST_LAYER, budget, opened=posterior.network)
    job = Job(shared(reader), posterior.likelihood, posterior.prior, posterior.statistics.curvature, AS_IS, budget)
    return job.sums_at(posterior.theta), reader.source


def polish_again(posterior: Posterior, prior: Prior, data: Any) -> Posterior:
    """The same network and likelihood polished under another prior, on the training data."""
    size, budget = posterior.theta.numel(), posterior.memory_budget
    with announced():
        reader = Reader(open_source(data), None, LAST_LAYER, budget, opened=posterior.network)
    structure = posterior.statistics.curvature.zero(size)
    return Job(shared(reader), posterior.likelihood, prior, structure, POLISH, budget).run()
