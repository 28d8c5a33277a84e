"""The report: its numbers are those of the library, and the file is self-contained."""

import json
import re

import numpy as np
import pytest
import torch
from torch import nn

import ssla
from ssla import metrics
from ssla.tables.report import html_report
from ssla.tables.report.facts import FACTORS, choose_rows
from ssla.tables.report.measures import LEVELS
from ssla.tables.report.short_texts import shorten
from ssla.tables.report.shown_rows import shorten_inputs

CLOSE = {"rtol": 2e-5, "atol": 1e-5}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def inputs(n, seed=0):
    return torch.randn(n, 3, generator=generator(seed), dtype=torch.float64)


def posterior(kind="number", prior=None):
    x = inputs(60)
    net = nn.Linear(3, 3 if kind == "class" else 1, dtype=torch.float64).eval()
    nn.init.constant_(net.weight, 0.1)
    nn.init.zeros_(net.bias)
    noise = torch.randn(60, generator=generator(1), dtype=torch.float64)
    y, likelihood = {
        "number": (x[:, 0] + 0.3 * noise, ssla.likelihoods.Gaussian(noise=0.3)),
        "count": (
            torch.poisson(torch.exp(1 + 0.5 * x[:, 0]), generator=generator(2)),
            ssla.likelihoods.Poisson(),
        ),
        "class": (
            (x[:, 0] + 0.5 * noise > 0).long() + (x[:, 1] > 0.7).long(),
            ssla.likelihoods.Categorical(),
        ),
    }[kind]
    post = ssla.fit(
        net,
        (x, y),
        likelihood=likelihood,
        prior=prior or ssla.priors.Gaussian(precision=2.0, mean=0.1),
    )
    return post, x[:25] + 0.5, y[:25]


def embedded(text):
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1]
    )


def strengths(post):
    """Under the own prior the fit itself: `with_prior` moves a variational Gaussian also then,
    by what its averages are old.
    """
    priors = [ssla.priors.Gaussian(precision=2.0 * factor, mean=0.1) for factor in FACTORS]
    return [
        post if factor == 1 else post.with_prior(prior)
        for factor, prior in zip(FACTORS, priors, strict=True)
    ]


@pytest.mark.parametrize("kind", ["number", "count"])
def test_the_slider_has_the_intervals_of_with_prior(kind):
    post, x, y = posterior(kind)
    facts = embedded(html_report(post, x, y).text)
    assert facts["factors"] == list(FACTORS)
    assert facts["factors"][facts["own"]] == 1
    rows = facts["rows"]
    for k, other in enumerate(strengths(post)):
        p = other.predict(x)
        expected = torch.stack([p.interval(level) for level in LEVELS], 1)
        np.testing.assert_allclose([row[k] for row in rows["interval"]], expected, **CLOSE)
        np.testing.assert_allclose([row[k] for row in rows["mean"]], p.mean, **CLOSE)
        np.testing.assert_allclose([row[k] for row in rows["doubt"]], p.epistemic.sqrt(), **CLOSE)
        grid = torch.tensor(rows["start"][4]) + rows["step"][4] * torch.arange(
            len(rows["heights"][4][k])
        )
        drawn = torch.tensor(rows["heights"][4][k], dtype=torch.float64)
        density = p.log_prob(grid.double().expand(len(x), -1))[4].exp()
        np.testing.assert_allclose(drawn / drawn.sum(), density / density.sum(), atol=2e-3)


def test_the_slider_has_the_probabilities_of_with_prior():
    post, x, y = posterior("class")
    rows = embedded(html_report(post, x, y).text)["rows"]
    for k, other in enumerate(strengths(post)):
        p = other.predict(x)
        np.testing.assert_allclose([row[k] for row in rows["probs"]], p.probs, **CLOSE)
        assert [row[k] for row in rows["label"]] == p.mode.tolist()
        assert [row[k][2] for row in rows["sizes"]] == p.interval(0.95).sum(1).tolist()


@pytest.mark.parametrize("kind", ["number", "count", "class"])
def test_scores_are_those_of_the_metrics_beside_the_plug_ins(kind):
    post, x, y = posterior(kind)
    scores = {name: pair for name, *pair in html_report(post, x, y).facts["scores"]}
    for place, refit in enumerate(("output", "plug_in")):
        p = post.predict(x, refit)
        what, size = ("set", "size") if kind == "class" else ("interval", "width")
        expected = {"negative log-likelihood": metrics.nll(p, y)}
        if kind == "class":
            hits = (p.mode == y).double().mean()
            expected |= {
                "Brier score": metrics.brier(p, y),
                "accuracy": hits,
                "calibration error (ECE)": metrics.ece(p, y),
            }
        else:
            expected |= {"CRPS": metrics.crps(p, y), "RMSE of the mean": metrics.rmse(p, y)}
            expected["calibration error"] = metrics.calibration_error(p, y)
        for level in LEVELS:
            expected[f"share inside the {level:.0%} {what}"] = metrics.coverage(p, y, level)
            expected[f"mean {size} of the {level:.0%} {what}"] = metrics.mean_width(p, level)
        for name, value in expected.items():
            assert scores[name][place] == pytest.approx(float(value), rel=1e-9), name


