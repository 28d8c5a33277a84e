"""HMC, MFVI and black-box α of the stated experiment, each against another way to have it."""

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from ssla_paper.networks import perceptron
from ssla_paper.runner import OURS, Workplace, run
from ssla_paper.stated import baselines, chains, mean_field
from ssla_paper.stated.baseline_report import baseline_claims, baselines_of, end_of, others
from ssla_paper.stated.data import TOY, Case, case
from ssla_paper.stated.numbers import gathered
from ssla_paper.stated.study import BASELINE_SPLITS, Stated

STATED = {
    "step": (1e-5, 1e-3),
    "samples": (500, 2000),
    "steps": (10, 50),
    "tau_in": (0.1, 10),
    "tau_out": (10, 500),
    "mass": (0.1, 10),
    "rate": (1e-5, 1e-1),
    "batch": (32, 256),
    "burn_in": (50, 200),
    "train_draws": (5, 50),
    "test_draws": (10, 100),
    "noise_scale": (0.5, 2),
    "alpha": (0, 1),
}


@pytest.fixture(scope="module")
def small():
    """Some rows, and the weights of a stated network with each number of outputs, in float64."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, 2, generator=generator, dtype=torch.float64)
    y = torch.randn(9, generator=generator, dtype=torch.float64)
    nets = {o: perceptron(2, o, torch.Generator().manual_seed(3)).double() for o in (1, 2)}
    flat = {
        o: torch.cat([p.detach().flatten() for p in net.parameters()]) for o, net in nets.items()
    }
    return x, y, nets, flat


def test_the_ranges_are_the_stated_ones_and_every_trial_is_in_them():
    assert {"step", "samples", "steps", "tau_in", "tau_out", "mass"} == set(baselines.CHAIN)
    assert set(baselines.SPACES["alpha"]) - set(baselines.SPACES["mfvi"]) == {"alpha"}
    for space in baselines.SPACES.values():
        for name, span in space.items():
            assert (span.low, span.high) == STATED[name]
    kept = baselines.found()
    assert set(kept) == set(baselines.SPACES)
    for method, trials in kept.items():
        assert len(trials) == baselines.TRIALS
        for trial in trials:
            assert set(trial.settings) == set(baselines.SPACES[method])
            for name, value in trial.settings.items():
                assert STATED[name][0] <= value <= STATED[name][1]
                assert not baselines.SPACES[method][name].is_whole or isinstance(value, int)


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_energy_is_the_negative_log_posterior_and_its_gradient_autograds(small, outputs):
    x, y, nets, flat = small
    w = flat[outputs].clone().requires_grad_(True)
    torch.testing.assert_close(chains.outputs_of(w[None], x, outputs)[0], nets[outputs](x))

    def expected(at):
        f = chains.outputs_of(at[None], x, outputs)[0]
        log_variance = f[:, 1] if outputs == 2 else torch.zeros_like(y)
        likelihood = Normal(f[:, 0], (0.5 * log_variance).exp() / math.sqrt(7.0)).log_prob(y)
        prior = Normal(torch.zeros_like(at), math.sqrt(0.5)).log_prob(at)
        return -likelihood.sum() - prior.sum()

    gradient = chains.potential(x, y, 2.0, 7.0, outputs)
    (energy, slope), (other, _) = gradient(w.detach()), gradient(0.9 * w.detach())
    (autograd,) = torch.autograd.grad(expected(w), w)
    torch.testing.assert_close(slope, autograd)
    change = float((expected(w) - expected(0.9 * w)).detach())
    assert energy - other == pytest.approx(change, rel=1e-9)  # up to a constant


def test_hmc_finds_the_moments_of_a_gaussian_with_any_mass():
    sds = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    centre = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)

    def gradient(w):
        z = (w - centre) / sds
        return 0.5 * float(z.square().sum()), z / sds

    for mass in (0.5, 4.0):
        found = chains.walk(
            gradient,
            torch.zeros(3, dtype=torch.float64),
            step=0.4 * math.sqrt(mass),
            steps=5,
            mass=mass,
            samples=4000,
            generator=torch.Generator().manual_seed(0),
        )
        assert 0.8 < found.accepted <= 1
        kept = found.draws[100:]
        size = chains.effective(kept[None])
        assert float(size.min()) > 300
        error = sds / size.sqrt()
        assert bool(((kept.mean(0) - centre).abs() < 4 * error).all())
        torch.testing.assert_close(kept.std(0), sds, rtol=0.1, atol=0)


def test_hmc_finds_the_predictive_of_a_linear_model():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([0.7, -0.4], dtype=torch.float64)
    y = y + 0.3 * torch.randn(20, generator=generator, dtype=torch.float64)
    tau_in, tau_out = 2.0, 11.0
    precision = tau_in * torch.eye(2, dtype=torch.float64) + tau_out * x.T @ x
    covariance = torch.linalg.inv(precision)
    centre = tau_out * covariance @ x.T @ y

    def gradient(w):
        r = x @ w - y
        energy = 0.5 * tau_out * float(r.square().sum()) + 0.5 * tau_in * float(w.square().sum())
        return energy, tau_out * x.T @ r + tau_in * w

    found = chains.walk(
        gradient,
        torch.zeros(2, dtype=torch.float64),
        step=0.05,
        steps=12,
        mass=1.0,
        samples=4000,
        generator=generator,
    )
    new = torch.tensor([[1.0, 0.5], [-0.3, 2.0]], dtype=torch.float64)
    f = found.draws[100:] @ new.T
    sd = (new @ covariance @ new.T).diagonal().sqrt()
    error = sd / chains.effective(f[None]).sqrt()
    assert bool(((f.mean(0) - new @ centre).abs() < 4 * error).all())
    torch.testing.assert_close(f.std(0), sd, rtol=0.1, atol=0)


def test_a_proposal_without_a_finite_energy_is_rejected():
    def gradient(w):
        return (0.0 if float(w.abs().max()) == 0 else math.nan), torch.zeros_like(w)

    generator = torch.Generator().manual_seed(0)
    found = chains.walk(
        gradient, torch.zeros(2), step=1.0, steps=2, mass=1.0, samples=5, generator=generator
    )
    assert found.accepted == 0
    assert float(found.draws.abs().max()) == 0


def test_the_diagnostics_are_those_of_an_autoregression():
    rho, draws = 0.8, 10_000
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, draws, 12, generator=generator, dtype=torch.float64)
    values = torch.zeros_like(noise)
    for i in range(1, draws):
        values[:, i] = rho * values[:, i - 1] + noise[:, i]
    expected = 2 * draws * (1 - rho) / (1 + rho)
    assert float(chains.effective(values).mean()) == pytest.approx(expected, rel=0.1)
    assert float(chains.split_r_hat(values).max()) < 1.01
    apart = values + torch.tensor([0.0, 10.0])[:, None, None]
    assert float(chains.split_r_hat(apart).min()) > 2
    numpyro = pytest.importorskip("numpyro.diagnostics")
    short = values[:, :501]
    theirs = numpyro.split_gelman_rubin(short.numpy())
    assert chains.split_r_hat(short).tolist() == pytest.approx(theirs.tolist(), rel=1e-3)
    theirs = numpyro.effective_sample_size(short[:1].numpy())
    assert chains.effective(short[:1]).tolist() == pytest.approx(theirs.tolist(), rel=0.05)


def test_the_divergence_is_torchs_and_alpha_to_zero_is_the_evidence_bound():
    generator = torch.Generator().manual_seed(0)
    centre = torch.randn(6, generator=generator, dtype=torch.float64)
    sd = 0.2 + torch.rand(6, generator=generator, dtype=torch.float64)
    exact = kl_divergence(Normal(centre, sd), Normal(0.0, 1.0)).sum()
    torch.testing.assert_close(mean_field.divergence(centre, sd), exact)
    logs = torch.randn(200_000, 4, generator=generator, dtype=torch.float64)
    noise = torch.randn(200_000, 6, generator=generator, dtype=torch.float64)
    for n in (4, 12):  # all rows, and a third of them
        bound = mean_field.objective(logs, n, centre, sd, noise, None)
        for alpha in (0.0, 1e-6):
            limit = mean_field.objective(logs, n, centre, sd, noise, alpha)
            assert float(limit) == pytest.approx(float(bound), abs=0.02)
    torch.testing.assert_close(bound, -logs.mean() + exact / 12)


def test_a_batch_has_the_energy_of_all_rows_on_average():
    generator = torch.Generator().manual_seed(0)
    centre, sd = torch.zeros(3), torch.full((3,), 0.5)
    logs, noise = torch.randn(50, 6, generator=generator), torch.randn(50, 3, generator=generator)
    whole = mean_field.objective(logs, 6, centre, sd, noise, 0.7)
    parts = [mean_field.objective(logs[:, i : i + 2], 6, centre, sd, noise, 0.7) for i in (0, 2, 4)]
    torch.testing.assert_close(torch.stack(parts).mean(), whole)


def test_the_noise_scale_multiplies_sigma_and_burn_in_is_the_squared_error():
    f = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(0))
    y = torch.linspace(-1, 1, 5)
    expected = Normal(f[..., 0], 1.7 * (0.5 * f[..., 1]).exp()).log_prob(y)
    torch.testing.assert_close(mean_field.log_likelihoods(f, y, 1.7, False), expected)
    burning = mean_field.log_likelihoods(f, y, 1.7, True)
    torch.testing.assert_close(burning, -(y - f[..., 0]).square())


def test_mfvi_stops_after_burn_in_and_reports_the_loss_of_its_mixture():
    rows = case(TOY, 201)
    settings = {"rate": 0.02, "batch": 64, "burn_in": 3, "train_draws": 3, "test_draws": 20}
    found = mean_field.independent(
        rows.train, rows.validation, **settings, noise_scale=0.8, seed=1, epochs=12
    )
    assert found.epochs == 12
    answer = found.mixture(rows.validation[0], 4000, torch.Generator().manual_seed(0))
    loss = -float(answer.log_prob(rows.validation[1]).mean())
    assert loss == pytest.approx(found.loss, abs=0.3)  # by 20 draws
    still = mean_field.independent(
        rows.train, rows.validation, **{**settings, "rate": 0.0}, noise_scale=0.8, seed=1
    )
    assert still.epochs == 3 + 1 + 20  # burn-in, the best one, and the patience


def test_a_search_is_by_validation_rows_and_never_by_test_rows(monkeypatch):
    pytest.importorskip("optuna")
    data = case(TOY, baselines.SPLIT)
    broken = (data.test[0] * math.nan, data.test[1] * math.nan)
    monkeypatch.setattr(
        baselines, "case", lambda *_: Case(data.train, data.validation, broken, data.unit)
    )
    short = {
        **baselines.CHAIN,
        "samples": baselines.Range(8, 12, True),
        "steps": baselines.Range(2, 4, True),
    }
    trials = baselines.search("hmc", 3, short)
    assert len(trials) == 3
    assert all(trial.loss < baselines.WORST for trial in trials)
    assert baselines.best(trials).loss == min(trial.loss for trial in trials)


def test_a_setting_at_the_end_of_its_range_is_named():
    span = baselines.CHAIN["step"]
    assert end_of(span, 9e-4) == "high"
    assert end_of(span, 1.1e-5) == "low"
    assert end_of(span, 1e-4) == ""


def test_every_searched_method_has_its_splits_and_quick_tables_are_written(tmp_path, monkeypatch):
    names = [task.key for task in Stated().tasks(False) if task.key.startswith("baseline")]
    assert len(names) == len(baselines.SPACES) * (BASELINE_SPLITS + 1)
    study = Stated()
    quick = [task for task in study.tasks(True) if task.key.startswith("baseline")]
    place = Workplace(tmp_path, quick=True)
    monkeypatch.setattr(Stated, "tasks", lambda *_: quick)
    claims = run(study, place, progress=False)
    written = {path.stem for path in (place.results("stated")).glob("*.md")}
    assert {
        f"stated-versus-baselines-{part}" for part in ("coverage", "scores", "chains")
    } <= written
    records = {task.key: place.recall("stated", task) for task in quick}
    assert {record["split"] for record in records.values()} == {42, 200}
    assert [c.statement for c in baseline_claims(baselines_of(records), gathered({}))] == [
        c.statement for c in claims
    ]
    assert not any(claim.kind == OURS for claim in claims)
    assert not others(gathered({}), {200})
