"""fit(validation=…): rows that the network has not seen choose dispersion, prior, mode and
Gaussian.

Oracles: `ssla.fit` with the setting given explicitly, and `predict`, which share no code with the
search; SciPy for Gaussian noise; known truths of simulated networks.
"""

from __future__ import annotations

import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ssla
from ssla import likelihoods as L
from ssla.curvature.memory import DEFAULT_BUDGET
from ssla.curvature.structure import NoFactorError
from ssla.data import open_source
from ssla.fitting.arguments import checked_plan
from ssla.fitting.choice import MOST_LOSS
from ssla.fitting.passes import Reader
from ssla.fitting.validation import Search, fit_trained_state
from ssla.fitting.validation_rows import ValidationRows
from ssla.priors import Gaussian
from ssla.report import LAPLACE, POLISH, TILT, VARIATIONAL

TRAIN, UNSEEN = 150, 400


class Problem(NamedTuple):
    model: nn.Module
    train: tuple[Tensor, Tensor]
    unseen: tuple[Tensor, Tensor]
    new: tuple[Tensor, Tensor]


def problem(
    likelihood: object, outputs: int, confidence: float = 1.0, dtype: torch.dtype = torch.float64
) -> Problem:
    """Targets from a known network, whose outputs are `confidence` times as large in the model
    that is fitted.
    """
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
        x = torch.randn(TRAIN + 2 * UNSEEN, 3, generator=generator, dtype=torch.float64)
        y = likelihood.sample(model(x), 1, generator)[0]
        for p in model[2].parameters():
            p.mul_(confidence)
    y = y if y.dtype == torch.long else y.to(dtype)
    parts = [slice(0, TRAIN), slice(TRAIN, TRAIN + UNSEEN), slice(TRAIN + UNSEEN, None)]
    return Problem(model.to(dtype), *((x[part].to(dtype), y[part]) for part in parts))


def search_of(given: Problem, likelihood: object, **options: object) -> Search:
    """The search of a fit, before it has chosen."""
    asked = {"prior": None, "structure": "dense", "mode": None, "gaussian": None} | options
    reader = Reader(open_source(given.train), given.model, "last_layer", DEFAULT_BUDGET)
    plan = checked_plan(
        ssla.Posterior,
        reader,
        likelihood,
        asked["prior"],
        asked["structure"],
        asked["mode"],
        asked["gaussian"],
        DEFAULT_BUDGET,
    )
    plan, start = fit_trained_state(plan)
    search = Search(plan, start, ValidationRows.read(start, open_source(given.unseen)))
    search.score_families()
    return search


# --- scores are those of the posterior that would be fitted --------------------------------------


