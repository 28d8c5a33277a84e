"""`fit`: from a trained network and its data to a Posterior.

One pass collects the sums at the trained θ. What happens next is the `mode` (method.md section 4):

  polish   Newton steps to the mode of ℓ_D + log π. With Gaussian noise and a last layer the objective is
           quadratic, so the mode follows from the sums: no further pass. Otherwise each step is a pass
           (over cached features while they fit the memory budget).
  tilt     θ̂ stays; the residual gradient is subtracted from the objective, so that θ̂ is its mode.
  as_is    θ̂ stays and is taken for the mode; a large residual gradient is warned about.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ssla._checks import finite, one_of
from ssla.batches import Batch, Source, open_source, split
from ssla.jacobians import Features, Jacobian
from ssla.likelihoods import Gaussian, Likelihood, Tempered
from ssla.network import LAST_LAYER, Network, open_network
from ssla.posterior import AS_IS, DEFAULT_BUDGET, POLISH, TILT, Posterior, Report, Statistics
from ssla.priors import BoundPrior, Prior
from ssla.priors import Gaussian as GaussianPrior
from ssla.structures import Dense, Kfac, Structure, resolve

MOST_NEWTON_STEPS = 200
NOISE_ROUNDS = 10
# polish ends when it is this many posterior standard deviations from the mode: Newton converges quadratically for a
# last layer; for other weights the Gauss–Newton steps converge linearly
DECREMENT_LINEAR, DECREMENT_OTHER = 1e-10, 1e-5
TRUSTED_DECREMENT = 1e-4  # so close to the mode, a gain drowns in rounding and the full step is safe
WARN_AS_IS = 0.1  # posterior standard deviations per parameter
WARN_TILT = 10.0


def fit(
    model: nn.Module,
    data: Any,
    *,
    likelihood: Likelihood,
    prior: Prior | None = None,
    weights: str | list[str] | tuple[str, ...] = LAST_LAYER,
    structure: str | Structure = "dense",
    mode: str | None = None,
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
        Over the free parameters; `ssla.priors.Gaussian(precision=1.0)` if not given.
    weights:
        "last_layer" (its bias included), "all", a module's name, or a list of parameter names.
    structure:
        "dense" or "diag", or an object.
    mode:
        "polish", "tilt" or "as_is"; by default polish for a last layer, tilt otherwise.
    memory_budget:
        Bytes that intermediate results may take (1 GiB if not given).
    progress:
        Show a bar (needs tqdm).

    Example
    -------
    >>> post = ssla.fit(model, (X, y), likelihood=ssla.likelihoods.Gaussian(noise="estimate"))   # doctest: +SKIP
    >>> post.predict(X_new).interval(0.95)                                                       # doctest: +SKIP
    """
    if not isinstance(likelihood, type) and not isinstance(likelihood, Likelihood):
        raise TypeError(
            f"likelihood must be an object such as ssla.likelihoods.Gaussian(noise='estimate'), but is {likelihood!r}."
        )
    if isinstance(likelihood, type):
        raise TypeError(f"likelihood must be an object, but is the class {likelihood.__name__}. Write {likelihood.__name__}(…).")
    if prior is not None and (isinstance(prior, type) or not hasattr(prior, "bind")):
        raise TypeError(f"prior must be an object such as ssla.priors.Gaussian(precision=1.0), but is {prior!r}.")
    if not isinstance(weights, str | list | tuple):
        raise TypeError(f"weights must be 'last_layer', 'all', a module's name or a list of parameter names, but is {weights!r}.")
    if memory_budget is not None and (isinstance(memory_budget, str) or memory_budget <= 0):
        raise ValueError(f"memory_budget must be a number of bytes, for example 2**30, but is {memory_budget!r}.")
    if isinstance(likelihood, Tempered) and isinstance(likelihood.base, Gaussian) and likelihood.base.estimated:
        raise ValueError("Tempered(Gaussian(noise='estimate')) is not defined: give the base's noise as a number.")
    if mode is not None:
        one_of("mode", mode, (POLISH, TILT, AS_IS))
    budget = DEFAULT_BUDGET if memory_budget is None else int(memory_budget)
    job = _Job(
        source=open_source(data),
        model=model,
        weights=weights,
        likelihood=likelihood,
        prior=GaussianPrior() if prior is None else prior,
        structure=resolve(structure),
        mode=mode,
        budget=budget,
        progress=progress,
    )
    return job.run()


