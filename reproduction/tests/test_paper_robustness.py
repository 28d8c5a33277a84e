"""The scores against scikit-learn, the baselines against closed forms, laplace-torch against
ours, and the tasks' promises.
"""

import json
import math

import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from torch import nn

import ssla
from ssla import metrics
from ssla.likelihoods import Categorical
from ssla.predictive import from_marginal
from ssla_paper.peers.dropout_classes import dropout_classes
from ssla_paper.peers.laplace_classes import laplace_classes
from ssla_paper.peers.temperature import COLDEST, temperature
from ssla_paper.robustness import Robustness, data
from ssla_paper.robustness.ablation import variants
from ssla_paper.robustness.claims import _by_dataset, _from_the_best
from ssla_paper.robustness.covariate import _mean_of, _places
from ssla_paper.robustness.methods import quiet, trained
from ssla_paper.robustness.results import Results, spread
from ssla_paper.robustness.scores import auroc, class_scores, entropy, reliability
from ssla_paper.runner import OURS


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_auroc_is_scikit_learns_with_ties_too():
    inside = torch.randn(57, generator=generator()).mul(4).round()
    outside = torch.randn(31, generator=generator(1)).mul(4).add(2).round()
    truth = reference.roc_auc_score([0] * 57 + [1] * 31, torch.cat([inside, outside]).numpy())
    assert auroc(inside, outside) == pytest.approx(truth, abs=1e-12)
    assert auroc(inside, inside) == pytest.approx(0.5, abs=1e-12)
    assert auroc(torch.zeros(3), torch.ones(2)) == 1.0


def test_scores_are_those_of_scikit_learn_and_of_our_own_metrics():
    f = 2 * torch.randn(80, 4, dtype=torch.float64, generator=generator())
    y = torch.randint(0, 4, (80,), generator=generator(1))
    found = class_scores(torch.softmax(f, 1), y)
    p = from_marginal(Categorical(), f, torch.zeros(80, 4, 4, dtype=torch.float64), "none")
    assert found["nll"] == pytest.approx(
        reference.log_loss(y, torch.softmax(f, 1), labels=range(4)), abs=1e-10
    )
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(y, f.argmax(1)))
    for name, score in (("nll", metrics.nll), ("brier", metrics.brier), ("ece", metrics.ece)):
        assert found[name] == pytest.approx(float(score(p, y)), abs=1e-10)
    count, confidence, right = reliability(torch.softmax(f, 1), y)
    assert sum(count) == 80
    assert sum(right) == pytest.approx(80 * found["accuracy"])
    assert sum(confidence) == pytest.approx(float(torch.softmax(f, 1).amax(1).sum()))


def test_entropy_where_a_probability_is_zero():
    assert entropy(torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])).tolist() == pytest.approx(
        [math.log(2), 0.0]
    )


def test_temperature_of_two_classes_is_the_logit_of_the_share_that_is_right():
    """Logits (0, 4) in every row, 30 of 40 right: softmax(4/T) = 3/4, so T = 4 / log 3."""
    logits = torch.tensor([[0.0, 4.0]]).expand(40, 2)
    y = torch.tensor([1] * 30 + [0] * 10)
    assert temperature(logits, y) == pytest.approx(4 / math.log(3), rel=1e-6)
    assert temperature(logits, torch.ones(40)) == 1.0  # no maximum
    assert temperature(1e-6 * logits, y) == pytest.approx(COLDEST, rel=1e-6)


def test_temperature_undoes_a_known_one():
    f = torch.randn(200_000, 3, dtype=torch.float64, generator=generator())
    y = torch.multinomial(torch.softmax(f, 1), 1, generator=generator(1))[:, 0]
    assert temperature(2.5 * f, y) == pytest.approx(2.5, rel=0.02)


def small_network():
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    with torch.no_grad():
        for part in net.parameters():
            part.copy_(
                torch.randn(part.shape, dtype=torch.float64, generator=generator(part.numel()))
            )
    x = torch.randn(60, 2, dtype=torch.float64, generator=generator(7))
    return net, x, net(x).detach().argmax(1)