def test_the_doubtful_rows_are_those_with_the_largest_share_and_are_explained():
    post, x, y = posterior()
    facts = html_report(post, x, y, names=["a", "b", "c"]).facts
    p = post.predict(x)
    share = p.epistemic / p.variance
    assert facts["doubtful"] == share.argsort(descending=True)[:10].tolist()
    np.testing.assert_allclose(facts["rows"]["share"], share, **CLOSE)
    first = facts["doubtful"][0]
    why = ssla.explain(post, x[first : first + 1], top=5)
    assert [row for row, _ in facts["why"][str(first)]["rows"]] == (
        why.influence.rows[0] + 1
    ).tolist()
    assert facts["inputNames"] == ["a", "b", "c"]


def test_a_posterior_without_its_data_says_that_reasons_are_missing(tmp_path):
    post, x, y = posterior()
    post.save(tmp_path / "post")
    net = nn.Linear(3, 1, dtype=torch.float64).eval()
    nn.init.constant_(net.weight, 0.1)
    nn.init.zeros_(net.bias)
    report = html_report(ssla.load(tmp_path / "post", net), x, y)
    assert "What causes the doubt is not shown" in report.text
    assert not report.facts["why"]
    np.testing.assert_allclose(
        [row[2][2] for row in report.facts["rows"]["interval"]],
        post.predict(x).interval(0.95),
        **CLOSE,
    )


def test_a_page_loads_nothing_and_escapes_what_it_shows():
    post, x, y = posterior()
    evil = "</script><script>alert('x')</script>"
    text = html_report(post, x, y, names=[evil, "b", "c"], target=evil, title=evil).text
    assert evil not in text
    assert not re.findall(r"<(?:link|img|iframe|object|embed)\b", text)
    assert not re.findall(r"\bsrc(?:set)?=|@import|\burl\(|fetch\(|XMLHttpRequest", text)
    assert all(link.startswith("#") for link in re.findall(r'href="([^"]*)"', text))
    assert "://" not in text
    assert "default-src 'none'" in text
    assert embedded(text)["target"] == evil


def test_a_hundred_thousand_rows_are_scored_and_two_thousand_are_shown(tmp_path):
    post, _, _ = posterior()
    x = inputs(100_000, 5)
    y = x[:, 0] + 0.3 * torch.randn(100_000, generator=generator(6), dtype=torch.float64)
    report = html_report(post, x, y)
    assert report.save(tmp_path / "report.html").stat().st_size < 6e6
    facts = report.facts
    assert (facts["n"], facts["shown"], len(facts["rows"]["id"])) == (100_000, 2000, 2000)
    assert "2,000 of them" in report.text
    nll = metrics.nll(post.predict(x), y, reduce=False)
    assert facts["scores"][0][1] == pytest.approx(float(nll.mean()))
    assert {int(i) + 1 for i in nll.argsort(descending=True)[:500]} <= set(facts["rows"]["id"])


def test_long_texts_are_cut_until_the_page_has_room_for_them():
    assert shorten_inputs([["ü" * 70, 1.25, None, True]]) == [["ü" * 59 + "…", 1.25, "", 1]]
    many = shorten_inputs([["汉" * 80] * 40 for _ in range(2000)])
    assert {len(cell) for row in many for cell in row} == {12}


def test_shown_rows_are_the_worst_the_most_doubtful_and_evenly_spaced_ones():
    nll, share = torch.rand(1000, generator=generator(1)), torch.rand(1000, generator=generator(2))
    rows = choose_rows(nll, share, 40)
    assert len(rows) == len(set(rows)) == 40
    assert {int(nll.argmax()), int(share.argmax()), 0, 999} <= set(rows.tolist())
    assert np.array_equal(rows, choose_rows(nll, share, 40))
    assert np.array_equal(choose_rows(nll, share, 1000), np.arange(1000))
    assert np.diff(rows).max() < 110


def test_a_prior_without_a_strength_has_a_sentence_instead_of_a_slider():
    post, x, y = posterior(prior=ssla.priors.Flat())
    report = html_report(post, x, y)
    assert "The prior is flat" in report.text
    assert '<input type="range"' not in report.text
    assert report.facts["factors"] == [1.0]