@pytest.mark.parametrize("structure", ["dense", "kfac"])
@pytest.mark.parametrize(
    ("likelihood", "outputs", "accuracy"),
    [
        (L.Gaussian(noise=0.5), 1, 1e-6),
        (L.Gaussian(noise=torch.tensor([0.5, 0.3]).double()), 2, 1e-6),
        (L.Bernoulli(), 1, 1e-6),
        (L.Categorical(), 3, 2e-3),  # 128 nodes against 512
        (L.HeteroscedasticGaussian(), 2, 0.02),  # an integral against an output refit
        (L.Poisson(), 1, 0.02),
    ],
    ids=str,
)
def test_scores_are_those_of_an_explicit_fit(
    likelihood: object, outputs: int, accuracy: float, structure: str
) -> None:
    given = problem(likelihood, outputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        search = search_of(given, likelihood, structure=structure)
        table = search.all_settings.with_gaussian(LAPLACE)
        seen = set()
        for setting, scores in zip(table.settings[::5], table.log_densities[::5], strict=True):
            plan = search.plan_at(setting)
            explicit = ssla.fit(
                given.model,
                given.train,
                likelihood=plan.likelihood,
                prior=plan.prior,
                mode=setting.mode,
                gaussian=LAPLACE,
                structure=structure,
            )
            own = explicit.predict(given.unseen[0]).log_prob(given.unseen[1])
            assert float(scores.mean()) == pytest.approx(float(own.mean()), abs=accuracy)
            seen.add(setting.mode)
    assert TILT in seen
    assert (POLISH in seen) == isinstance(likelihood, L.Gaussian)


def test_the_chosen_gaussian_noise_and_prior_are_those_of_scipy() -> None:
    """Within the standard error of the rule: SciPy minimises the log density of the same rows
    over both.
    """
    given = problem(L.Gaussian(noise=0.7), 1)
    posterior = ssla.fit(
        given.model,
        given.train,
        likelihood=L.Gaussian(noise=0.3),
        validation=given.unseen,
        mode="tilt",
    )
    head = given.model[2]
    phi, unseen = (
        torch.cat([given.model[:2](x), torch.ones(len(x), 1).double()], 1).detach().numpy()
        for x in (given.train[0], given.unseen[0])
    )
    r = (given.unseen[1] - given.model(given.unseen[0])[:, 0]).detach().numpy()

    def loss(point: np.ndarray) -> float:
        noise, precision = np.exp(point)
        H = phi.T @ phi / noise**2 + precision * np.eye(phi.shape[1])
        variance = noise**2 + np.einsum("nf,fn->n", unseen, np.linalg.solve(H, unseen.T))
        return float(0.5 * np.mean(np.log(2 * np.pi * variance) + r**2 / variance))

    best = minimize(
        loss, np.array([-0.5, 0.0]), method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-10}
    )
    precision = float(posterior.bound_prior.precision(posterior.theta)[0])
    own = loss(np.log([posterior.likelihood.noise, precision]))
    assert best.fun <= own <= best.fun + 0.01
    assert posterior.likelihood.noise == pytest.approx(math.exp(best.x[0]), rel=0.05)
    assert head.out_features == 1


# --- what the rows find --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("confidence", [0.4, 1.0, 3.0])
@pytest.mark.parametrize(("law", "outputs"), [(L.Bernoulli, 1), (L.Categorical, 4)])
def test_the_temperature_is_what_the_network_is_off_by(
    law: type, outputs: int, confidence: float, dtype: torch.dtype
) -> None:
    given = problem(law(), outputs, confidence, dtype)
    posterior = ssla.fit(
        given.model, given.train, likelihood=law(), validation=given.unseen, mode="tilt"
    )
    found = posterior.report.validation
    assert found.network_spread == pytest.approx(confidence, rel=0.3)
    words = {0.4: "under-confident", 1.0: "confidence", 3.0: "over-confident"}[confidence]
    assert words in found.words
    assert words in str(posterior.report)
    x, y = given.new
    f = given.model(x).detach()
    plug_in, scaled = (
        -float(law(temperature=t).log_prob(y, f).mean()) for t in (1.0, found.network_spread)
    )
    truth = -float(law(temperature=confidence).log_prob(y, f).mean())
    own = -float(posterior.predict(x).log_prob(y).mean())
    # Where the network is right, a temperature that 400 rows choose can only lose, here as in
    # temperature scaling. Besides there is what the rule gives for doubt, and what a second
    # parameter loses.
    assert own <= max(plug_in, scaled) + MOST_LOSS + 1 / (2 * UNSEEN)
    assert own <= truth + 0.03