def collect(posterior: Posterior, data: Any) -> Statistics:
    """The sums of more data at a posterior's θ̂, in one pass."""
    job = _Job(
        source=open_source(data),
        model=None,
        weights=LAST_LAYER,
        likelihood=posterior.likelihood,
        prior=posterior.prior,
        structure=posterior.statistics.curvature,
        mode=AS_IS,
        budget=posterior.memory_budget,
        progress=False,
        network=posterior.network,
    )
    return job.sums_at(posterior.theta)


@dataclass(eq=False)
class _Row:
    """What the passes need of one chunk: its Jacobian or features, targets, weights."""

    x: Any
    y: Tensor
    weights: Tensor | None
    features: Features | None
    offset: Tensor | None


@dataclass(eq=False)
class _Job:
    """One call of `fit`: the things that its passes share."""

    source: Source
    model: nn.Module | None
    weights: str | list[str] | tuple[str, ...]
    likelihood: Likelihood
    prior: Prior
    structure: Structure
    mode: str | None
    budget: int
    progress: bool
    passes: int = 0
    notes: list[str] = field(default_factory=list)
    cache: list[_Row] | None = field(default_factory=list)
    cached_bytes: int = 0
    network: Network | None = None
    raw_squares: Tensor | None = None  # squared residuals of the network as it came (C,)

    # --- the whole -------------------------------------------------------------------------

    def run(self) -> Posterior:
        estimate = isinstance(self.likelihood, Gaussian) and self.likelihood.estimated
        if estimate:
            self.likelihood = Gaussian(noise=1.0)  # sums in units of the noise; scaled once it is known
        target = _TargetRange()
        sums = self._collect(None, target)
        network = self._network
        self.raw_squares = sums.squares if isinstance(self.likelihood, Gaussian) else None
        bound = self.prior.bind(network.layout)
        mode = self.mode or (POLISH if network.linear else TILT)
        theta, steps = network.theta, 0
        if estimate:
            sums, self.likelihood = self._estimate_noise(sums, bound, polish=mode == POLISH)
        start, start_fit = sums.statistics, sums
        before = _residual(sums, bound, theta)
        if mode == POLISH:
            theta, sums, steps = self._polish(theta, sums, bound)
            if estimate and not network.linear:
                theta, sums, steps = self._settle_noise(theta, sums, steps, bound)
            self._compare_fit(start_fit, sums, theta, network.theta)
        after = _residual(sums, bound, theta)
        moved = theta - network.theta
        shift = math.sqrt(max(float(moved @ start.curvature.push(moved)), 0.0) / max(start.weight, 1e-300))
        target.note(self.notes)
        report = self._report(sums, mode, before, after, steps, shift)
        _warn(report)
        posterior = Posterior(network, self.likelihood, self.prior, theta, sums.statistics, report, self.budget)
        _ = posterior.operator  # factorise now: an indefinite curvature is an error of fit, not of predict
        return posterior

    def _settle_noise(self, theta: Tensor, sums: _Sums, steps: int, bound: BoundPrior) -> tuple[Tensor, _Sums, int]:
        """Noise and mode in turn, until the noise is that of the residuals at the mode."""
        for _ in range(NOISE_ROUNDS):
            before = sums.reference
            self.likelihood = Gaussian(noise=1.0)
            sums, self.likelihood = self._estimate_noise(self._collect(theta), bound, polish=False, theta=theta)
            theta, sums, more = self._polish(theta, sums, bound)
            steps += more
            if bool(((sums.reference / before - 1).abs() <= 1e-4).all()):
                return theta, sums, steps
        self.notes.append(f"noise and mode did not settle together in {NOISE_ROUNDS} rounds")
        return theta, sums, steps

    def _compare_fit(self, start: _Sums, end: _Sums, theta: Tensor, trained: Tensor) -> None:
        """Warn where the prior pulled the mode away from what the network had learned."""
        before, after = start.statistics, end.statistics
        if isinstance(self.likelihood, Gaussian):
            spread = (end.squares / start.squares.clamp_min(1e-300)).sqrt()
            if self.likelihood.covariance is None and self.raw_squares is not None:
                spread = (end.residual_squares(start, theta - trained) / self.raw_squares.clamp_min(1e-300)).sqrt()
            worse = float(spread.max()) > 1.5
            figure = f"the residuals grew by a factor of {float(spread.max()):.3g}"
        else:
            fall = (before.log_likelihood - after.log_likelihood) / after.weight
            worse, figure = fall > 0.2, f"the log likelihood fell by {fall:.3g} a row"
        if worse:
            message = (
                f"polish moved the network away from what it had learned: {figure}, because the prior is too strong for the "
                "scale of its weights and targets. Standardise the targets, weaken the prior "
                "(priors.Gaussian(precision=1e-4)), or use mode='tilt', which keeps your network's predictions."
            )
            self.notes.append(message)
            warnings.warn(message, UserWarning, stacklevel=5)

    def sums_at(self, theta: Tensor) -> Statistics:
        return self._collect(theta).statistics

    @property
    def _network(self) -> Network:
        assert self.network is not None
        return self.network

    def _report(self, sums: _Sums, mode: str, before: float, after: float, steps: int, shift: float) -> Report:
        layout = self._network.layout
        return Report(
            n=sums.statistics.n,
            weight=sums.statistics.weight,
            parameters=layout.size,
            names=layout.names,
            outputs=self._network.outputs,
            likelihood=repr(self.likelihood),
            structure=self.structure.name,
            blocks=self._blocks(),
            mode=mode,
            residual=before,
            residual_after=after,
            steps=steps,
            output_shift=shift,
            passes=self.passes,
            memory=self.structure.memory(layout.size),
            notes=tuple(self.notes),
        )

    def _blocks(self) -> dict[str, str]:
        """Which structure each layer got."""
        blocks = {}
        for layer, names in self._network.layout.layers().items():
            without_form = isinstance(self.structure, Kfac) and not self._network.kronecker.issuperset(names)
            blocks[layer] = "diag" if without_form else self.structure.name
        return blocks

    # --- passes over the data --------------------------------------------------------------

    def _collect(self, theta: Tensor | None, target: _TargetRange | None = None) -> _Sums:
        """One pass: the sums at θ (the trained one if None)."""
        total: _Sums | None = None
        for row in self._rows(target):
            network = self._network
            at = network.theta if theta is None else theta
            f, J = self._expand(row, at)
            if total is None:
                total = _Sums.zero(network.layout.size, self.structure, self._wants_newton())
            total = total.add(f, J, row.y, row.weights, self.likelihood)
        if total is None:
            raise ValueError("The data are empty: no batch with a row came. Check the loader, its sampler and drop_last.")
        if total.statistics.weight <= 0:
            raise ValueError("All row weights are zero, so there is nothing to learn from.")
        return total

    def _wants_newton(self) -> bool:
        """Whether polish keeps the dense observed curvature for its steps: while P² fits, unless the statistics are it."""
        polish = self.mode == POLISH or (self.mode is None and self._network.linear)
        same = isinstance(self.structure, Dense) and isinstance(self.likelihood, Gaussian)
        return polish and not same and Dense().memory(self._network.layout.size) <= self.budget

    def _expand(self, row: _Row, theta: Tensor) -> tuple[Tensor, Jacobian]:
        if row.features is not None:
            f = row.features.push(theta)
            return (f if row.offset is None else f + row.offset), row.features
        f, J = self._network.expand(row.x, theta)
        return f.double(), J.double()

    def _rows(self, target: _TargetRange | None) -> Iterator[_Row]:
        """Chunks of the data, checked and cast; from the cache when there is one."""
        if self.passes and self.cache:
            yield from self.cache
            return
        if self.passes and not self.source.repeatable:
            raise ValueError(
                "The data can be read only once (a generator), but this fit needs another pass. Give a DataLoader, a list of "
                "batches or arrays, or mode='tilt'."
            )
        self.passes += 1
        for batch in _bar(self.source, self.source.length, self.progress, f"pass {self.passes}"):
            if batch.y.shape[0] == 0:
                continue
            if self.network is None:
                self.network = self._open(batch)
            for part in split(batch, self.network.rows_at_once(self.budget)):
                row = self._prepare(part)
                if target is not None:
                    target.see(row.y, part.x)
                yield row

    def _open(self, batch: Batch) -> Network:
        assert self.model is not None
        network = open_network(self.model, self.weights, batch.x, self.structure.materialises)
        self.likelihood.support_for(network.outputs)
        need = self.structure.memory(network.layout.size)
        if need > self.budget and isinstance(self.structure, Dense):
            raise ValueError(
                f"structure='dense' with {network.layout.size:,} free parameters needs {need / 2**30:.2g} GiB, more than the "
                f"memory budget of {self.budget / 2**30:.2g} GiB. Use structure='diag', weights='last_layer', or a larger "
                "memory_budget."
            )
        return network

    def _prepare(self, batch: Batch) -> _Row:
        network = self._network
        support = self.likelihood.support_for(network.outputs)
        y = batch.y.squeeze(1) if batch.y.dim() == 2 and batch.y.shape[1] == 1 and support.kind != "vector" else batch.y
        support.check(y, network.outputs)
        y = y.to("cpu").long() if support.kind == "class" else y.to("cpu").double()
        x = network.cast(batch.x)
        weights = None if batch.weights is None else batch.weights.to("cpu").double()
        features = offset = None
        if network.linear:
            _, J = network.expand(x, network.theta)
            assert isinstance(J, Features)
            features, offset = J.double(), network.offset
            x = None
        row = _Row(x, y, weights, features, offset)
        self._remember(row)
        return row

    def _remember(self, row: _Row) -> None:
        """Keep features for further passes while they take at most half the budget."""
        if self.cache is None or self.passes > 1:
            return
        if row.features is None:
            self.cache = None
            return
        self.cached_bytes += 8 * (row.features.phi.numel() + row.y.numel())
        if self.cached_bytes > self.budget // 2:
            self.cache = None
        else:
            self.cache.append(row)

    # --- the noise -------------------------------------------------------------------------

    def _estimate_noise(
        self, sums: _Sums, bound: BoundPrior, polish: bool, theta: Tensor | None = None
    ) -> tuple[_Sums, Gaussian]:
        """σ_d² = RSS_d / (n − γ_d), γ_d = tr(S H⁻¹)_d the degrees of freedom that output d's weights use up.

        For a last layer (or one output) everything follows from the sums at unit noise, by a fixed point. Several
        outputs with all weights: one more pass at the raw residual scale, then a common correction.
        """
        network = self._network
        outputs = network.outputs
        raw = (sums.squares / sums.statistics.weight).sqrt()
        self._check_residuals(raw, sums)
        if not network.linear and outputs > 1:
            self.likelihood = Gaussian(noise=raw)
            sums = self._collect(theta)
            unit, groups = torch.ones(1, dtype=torch.float64), torch.zeros(network.layout.size, dtype=torch.long)
            squares = torch.tensor([sums.statistics.weight * outputs], dtype=torch.float64)
            rows = sums.statistics.weight * outputs
            polish = False
        else:
            unit, squares, rows = raw, sums.squares, sums.statistics.weight
            groups = torch.arange(outputs).repeat_interleave(network.layout.size // outputs)
        noise = unit.clone()
        for _ in range(200):
            scaled = sums.at_noise(noise[groups])
            precision = bound.precision(network.theta)
            operator = scaled.newton_curvature.with_prior(precision)
            used = torch.zeros_like(unit).index_add(0, groups, 1 - precision * operator.variances())
            rss = squares
            if polish:
                step = operator.solve(scaled.statistics.gradient + bound.gradient(network.theta))
                unit_gradient = sums.statistics.gradient
                change = step * (sums.newton_curvature.push(step) - 2 * unit_gradient)
                rss = squares + torch.zeros_like(unit).index_add(0, groups, change)
            free = rows - used
            if bool((free <= 1e-8 * rows).any()):
                self._refuse_noise(f"{rows:g} rows leave no degrees of freedom beside {float(used.max()):.4g} fitted parameters")
            new = (rss.clamp_min(0) / free).sqrt()
            if bool((new < 1e-8 * unit).any()):
                self._refuse_noise("the residuals vanish: the free parameters reproduce every target, or the target is constant")
            done = bool(((new - noise).abs() <= 1e-10 * noise).all())
            noise = new
            if done:
                break
        else:
            self._refuse_noise("the estimate does not settle")
        final = sums.at_noise(noise[groups])
        value = noise if unit.numel() == outputs else noise * raw
        return final, Gaussian(noise=float(value) if outputs == 1 else value)

    def _check_residuals(self, raw: Tensor, sums: _Sums) -> None:
        if sums.statistics.n < 2:
            self._refuse_noise("there is only one row")
        if bool((raw <= 1e-10 * sums.largest).any()):
            self._refuse_noise("the residuals are zero: the network reproduces the targets exactly, or the target is constant")

    def _refuse_noise(self, why: str) -> None:
        raise ValueError(f"The noise cannot be estimated: {why}. Give it as a number, likelihoods.Gaussian(noise=…).")

    # --- the mode --------------------------------------------------------------------------

    def _polish(self, theta: Tensor, sums: _Sums, bound: BoundPrior) -> tuple[Tensor, _Sums, int]:
        """Safeguarded Newton ascent of ℓ_D + log π from θ."""
        enough = DECREMENT_LINEAR if self._network.linear else DECREMENT_OTHER
        quadratic = self._network.linear and isinstance(self.likelihood, Gaussian) and isinstance(sums.newton_curvature, Dense)
        height = sums.statistics.log_likelihood + float(bound.log_prob(theta))
        for step_count in range(MOST_NEWTON_STEPS):
            gradient = sums.statistics.gradient + bound.gradient(theta)
            step = sums.newton_step(gradient, bound.precision(theta))
            decrement = float(gradient @ step)
            if decrement <= enough**2 or decrement <= 1e-15 * abs(height):
                return theta, sums, step_count
            if quadratic:
                return theta + step, sums.moved(step), 1
            trusted = self._network.linear and decrement <= TRUSTED_DECREMENT**2
            size = 1.0
            while True:
                there = theta + size * step
                trial = self._collect(there)
                new = trial.statistics.log_likelihood + float(bound.log_prob(there))
                if new >= height + 1e-4 * size * decrement - 1e-13 * abs(height) or trusted:
                    break
                size /= 2
                if size < 1e-8:
                    self.notes.append(f"polish stopped after {step_count} steps: no smaller step raises the log posterior")
                    return theta, sums, step_count
            theta, sums, height = there, trial, new
        self.notes.append(f"polish did not converge in {MOST_NEWTON_STEPS} Newton steps")
        warnings.warn(
            f"polish did not reach the mode in {MOST_NEWTON_STEPS} Newton steps (see posterior.report). Train the network "
            "further, use a stronger prior, or mode='tilt'.",
            RuntimeWarning,
            stacklevel=4,
        )
        return theta, sums, MOST_NEWTON_STEPS


@dataclass(frozen=True, eq=False)
class _Sums:
    """Statistics with what fitting needs besides: the observed curvature for Newton steps, squared residuals."""

    statistics: Statistics
    newton: Structure | None
    squares: Tensor  # Σ w (y − f)² by output (C,), for the noise
    largest: float
    reference: Tensor  # the noise that the statistics were taken at (C,)

    @staticmethod
    def zero(size: int, structure: Structure, newton: bool) -> _Sums:
        nothing = Statistics(0, 0.0, 0.0, torch.zeros(size, dtype=torch.float64), structure.zero(size))
        return _Sums(nothing, Dense().zero(size) if newton else None, torch.zeros(1, dtype=torch.float64), 0.0, torch.ones(1))

    @property
    def newton_curvature(self) -> Structure:
        return self.newton or self.statistics.curvature

    def newton_step(self, gradient: Tensor, prior_precision: Tensor) -> Tensor:
        """H⁻¹ g with the observed curvature; with the Fisher where that is not positive definite."""
        if self.newton is not None:
            try:
                return self.newton.with_prior(prior_precision).solve(gradient)
            except ValueError:
                pass
        return self.statistics.curvature.with_prior(prior_precision).solve(gradient)

    def add(self, f: Tensor, J: Jacobian, y: Tensor, weights: Tensor | None, likelihood: Likelihood) -> _Sums:
        finite("The network's output", f, "Check the scale of the inputs and the trained weights.")
        likelihood.check_outputs(f)
        log_prob, score, precision = likelihood.log_prob(y, f), likelihood.score(y, f), likelihood.fisher(f)
        observed = likelihood.precision(y, f) if self.newton is not None else None
        finite("log p(y|f)", log_prob, "Some targets are impossible for these outputs: check y and the likelihood.")
        if weights is not None:
            log_prob, score = log_prob * weights, score * weights[:, None]
            precision = precision * weights[:, None, None]
            observed = None if observed is None else observed * weights[:, None, None]
        squares, reference = torch.zeros(f.shape[1], dtype=torch.float64), self.reference
        if isinstance(likelihood, Gaussian):
            reference = likelihood.covariance_for(f).diagonal().sqrt()
            r = (y.reshape(f.shape) - f) ** 2
            squares = (r if weights is None else r * weights[:, None]).sum(0)
        s = self.statistics
        return _Sums(
            Statistics(
                s.n + f.shape[0],
                s.weight + (f.shape[0] if weights is None else float(weights.sum())),
                s.log_likelihood + float(log_prob.sum()),
                s.gradient + J.pull(score),
                s.curvature.add(J, precision, weights),
            ),
            None if self.newton is None or observed is None else self.newton.add(J, observed),
            self.squares + squares,
            max(self.largest, float(y.abs().max())) if y.is_floating_point() else self.largest,
            reference,
        )

    def at_noise(self, noise: Tensor) -> _Sums:
        """The sums at `noise` times the noise they were taken at, (P,): one factor for each parameter's output."""
        s = self.statistics
        outputs = self.squares.numel()
        factor = noise.reshape(outputs, -1)[:, 0] if bool((noise != noise[0]).any()) else noise[:1].expand(outputs)
        old, new = self.squares / self.reference**2, self.squares / (self.reference * factor) ** 2
        change = 0.5 * float((old - new).sum()) - s.weight * float(factor.log().sum())
        log_likelihood = s.log_likelihood + change
        statistics = replace(
            s,
            log_likelihood=log_likelihood,
            gradient=s.gradient / noise**2,
            curvature=s.curvature.scaled(1 / noise),
        )
        newton = None if self.newton is None else self.newton.scaled(1 / noise)
        return replace(self, statistics=statistics, newton=newton, reference=self.reference * factor)

    def residual_squares(self, start: _Sums, moved: Tensor) -> Tensor:
        """Squared residuals after θ moved, (C,): by the quadratic sums of a last layer, else as collected."""
        if self.squares is not start.squares:
            return self.squares
        gain = float(moved @ start.statistics.gradient) - 0.5 * float(moved @ start.newton_curvature.push(moved))
        noise = self.reference**2
        return (
            self.squares - 2 * gain * noise
            if noise.numel() == 1
            else self.squares * (1 - 2 * gain / (self.squares / noise).sum())
        )

    def moved(self, step: Tensor) -> _Sums:
        """The sums at θ + step where ℓ is quadratic: exact for a Gaussian last layer."""
        s = self.statistics
        push = self.newton_curvature.push(step)
        gain = float(step @ s.gradient) - 0.5 * float(step @ push)
        return replace(self, statistics=replace(s, log_likelihood=s.log_likelihood + gain, gradient=s.gradient - push))


def _residual(sums: _Sums, bound: BoundPrior, theta: Tensor) -> float:
    """√(gᵀH⁻¹g): how far θ is from the mode, in posterior standard deviations."""
    gradient = sums.statistics.gradient + bound.gradient(theta)
    step = sums.newton_step(gradient, bound.precision(theta))
    return math.sqrt(max(float(gradient @ step), 0.0))


@dataclass(eq=False)
class _TargetRange:
    """Watches for constant targets and input columns."""

    low: Tensor | None = None
    high: Tensor | None = None
    x_low: Tensor | None = None
    x_high: Tensor | None = None
    rows: int = 0

    def see(self, y: Tensor, x: Any) -> None:
        self.rows += y.shape[0]
        self.low, self.high = _extend(self.low, self.high, y)
        if isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point():
            self.x_low, self.x_high = _extend(self.x_low, self.x_high, x)

    def note(self, notes: list[str]) -> None:
        if self.rows == 1:
            notes.append("only one row was seen: the posterior is almost the prior")
            warnings.warn("The data hold one row only, so the posterior is almost the prior.", UserWarning, stacklevel=4)
            return
        numbers = self.low is not None and self.low.is_floating_point()
        if numbers and self.low is not None and self.high is not None and bool((self.low == self.high).any()):
            notes.append("the target is constant: nothing can be learned about its noise")
            warnings.warn("The target is constant: nothing can be learned about its noise.", UserWarning, stacklevel=4)
        if self.x_low is not None and self.x_high is not None:
            constant = (self.x_low == self.x_high).nonzero().flatten().tolist()
            if constant and len(constant) < self.x_low.numel():
                notes.append(f"constant input columns: {', '.join(map(str, constant))}")


def _extend(low: Tensor | None, high: Tensor | None, values: Tensor) -> tuple[Tensor, Tensor]:
    least, most = values.amin(0), values.amax(0)
    if low is None or high is None:
        return least, most
    return torch.minimum(low, least), torch.maximum(high, most)


def _warn(report: Report) -> None:
    limit = {AS_IS: WARN_AS_IS, TILT: WARN_TILT, POLISH: math.inf}[report.mode]
    if report.residual_per_parameter > limit:
        remedy = {
            AS_IS: "Train further, or use mode='polish' or mode='tilt'.",
            TILT: "The network is far from trained under this prior: train further or weaken the prior.",
            POLISH: "",
        }[report.mode]
        warnings.warn(
            f"The network is not at the mode: its residual gradient is {report.residual:.3g} posterior standard deviations "
            f"({report.residual_per_parameter:.2g} per parameter). {remedy}",
            UserWarning,
            stacklevel=4,
        )


def _bar(source: Source, length: int | None, show: bool, label: str) -> Iterable[Batch]:
    if not show:
        return source
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise ImportError("progress=True needs tqdm: pip install 'ssla[progress]'.") from None
    bar: Iterable[Batch] = tqdm(source, total=length, desc=label, unit="batch")
    return bar