def test_laplace_torchs_probit_is_the_probit_of_our_marginal():
    """softmax(f_c / √(1 + π/8 K_cc)): the same f and K by our own fit, dense and with the same
    prior.
    """
    pytest.importorskip("laplace")
    net, x, y = small_network()
    theirs = laplace_classes(net, x, y, structure="full", precision=2.0)(x[:9])
    with quiet():
        posterior = ssla.fit(
            net,
            (x, y),
            likelihood=Categorical(),
            prior=ssla.priors.Gaussian(2.0),
            gaussian="laplace",
            mode="tilt",
        )
    f, K = posterior.marginal(x[:9])
    probit = torch.softmax(f / (1 + math.pi / 8 * K.diagonal(dim1=1, dim2=2)).sqrt(), 1)
    assert torch.allclose(theirs, probit, atol=1e-8)
    tuned = laplace_classes(net, x, y)(x[:9])
    assert torch.allclose(tuned.sum(1), torch.ones(9, dtype=torch.float64), atol=1e-8)
    assert not torch.allclose(tuned, theirs, atol=1e-3)


def test_dropout_without_dropping_is_the_network_and_leaves_the_global_state_alone():
    _, x, y = small_network()
    held = torch.arange(60) < 10
    before = torch.random.get_rng_state()
    draws = dropout_classes(x, y, held, 3, rate=0.3, draws=20)(x[:4])
    assert torch.equal(torch.random.get_rng_state(), before)
    assert draws.shape == (20, 4, 3)
    assert float(draws.std(0).max()) > 1e-3
    still = dropout_classes(x, y, held, 3, rate=0.0, draws=3)(x[:4])
    assert torch.equal(still[0], still[2])


def test_a_prior_by_the_rows_left_out_keeps_the_mode_and_scores_better_on_them():
    found = data.classes("wine", 0, 0.6)
    methods = trained(found.x, found.y, found.count, 0, epochs=15, members=1)
    out, module = methods.held_out[0], methods.modules[0]
    with quiet():
        whole, part = (
            ssla.fit(
                module,
                (found.x[r], found.y[r]),
                likelihood=Categorical(),
                prior=ssla.priors.Gaussian(),
                mode="polish",
                gaussian="laplace",
            )
            for r in (out | True, ~out)
        )
        assert torch.equal(methods.validated.theta, whole.theta)
        prior, rows = methods.validated.prior, found.x[out]
        tuned, untuned = (
            float(metrics.nll(p.predict(rows), found.y[out]))
            for p in (part.with_prior(prior), part)
        )
    assert tuned < untuned - 1e-3
    assert torch.equal(
        methods.answer("validated", found.new[:5]).probs,
        methods.validated.predict(found.new[:5]).probs.double(),
    )


def test_methods_agree_where_they_must():
    found = data.classes("wine", 0, 0.6)
    methods = trained(found.x, found.y, found.count, 0, epochs=15, members=2)
    x = found.new[:8]
    answers, missing = methods.answers(
        x, ["plug_in", "ensemble", "none", "output", "default", "default5"], epistemic=True
    )
    assert not missing
    f = methods.first.marginal(x).mean
    assert torch.allclose(
        answers["none"].probs, torch.softmax(f, 1), atol=1e-12
    )  # ASSLA is the plug-in
    each = [torch.softmax(module(x).detach(), 1) for module in methods.modules]
    assert torch.allclose(answers["ensemble"].probs, (each[0] + each[1]) / 2, atol=1e-12)
    both = [
        ssla.fit(m, (found.x, found.y), likelihood=Categorical()).predict(x).probs
        for m in methods.modules
    ]
    assert torch.allclose(answers["default"].probs, both[0], atol=1e-12)
    assert torch.allclose(answers["default5"].probs, (both[0] + both[1]) / 2, atol=1e-12)
    for name in ("default", "default5"):
        assert torch.allclose(answers[name].probs, methods.answer(name, x).probs, atol=1e-12)
    for name in ("ensemble", "output", "default", "default5"):
        assert bool((answers[name].epistemic >= -1e-12).all())