def separated(rows: int) -> Problem:
    """Three classes that the network tells apart without an error, in rows of any part."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(8, 3).double().eval()
    with torch.no_grad():
        model.weight.copy_(4 * torch.eye(3, 8))
        model.bias.zero_()
    x = torch.randn(4 * rows, 8, generator=generator, dtype=torch.float64)
    x = x[x[:, :3].topk(2).values.diff()[:, 0] < -0.4][: TRAIN + rows]
    y = x[:, :3].argmax(1)
    assert len(x) == TRAIN + rows
    return Problem(model, (x[:TRAIN], y[:TRAIN]), (x[TRAIN:], y[TRAIN:]), (x, y))


# The warning: such rows choose a strong prior.
@pytest.mark.filterwarnings("ignore:The network is not at the mode")
@pytest.mark.parametrize("rows", [100, 1000])
def test_rows_without_an_error_leave_the_temperature_finite(rows: int) -> None:
    """Their likelihood grows as the temperature T falls; the prior of log T gives a maximum."""
    given = separated(rows)
    options = {"likelihood": L.Categorical(), "validation": given.unseen, "mode": "tilt"}
    found = ssla.fit(given.model, given.train, **options)
    f, y = given.model(given.unseen[0]).detach(), given.unseen[1]

    def loss(log_temperature: np.ndarray) -> float:
        value = float(log_temperature[0])
        entropy = nn.functional.cross_entropy(f / math.exp(value), y, reduction="sum")
        return 0.5 * value**2 + float(entropy)

    best = math.exp(minimize(loss, np.array([0.0]), method="Nelder-Mead").x[0])
    assert found.report.validation.network_spread == pytest.approx(best, rel=0.03)  # one of a grid
    assert found.likelihood.temperature > 0.6 * best


def test_wrong_noise_is_corrected() -> None:
    given = problem(L.HeteroscedasticGaussian(scale=2.0), 2)
    posterior = ssla.fit(
        given.model,
        given.train,
        likelihood=L.HeteroscedasticGaussian(),
        validation=given.unseen,
        mode="tilt",
    )
    assert posterior.report.validation.network_spread == pytest.approx(2.0, rel=0.1)
    assert posterior.report.validation.coverage["0.9"] == pytest.approx(0.9, abs=0.04)
    assert "residuals" in posterior.report.validation.words


def test_counts_that_vary_too_much_get_an_overdispersion() -> None:
    given = problem(L.NegativeBinomial(dispersion=1.0), 1)
    posterior = ssla.fit(
        given.model, given.train, likelihood=L.Poisson(), validation=given.unseen, mode="tilt"
    )
    assert isinstance(posterior.likelihood, L.NegativeBinomial)
    assert posterior.likelihood.dispersion == pytest.approx(1.0, abs=0.4)


def test_an_untrained_head_is_polished() -> None:
    given = problem(L.Gaussian(noise=0.3), 1)
    with torch.no_grad():
        given.model[2].weight.zero_()
        given.model[2].bias.zero_()
    posterior = ssla.fit(
        given.model, given.train, likelihood=L.Gaussian(noise="estimate"), validation=given.unseen
    )
    assert posterior.report.mode == POLISH
    assert posterior.likelihood.noise == pytest.approx(0.3, rel=0.1)


def test_a_memorised_network_gains() -> None:
    """A network trained to fit the noise of few rows: its predictive is better than it, and
    than it rescaled.
    """
    torch.manual_seed(0)
    x = torch.randn(1200, 3)
    y = (x[:, 0].sin() + 0.5 * x[:, 1] * x[:, 2] + 0.3 * torch.randn(1200)).float()
    model = nn.Sequential(
        nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1)
    )
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(400):
        optimiser.zero_grad()
        ((model(x[:200])[:, 0] - y[:200]) ** 2).mean().backward()
        optimiser.step()
    model.eval()
    train, unseen, new = ((x[a:b], y[a:b]) for a, b in ((0, 200), (200, 500), (500, 1200)))
    posterior = ssla.fit(model, train, likelihood=L.Gaussian(noise="estimate"), validation=unseen)
    alone = ssla.fit(model, train, likelihood=L.Gaussian(noise="estimate"))
    found = posterior.report.validation
    assert found.predictive < found.plug_in
    assert found.scaled_plug_in < found.plug_in
    with torch.no_grad():
        scale = float((new[1] - model(new[0])[:, 0]).std())
    # with the best noise for the new rows themselves
    rescaled = 0.5 * math.log(2 * math.pi * scale**2) + 0.5
    own, without = (
        -float(post.predict(new[0]).log_prob(new[1]).mean()) for post in (posterior, alone)
    )
    assert own < without - 0.1
    assert own < rescaled - 0.05
    inside = posterior.predict(new[0]).interval(0.9)
    share = float(((new[1] >= inside[:, 0]) & (new[1] <= inside[:, 1])).float().mean())
    assert share == pytest.approx(0.9, abs=0.04)


# --- what is given stays -------------------------------------------------------------------------


def test_an_explicit_prior_mode_and_gaussian_stay() -> None:
    given = problem(L.Categorical(), 3, 2.0)
    posterior = ssla.fit(
        given.model,
        given.train,
        likelihood=L.Categorical(),
        prior=Gaussian(2.0),
        mode="polish",
        gaussian="laplace",
        validation=given.unseen,
    )
    assert (posterior.report.mode, posterior.report.gaussian) == (POLISH, LAPLACE)
    assert float(posterior.bound_prior.precision(posterior.theta)[0]) == 2.0


@pytest.mark.parametrize("gaussian", [LAPLACE, VARIATIONAL])
def test_the_gaussian_that_is_asked_for_is_the_one_that_is_fitted(gaussian: str) -> None:
    given = problem(L.Categorical(), 3, 2.0)
    posterior = ssla.fit(
        given.model,
        given.train,
        likelihood=L.Categorical(),
        gaussian=gaussian,
        validation=given.unseen,
    )
    assert posterior.report.gaussian == gaussian


def test_the_model_and_the_rows_are_not_changed() -> None:
    given = problem(L.Categorical(), 3, 2.0, torch.float32)
    before = [t.clone() for t in (*given.model.parameters(), *given.train, *given.unseen)]
    ssla.fit(given.model, given.train, likelihood=L.Categorical(), validation=given.unseen)
    after = (*given.model.parameters(), *given.train, *given.unseen)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_predictive_worse_than_the_network_warns() -> None:
    given = problem(L.Categorical(), 4, 1.0)
    with pytest.warns(UserWarning, match="worse than the network itself"):
        ssla.fit(
            given.model,
            (given.train[0][:12], given.train[1][:12]),
            likelihood=L.Categorical(),
            prior=Gaussian(1e-4),
            mode="tilt",
            gaussian="laplace",
            validation=given.unseen,
        )


def test_without_validation_a_posterior_that_fails_warns() -> None:
    """Classes that the network separates: the Gaussian at the mode is almost the prior, which
    is far too wide.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 30, generator=generator, dtype=torch.float64)
    model = nn.Linear(30, 5).double().eval()
    with torch.no_grad():
        model.weight.copy_(20 * torch.randn(5, 30, generator=generator))
        y = model(x).argmax(1)
    options = {"likelihood": L.Categorical(), "prior": Gaussian(1e-3), "mode": "tilt"}
    with pytest.warns(
        UserWarning, match="training rows the predictive is worse than the network itself"
    ):
        ssla.fit(model, (x, y), gaussian="laplace", **options)