def test_estimators_have_scaled_priors_in_every_component():
    sklearn = pytest.importorskip("ssla.sklearn")
    x, y = (
        inputs(60).numpy(),
        inputs(60)[:, 0].numpy() * 5 + 20 + np.random.default_rng(0).normal(size=60),
    )
    model = sklearn.SSLARegressor("gaussian", members=2, max_epochs=5, random_state=0).fit(x, y)
    before = model.predict_interval(x[:10])
    report = html_report(model, x[:10], y[:10])
    np.testing.assert_allclose(
        [row[2][2] for row in report.facts["rows"]["interval"]], before, **CLOSE
    )
    weak = [row[0][2] for row in report.facts["rows"]["interval"]]
    assert np.abs(np.array(weak) - before).max() > 1e-4
    np.testing.assert_array_equal(model.predict_interval(x[:10]), before)
    assert "SSLARegressor" in report.text
    place = report.facts["doubtful"][0]
    column, fall = report.facts["why"][str(place)]["inputs"][0]
    changed = x[place : place + 1].copy()
    changed[0, column] = x[:, column].mean()
    doubt, less = (
        float(model.predict_dist(rows).epistemic) for rows in (x[place : place + 1], changed)
    )
    assert fall == pytest.approx(1 - less / doubt, rel=1e-4)
    assert "posteriors, whose predictives are mixed" in report.text

    labels = np.where(x[:, 0] > 0, "yes <b>", "no")
    chosen = sklearn.SSLAClassifier(max_epochs=5, random_state=0).fit(x, labels)
    facts = html_report(chosen, x[:10], labels[:10]).facts
    assert facts["classes"] == ["no", "yes <b>"]
    np.testing.assert_allclose(
        [row[2] for row in facts["rows"]["probs"]], chosen.predict_proba(x[:10]), **CLOSE
    )
    with pytest.raises(ValueError, match="3 labels that were not in the training data"):
        html_report(chosen, x[:3], ["maybe"] * 3)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"y": torch.zeros(3)}, ValueError, "X has 25 rows, but y has 3"),
        ({"y": torch.full((25,), torch.nan)}, ValueError, "missing or infinite"),
        ({"y": torch.zeros(25, 2)}, ValueError, "one target"),
        ({"names": ["a"]}, ValueError, "names must have 3 entries"),
        ({"max_rows": 1}, ValueError, "max_rows must be a whole number from 4"),
        ({"model": nn.Linear(3, 1)}, TypeError, "needs a Posterior or an estimator"),
    ],
)
def test_wrong_arguments_have_one_sentence(change, error, text):
    post, x, y = posterior()
    with pytest.raises(error, match=text):
        html_report(**({"model": post, "X": x, "y": y} | change))


def test_a_notebook_shows_the_page_in_a_frame():
    post, x, y = posterior()
    shown = html_report(post, x, y)._repr_html_()
    assert shown.startswith("<iframe")
    assert "<script>" not in shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.45279249617691925, "0.4528"),
        (torch.tensor([-0.0236], dtype=torch.float64), "-0.0236"),
        (torch.tensor([[0.1, 2.0], [-3.12345, 0.0]]), "2×2 numbers from -3.123 to 2"),
        (np.ones(3), "3 numbers, all 1"),
        (
            {f"layer{i}": 1.0 / 3 for i in range(9)},
            "{" + ", ".join(f"layer{i}: 0.3333" for i in range(6)) + ", … 9 entries}",
        ),
        (
            ssla.priors.Gaussian(1.1522648718550217, {"2.bias": torch.zeros(1)}),
            "Gaussian(precision=1.152, mean={2.bias: 0})",
        ),
        (torch.distributions.Normal(0.0, 1.2345678), "Normal(loc: 0.0, scale: 1.235)"),
        ("output 0.12345", "'output 0.12345'"),
        ((50,), "(50,)"),
        (None, "None"),
    ],
)
def test_settings_are_short_texts(value, text):
    assert shorten(value) == text


def test_the_prior_has_four_digits_in_the_page_and_all_of_them_in_the_fit():
    mean = {"weight": torch.linspace(-1, 1, 3, dtype=torch.float64)[None], "bias": 0.0}
    post, x, y = posterior(prior=ssla.priors.Gaussian(1.1522648718550217, mean))
    text = html_report(post, x, y).text
    prior = (
        "Gaussian(precision=1.152, mean={weight: 1×3 numbers from -1 to 1, bias: 0}) (convention: "
        "exact)"
    )
    assert f"<dt>prior</dt><dd>{prior}</dd>" in text
    assert "tensor(" not in text
    assert "1.1522648718550217" in post.report.prior