def test_turned_images_and_wrong_labels():
    images = torch.arange(64.0, dtype=torch.float64)[None]
    assert torch.allclose(data.rotated(images, 0.0), images, atol=1e-9)
    square = data.rotated(images, 90.0).reshape(8, 8)
    turned = [torch.rot90(images.reshape(8, 8), k) for k in (1, 3)]
    assert any(torch.allclose(square, each, atol=1e-6) for each in turned)
    y = torch.arange(5).repeat(4000)
    wrong = data.mislabelled(y, 0.3, 5, generator())
    assert float((wrong != y).double().mean()) == pytest.approx(0.3, abs=0.01)
    assert torch.bincount(wrong[wrong != y], minlength=5).min() > 1000
    assert torch.equal(data.mislabelled(y, 0.0, 5, generator()), y)


@pytest.mark.parametrize("name", data.SIZES)
def test_splits_do_not_overlap_and_are_standardised(name):
    found = data.classes(name, 3)
    assert len(found.new) == data.SIZES[name][1]
    assert len(found.x) == data.SIZES[name][0]
    seen = {row.numpy().tobytes() for row in found.x}
    assert sum(row.numpy().tobytes() in seen for row in found.new) == 0
    assert abs(float(found.x.mean())) < 1e-9
    assert torch.equal(found.scale(found.raw), found.new)
    assert all(torch.isfinite(x).all() for x in found.outside.values())


def test_distances_are_in_order_and_zero_inside(monkeypatch):
    monkeypatch.delenv("SSLA_DATA", raising=False)
    assert data.table_at_hand() == "diabetes"
    for name, source in (("toy", "toy"), ("diabetes", "diabetes")):
        found = data.regression(name, 0)
        assert found.source == source
        place, edges = _places(found.distance)
        assert edges[0] == 0.0
        assert edges == sorted(edges)
        assert torch.equal(place == 0, found.distance == 0)


def test_the_mean_of_a_network_is_its_first_output():
    net, x, _ = small_network()
    assert torch.allclose(_mean_of(net)(x), net(x)[:, :1], atol=1e-12)


def test_every_choice_has_its_default_and_settings_are_json():
    found = variants()
    assert len({(v.factor, v.level) for v in found}) == len(found)
    assert {"refit", "curvature", "structure", "weights", "prior", "mode"} == {
        v.factor for v in found
    }
    for quick in (True, False):
        tasks = Robustness().tasks(quick)
        assert len({task.key for task in tasks}) == len(tasks)
        for task in tasks:
            json.dumps(dict(task.settings))


def test_means_are_not_made_of_what_is_missing():
    assert spread([1.0, 2.0, 3.0], 1) == "2.0 ± 1.0"
    assert spread([1.0, None]) is None
    assert spread([5.0], 2) == "5.00"
    assert spread([np.inf, 1.0]) is None


def runs(ours, baseline):
    """Two sets, three seeds: the ECE of ASSLA and of the best baseline."""
    found = {}
    for name in ("wine", "moons"):
        for seed, (a, b) in enumerate(zip(ours, baseline, strict=True)):
            worse = {"scores": {"ece": 0.5, "nll": 0.5, "accuracy": 0.9}, "auroc": {}}
            methods = dict.fromkeys(("temperature", "laplace", "ensemble", "dropout"), worse)
            for one, ece in (("plug_in", b), ("none", a), ("default", a)):
                scores = {"ece": ece, "nll": 0.1, "accuracy": 0.9}
                methods[one] = {"scores": scores, "auroc": {}}
            found[f"calibration-{name}-{seed}"] = {
                "dataset": name,
                "methods": methods,
                "missing": {},
            }
    return Results.of(found)


def test_calibration_is_judged_by_paired_differences_with_their_error():
    for ours, holds in (((0.03, 0.02, 0.05), True), ((0.04, 0.05, 0.06), False)):
        results = runs(ours, (0.02, 0.03, 0.04))
        made = {c.statement: c for c in _by_dataset(results)}
        (line,) = (c for s, c in made.items() if s.startswith("Unc") and s.endswith(": ASSLA"))
        assert line.holds == holds
        (lower,) = (c for s, c in made.items() if s.startswith("The NLL") and s.endswith(": ASSLA"))
        assert lower.kind == OURS
    apart, error = _from_the_best(runs((0.03, 0.02, 0.05), (0.02, 0.03, 0.04)), "none", ["wine"])
    assert (apart, error) == pytest.approx((0.01 / 3, math.sqrt(4e-4 / 3) / math.sqrt(3)))