# --- forms of data -------------------------------------------------------------------------------


def test_loaders_lists_and_arrays_are_the_same_rows() -> None:
    given = problem(L.Categorical(), 3, 2.0)
    x, y = given.unseen
    forms = [
        (x.numpy(), y.numpy()),
        DataLoader(TensorDataset(x, y), batch_size=64),
        [(x[:100], y[:100]), (x[100:], y[100:])],
        iter([(x, y)]),
    ]
    found = [
        ssla.fit(given.model, given.train, likelihood=L.Categorical(), validation=form)
        for form in forms
    ]
    for other in found[1:]:
        assert other.likelihood.temperature == pytest.approx(
            found[0].likelihood.temperature, rel=1e-9
        )
        torch.testing.assert_close(other.predict(x).probs, found[0].predict(x).probs)


class Texts(nn.Module):
    """Embeddings averaged over the tokens that the mask shows; the answer is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        shown = self.embedding(ids) * mask[:, :, None]
        return {"logits": self.head(shown.sum(1) / mask.sum(1, keepdim=True))}


@pytest.mark.parametrize("weights", ["last_layer", ["embedding.weight"]])
def test_dicts_of_different_lengths_are_the_same_rows(weights: str | list[str]) -> None:
    """Batches padded to their own longest text, as Hugging Face has them, and all rows padded
    at once.
    """
    model = Texts().double().eval()
    ids = torch.randint(1, 20, (90, 6))
    ids[::2, 4:] = 0
    mask, y = (ids > 0).long(), ids[:, 0] % 3
    batches = []
    for rows in (slice(0, 90, 2), slice(1, 90, 2)):
        length = int(mask[rows].sum(1).max())
        parts = {"ids": ids[rows, :length], "mask": mask[rows, :length]}
        batches.append(parts | {"labels": y[rows]})
    assert len({batch["ids"].shape for batch in batches}) == 2
    order = torch.cat([torch.arange(0, 90, 2), torch.arange(1, 90, 2)])
    whole = ({"ids": ids[order], "mask": mask[order]}, y[order])
    train = ({"ids": ids[:40], "mask": mask[:40]}, y[:40])
    options = {
        "likelihood": L.Categorical(),
        "output": "logits",
        "weights": weights,
        "mode": "tilt",
    }
    forms = (whole, batches, iter(batches))
    fits = [
        ssla.fit(model, train, validation=form, gaussian="laplace", **options) for form in forms
    ]
    loss = nn.functional.cross_entropy(model(**whole[0])["logits"].detach(), whole[1])
    for fit in fits:
        assert fit.report.validation.rows == 90
        assert fit.report.validation.plug_in == pytest.approx(float(loss))
        torch.testing.assert_close(fit.predict(train[0]).probs, fits[0].predict(train[0]).probs)


def test_a_row_of_weight_zero_does_not_count() -> None:
    given = problem(L.Categorical(), 3, 2.0)
    x, y = given.unseen
    more = (
        torch.cat([x, -x]),
        torch.cat([y, (y + 1) % 3]),
        torch.cat([torch.ones(UNSEEN), torch.zeros(UNSEEN)]),
    )
    plain, weighted = (
        ssla.fit(
            given.model,
            given.train,
            likelihood=L.Categorical(),
            validation=form,
            mode="tilt",
            gaussian="laplace",
        )
        for form in (given.unseen, more)
    )
    assert weighted.report.validation.plug_in == pytest.approx(plain.report.validation.plug_in)
    assert weighted.report.validation.network_spread == plain.report.validation.network_spread


def test_a_share_of_the_data_is_held_out_and_said() -> None:
    given = problem(L.Categorical(), 3, 2.0)
    posterior = ssla.fit(given.model, given.train, likelihood=L.Categorical(), validation=0.3)
    found = posterior.report.validation
    assert found.held_out
    assert found.rows + posterior.report.n == TRAIN
    assert found.rows == pytest.approx(0.3 * TRAIN, abs=2)
    assert "may have seen" in str(posterior.report)
    loader = DataLoader(TensorDataset(*given.train), batch_size=32)
    same = ssla.fit(given.model, loader, likelihood=L.Categorical(), validation=0.3)
    torch.testing.assert_close(
        same.predict(given.new[0]).probs, posterior.predict(given.new[0]).probs
    )


def test_without_validation_the_report_says_what_is_missing() -> None:
    given = problem(L.Categorical(), 3)
    text = str(ssla.fit(given.model, given.train, likelihood=L.Categorical()).report)
    assert "training rows cannot show over-confidence" in text
    assert "validation=" in text


@pytest.mark.parametrize(
    ("validation", "error", "words"),
    [
        (True, TypeError, "validation must be rows"),
        (5, TypeError, "validation must be rows"),
        (1.5, ValueError, "between 0 and 1"),
        ((torch.zeros(0, 3).double(), torch.zeros(0).long()), ValueError, "has no rows"),
        ((torch.zeros(4, 3).double(), torch.zeros(4).long()), ValueError, "too few"),
        ((torch.zeros(20, 3).double(), torch.full((20,), 9)), ValueError, "9"),
        (
            (torch.full((20, 3), math.nan).double(), torch.zeros(20).long()),
            ValueError,
            "NaN|finite",
        ),
    ],
)
def test_bad_validation_rows_are_refused(
    validation: object, error: type[Exception], words: str
) -> None:
    given = problem(L.Categorical(), 3)
    with pytest.raises(error, match=words):
        ssla.fit(given.model, given.train, likelihood=L.Categorical(), validation=validation)


def test_a_share_of_shuffled_data_is_refused() -> None:
    given = problem(L.Categorical(), 3)
    loader = DataLoader(TensorDataset(*given.train), batch_size=32, shuffle=True)
    with pytest.raises(ValueError, match="same order each time"):
        ssla.fit(given.model, loader, likelihood=L.Categorical(), validation=0.2)


# --- the dispersion travels ----------------------------------------------------------------------


def test_the_dispersion_and_the_report_travel(tmp_path: object) -> None:
    given = problem(L.Categorical(), 3, 3.0)
    posterior = ssla.fit(
        given.model, given.train, likelihood=L.Categorical(), validation=given.unseen, mode="tilt"
    )
    temperature = posterior.likelihood.temperature
    assert temperature > 1.2
    posterior.save(tmp_path / "posterior")
    loaded = ssla.load(tmp_path / "posterior", given.model)
    assert loaded.report.validation == posterior.report.validation
    assert torch.equal(loaded.predict(given.new[0]).probs, posterior.predict(given.new[0]).probs)
    others = [
        loaded,
        posterior.update(given.new),
        posterior.with_prior(Gaussian(3.0)),
        posterior.tune(),
    ]
    assert all(other.likelihood.temperature == temperature for other in others)


def test_workers_fit_the_same_posterior() -> None:
    given = problem(L.Categorical(), 3, 3.0)
    options = {
        "likelihood": L.Categorical(),
        "validation": given.unseen,
        "mode": "tilt",
        "gaussian": "laplace",
    }
    x, y = given.train
    shards = [(x[:70], y[:70]), (x[70:], y[70:])]
    with ThreadPoolExecutor(2) as client:
        apart = ssla.distributed.fit(given.model, shards, client=client, **options)
    whole = ssla.fit(given.model, given.train, **options)
    assert apart.likelihood.temperature == pytest.approx(whole.likelihood.temperature, rel=1e-6)
    torch.testing.assert_close(apart.predict(given.new[0]).probs, whole.predict(given.new[0]).probs)


def test_the_history_lists_the_settings_that_were_scored():
    given = problem(L.Categorical(), 3, confidence=2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        post = ssla.fit(
            given.model, given.train, likelihood=L.Categorical(), validation=given.unseen
        )
    history, report = post.tuning_history, post.report.validation
    assert history.evaluations == report.settings
    assert history.points.shape == (report.settings + 1, 4)
    assert history.values.shape == (report.settings + 1,)
    assert history.points[-1, :2].tolist() == [report.spread, report.precision]
    assert bool(history.points[-1, 2]) == (post.report.mode == POLISH)
    assert bool(history.points[-1, 3]) == (post.report.gaussian == VARIATIONAL)
    assert len(history.points[:-1].unique(dim=0)) > 5
    assert history.values.max() - history.values[-1] <= MOST_LOSS + 0.1
    assert "log density of validation rows" in str(history)


def nearly_certain_network() -> Problem:
    """A network with dead units that predicts a variance of exp(−22), in which a weak prior leaves
    a Kronecker factor without a factorisation.
    """
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
        model[0].bias[:3] = -50
        model[2].weight[1] = 0
        model[2].bias[1] = -22
    x = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        noise = math.exp(-11) * torch.randn(60, generator=generator, dtype=torch.float64)
        y = model(x)[:, 0] + noise
    parts = [(x[rows], y[rows]) for rows in (slice(0, 40), slice(40, None), slice(0, 5))]
    return Problem(model, *parts)


def test_a_setting_that_cannot_be_factorised_is_left_out_and_counted():
    of = nearly_certain_network()
    posterior = ssla.fit(
        of.model,
        of.train,
        likelihood=L.HeteroscedasticGaussian(),
        structure="kfac",
        validation=of.unseen,
    )
    found = posterior.report.validation
    assert found.unfactorised > 0
    assert found.settings > 0
    assert f"{found.unfactorised} settings were left out" in str(posterior.report)
    assert bool(torch.isfinite(posterior.predict(of.new[0]).stddev).all())


def test_where_no_setting_can_be_factorised_the_first_failure_is_raised(monkeypatch):
    of = nearly_certain_network()

    def fail(search, setting):
        search.failures.append(NoFactorError("no factor"))

    monkeypatch.setattr(Search, "_tilted_candidate", fail)
    monkeypatch.setattr(Search, "_score_polished_heads", lambda search: None)
    with pytest.raises(NoFactorError, match="no factor"):
        ssla.fit(
            of.model,
            of.train,
            likelihood=L.HeteroscedasticGaussian(),
            structure="dense",
            validation=of.unseen,
        )
