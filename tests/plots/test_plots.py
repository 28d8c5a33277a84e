"""What the pictures draw: ranges, labels and artists, against what the library answers."""

import subprocess
import sys
from functools import cache

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from scipy.stats import binom

import ssla
from ssla import likelihoods as L
from ssla import plots
from ssla.plots.calibration import compute_binomial_range
from ssla.plots.doubt import compute_auroc
from support.networks import data, mlp

PRIOR = ssla.priors.Gaussian(precision=1.0)
X, Y = data(60)
NEW, TRUTH = data(50, seed=8)
LINE = torch.linspace(-2, 2, 31, dtype=torch.float64)[:, None].flip(0)  # not sorted


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@cache
def posterior():
    return ssla.fit(mlp(), (X, Y), likelihood=L.Gaussian(noise=0.3), prior=PRIOR)


@cache
def on_a_line():
    return ssla.fit(mlp(inputs=1), (X[:, :1], Y), likelihood=L.Gaussian(noise=0.3), prior=PRIOR)


@cache
def classes():
    y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
    return ssla.fit(mlp(outputs=3), (X, y), likelihood=L.Categorical(), prior=PRIOR)


@cache
def sensitivity():
    return ssla.sensitivity(on_a_line(), LINE, (0.1, 10.0, 3))


@cache
def credal():
    return ssla.credal(
        on_a_line(),
        LINE[:2],
        {"weak": ssla.priors.Gaussian(0.1), "strong": ssla.priors.Gaussian(10.0)},
    )


def labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def corners(collection):
    """Lowest and highest point of a filled area."""
    points = np.concatenate([path.vertices for path in collection.get_paths()])
    return points.min(0), points.max(0)


def line(ax, label):
    return next(one for one in ax.get_lines() if one.get_label() == label)


TRUE_CLASSES = torch.arange(50) % 3
PICTURES = {
    "bands": lambda ax: plots.bands(on_a_line().predict(LINE), LINE, (X[:, :1], Y), ax=ax),
    "density": lambda ax: plots.density(posterior().predict(NEW), 3, ax=ax),
    "increments": lambda ax: plots.increments(posterior().predict(NEW), 3, ax=ax),
    "calibration": lambda ax: plots.calibration(posterior().predict(NEW), TRUTH, ax=ax),
    "calibration, leave-one-out": lambda ax: plots.calibration(posterior().loo(), ax=ax),
    "pit": lambda ax: plots.pit(posterior().predict(NEW), TRUTH, ax=ax),
    "pit, leave-one-out": lambda ax: plots.pit(posterior().loo(), ax=ax),
    "reliability": lambda ax: plots.reliability(classes().predict(NEW), TRUE_CLASSES, ax=ax),
    "intervals": lambda ax: plots.intervals(posterior().predict(NEW), TRUTH, ax=ax),
    "prior_bands": lambda ax: plots.prior_bands(sensitivity(), LINE, ax=ax),
    "p_box": lambda ax: plots.p_box(credal(), 1, ax=ax),
    "doubt": lambda ax: plots.doubt(posterior().predict(NEW), ax=ax),
    "out_of_distribution": lambda ax: plots.out_of_distribution(
        posterior().predict(NEW), posterior().predict(4 * NEW), ax=ax
    ),
    "influence": lambda ax: plots.influence(ssla.explain(posterior(), NEW[:2]), ax=ax),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn_on_the_given_axes_with_labels(name):
    figure, (left, right) = plt.subplots(1, 2)
    assert PICTURES[name](right) is right
    assert not left.has_data()
    assert right.get_xlabel()
    assert right.get_ylabel() or name == "influence"
    assert PICTURES[name](None).figure is not figure


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("style", ["default", "dark_background"])
def test_text_and_lines_can_be_told_from_the_background_and_text_fits_400_pixels(name, style):
    with plt.style.context(style):
        figure, ax = plt.subplots(figsize=(4, 3), dpi=100, layout="constrained")
        PICTURES[name](ax)
        figure.canvas.draw()
    legend = ax.get_legend()
    texts = [ax.xaxis.label, ax.yaxis.label, ax.title, *(legend.get_texts() if legend else [])]
    for artist in texts:
        assert contrast(artist.get_color(), ax.get_facecolor()) >= 4.5, artist
    for artist in ax.get_lines():
        assert contrast(artist.get_color(), ax.get_facecolor()) >= 1.25, artist
    inside = figure.bbox
    for artist in texts:
        box = artist.get_window_extent()
        assert not artist.get_text() or (box.x0 >= inside.x0 - 1 and box.x1 <= inside.x1 + 1), (
            artist
        )
        assert artist.get_fontsize() >= 8


def contrast(one, other):
    """The ratio of WCAG 2."""
    levels = []
    for color in (one, other):
        c = np.array(mpl.colors.to_rgb(color))
        c = np.where(c <= 0.03928, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
        levels.append(float(c @ (0.2126, 0.7152, 0.0722)))
    return (max(levels) + 0.05) / (min(levels) + 0.05)


# --- distributions -------------------------------------------------------------------------


def test_bands_have_the_ends_of_the_intervals_and_the_mean_in_the_order_of_x():
    predictive = on_a_line().predict(LINE)
    ax = plots.bands(predictive, LINE, (X[:, :1], Y), levels=(0.5, 0.9))
    assert labels(ax) == ["90%", "50%", "mean", "data"]
    for area, level in zip(ax.collections, (0.9, 0.5), strict=False):
        low, high = corners(area)
        assert (low[0], high[0]) == (-2, 2)
        ends = predictive.interval(level)
        assert (low[1], high[1]) == pytest.approx((float(ends.min()), float(ends.max())))
    mean = line(ax, "mean")
    assert np.all(np.diff(mean.get_xdata()) > 0)
    np.testing.assert_allclose(mean.get_ydata(), predictive.mean.flip(0))
    np.testing.assert_allclose(ax.collections[2].get_offsets(), torch.stack([X[:, 0], Y], 1))


def test_a_density_integrates_to_one_and_its_region_is_the_hdr():
    predictive = posterior().predict(NEW)
    ax = plots.density(
        {"plug-in": posterior().predict(NEW, refit="plug_in"), "output": predictive}, 3, level=0.8
    )
    assert labels(ax) == ["plug-in", "output", "80% region"]
    for one in ax.get_lines():
        assert np.trapezoid(one.get_ydata(), one.get_xdata()) == pytest.approx(1, abs=2e-3)
    low, high = corners(ax.collections[0])
    region, step = predictive.hdr(0.8), np.diff(line(ax, "output").get_xdata())[0]
    assert low[0] == pytest.approx(float(region.lower[3, 0]), abs=step)
    assert high[0] == pytest.approx(float(region.upper[3, 0]), abs=step)


def test_a_region_of_two_parts_is_drawn_in_two_parts():
    far = [
        ssla.predictive.from_marginal(L.Gaussian(noise=0.3), [[m]], [[[0.01]]]) for m in (-3.0, 3.0)
    ]
    ax = plots.density(ssla.mixture(far), level=0.9)
    assert len(ax.collections) == 2
    (_, left), (right, _) = (corners(area) for area in ax.collections)
    assert left[0] < 0 < right[0]


def test_the_density_of_counts_is_drawn_at_whole_numbers():
    y = torch.poisson(X[:, 0].exp(), generator=torch.Generator().manual_seed(0))
    counts = ssla.fit(mlp(), (X, y), likelihood=L.Poisson(), prior=PRIOR).predict(NEW)
    ax = plots.density(counts, 2)
    drawn = ax.get_lines()[0]
    assert np.all(drawn.get_xdata() % 1 == 0)
    assert drawn.get_ydata().sum() == pytest.approx(1, abs=2e-3)
    assert ax.get_ylabel() == "probability"
    assert plots.pit(counts, y[:50]).get_legend()
    assert plots.increments(counts, 2).get_legend()


def test_increments_are_zero_at_the_mode_and_add_up():
    predictive = posterior().predict(NEW)
    ax = plots.increments(predictive, 3)
    parts = {
        name: line(ax, name).get_ydata() for name in ("likelihood", "prior", "curvature", "sum")
    }
    np.testing.assert_allclose(
        parts["likelihood"] + parts["prior"] + parts["curvature"], parts["sum"], atol=1e-12
    )
    y = torch.as_tensor(line(ax, "sum").get_xdata())
    log = predictive.log_prob(y.expand(50, -1))[3] - predictive.log_prob(predictive.mode)[3]
    np.testing.assert_allclose(parts["sum"], log, atol=1e-9)


def test_prior_bands_have_three_lines_for_each_prior():
    found = sensitivity()
    ax = plots.prior_bands(found, LINE, level=0.8)
    assert len(ax.get_lines()) == 9
    assert labels(ax) == list(found.names)
    for i, predictive in enumerate(found.predictives):
        mean, low, high = ax.get_lines()[3 * i : 3 * i + 3]
        np.testing.assert_allclose(mean.get_ydata(), predictive.mean.flip(0))
        np.testing.assert_allclose(low.get_ydata(), predictive.interval(0.8)[:, 0].flip(0))
        np.testing.assert_allclose(high.get_ydata(), predictive.interval(0.8)[:, 1].flip(0))


def test_a_p_box_has_the_bounds_of_the_distribution_function_and_the_interval():
    found = credal()
    ax = plots.p_box(found, 1, level=0.8)
    lower, upper, bar = ax.get_lines()
    y = torch.as_tensor(lower.get_xdata())
    bounds = found.cdf(y.expand(2, -1))
    np.testing.assert_allclose(lower.get_ydata(), bounds.lower[1])
    np.testing.assert_allclose(upper.get_ydata(), bounds.upper[1])
    np.testing.assert_allclose(bar.get_xdata(), found.interval(0.8)[1])
    assert labels(ax)[1] == "80% under every prior"


# --- calibration ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "p"), [(1, 0.5), (30, 0.1), (200, 0.95), (5000, 0.5), (10**7, 0.3), (50, 1.0), (50, 0.0)]
)
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_the_range_of_a_count_is_that_of_the_binomial_distribution(n, p, confidence):
    low, high = compute_binomial_range(n, p, confidence)
    tail = (1 - confidence) / 2
    assert low == binom.ppf(tail, n, p) or binom.cdf(low - 1, n, p) == pytest.approx(tail)
    assert high == binom.ppf(1 - tail, n, p)


@pytest.mark.parametrize("source", ["held-out", "leave-one-out"])
def test_a_calibration_curve_has_the_coverage_at_each_level(source):
    predictive, loo = posterior().predict(NEW), posterior().loo()
    ax = (
        plots.calibration(loo)
        if source == "leave-one-out"
        else plots.calibration(predictive, TRUTH)
    )
    n = 60 if source == "leave-one-out" else 50
    curve = line(ax, f"{source}, {n} rows")
    for level, share in zip(curve.get_xdata()[::6], curve.get_ydata()[::6], strict=True):
        level = float(level)
        expected = (
            loo.coverage(level)
            if source == "leave-one-out"
            else float(ssla.metrics.coverage(predictive, TRUTH, level))
        )
        assert share == pytest.approx(expected)
    vertices = ax.collections[0].get_paths()[0].vertices
    at = vertices[np.isclose(vertices[:, 0], 0.5)][:, 1]
    assert (at.min(), at.max()) == tuple(np.array(compute_binomial_range(n, 0.5, 0.95)) / n)


def test_a_row_of_weight_two_is_drawn_as_two_rows():
    weights = torch.ones(60, dtype=torch.float64)
    weights[::2] = 2.0
    loo = ssla.fit(mlp(), (X, Y, weights), likelihood=L.Gaussian(noise=0.3), prior=PRIOR).loo()
    assert "leave-one-out, 90 rows" in labels(plots.calibration(loo))


def test_the_pit_histogram_has_the_shares_of_the_ranks():
    pit = ssla.metrics.pit(posterior().predict(NEW), TRUTH)
    ax = plots.pit(posterior().predict(NEW), TRUTH, bins=5)
    expected = np.histogram(pit, bins=5, range=(0, 1))[0] / 50 * 5
    bars = [bar.get_height() for bar in ax.containers[0]]
    np.testing.assert_allclose(bars, expected, atol=1e-9)
    assert sum(bars) == pytest.approx(5)


def test_each_of_several_targets_can_be_drawn():
    y = torch.stack([Y, X[:, 1]], 1)
    predictive = ssla.fit(
        mlp(outputs=2), (X, y), likelihood=L.Gaussian(noise=[0.3, 0.5]), prior=PRIOR
    ).predict(X)
    one, two = (
        plots.calibration(predictive, y, target=t).get_lines()[1].get_ydata() for t in (0, 1)
    )
    assert not np.allclose(one, two)
    with pytest.raises(ValueError, match="target must be from 0 to 1"):
        plots.calibration(predictive, y, target=2)


def test_reliability_has_accuracy_and_rows_by_bin():
    predictive = classes().predict(NEW)
    ax = plots.reliability(predictive, TRUE_CLASSES, bins=4)
    sure, guess = predictive.probs.max(1)
    bins = (sure * 4).long().clamp(0, 3)
    counts = torch.bincount(bins, minlength=4)
    assert [text.get_text() for text in ax.texts] == [str(int(count)) for count in counts if count]
    curve = line(ax, "accuracy")
    expected = [
        float((guess == TRUE_CLASSES)[bins == b].double().mean()) for b in range(4) if counts[b]
    ]
    np.testing.assert_allclose(curve.get_ydata(), expected)
    np.testing.assert_allclose(
        curve.get_xdata(), [float(sure[bins == b].mean()) for b in range(4) if counts[b]]
    )


def test_intervals_are_sorted_by_width_and_misses_are_marked():
    spread = ssla.predictive.from_marginal(
        L.Gaussian(noise=0.3), torch.zeros(50, 1), torch.rand(50, 1, 1)
    )
    ax = plots.intervals(spread, TRUTH, level=0.8)
    ends = spread.interval(0.8)
    outside = (ends[:, 0] > TRUTH) | (ends[:, 1] < TRUTH)
    assert len(ax.collections[2].get_offsets()) == int(outside.sum()) > 0
    assert len(ax.collections[1].get_offsets()) == int((~outside).sum())
    assert ax.get_title() == f"{float((~outside).double().mean()):.1%} of y inside 80% intervals"
    vertices = ax.collections[0].get_paths()[0].vertices
    top = [vertices[np.abs(vertices[:, 0] - k) <= 0.5, 1].max() for k in range(1, 51)]
    assert np.all(np.diff(top) >= -1e-9)


# --- doubt ---------------------------------------------------------------------------------


def test_doubt_is_drawn_against_noise():
    predictive = posterior().predict(NEW)
    ax = plots.doubt(predictive)
    expected = torch.stack([predictive.aleatoric.sqrt(), predictive.epistemic.sqrt()], 1)
    np.testing.assert_allclose(ax.collections[0].get_offsets(), expected)
    assert ax.get_xscale() == ax.get_yscale() == "log"
    assert len(plots.doubt(classes().predict(NEW)).collections[0].get_offsets()) == 50


def test_foreign_rows_are_counted_above_the_line():
    known, foreign = posterior().predict(NEW), posterior().predict(4 * NEW)
    ax = plots.out_of_distribution(known, foreign)
    limit = float(torch.quantile(known.epistemic.sqrt(), 0.95))
    assert line(ax, "95% of known below").get_ydata()[0] == pytest.approx(limit)
    share = float((foreign.epistemic.sqrt() > limit).double().mean())
    assert ax.get_title().startswith(f"{share:.0%} of foreign above")


def test_auroc_counts_pairs():
    low, high = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.0, 3.0])
    pairs = (high[:, None] > low).double() + 0.5 * (high[:, None] == low).double()
    assert compute_auroc(low, high) == pytest.approx(float(pairs.mean()))


def test_influence_has_a_bar_for_each_row_with_its_sign():
    explanation = ssla.explain(posterior(), NEW[:2], top=6)
    ax = plots.influence(explanation, 1, most=4)
    assert [tick.get_text() for tick in ax.get_yticklabels()] == [
        f"row {i}" for i in explanation.influence.rows[1, :4].tolist()
    ]
    np.testing.assert_allclose(
        [bar.get_width() for bar in ax.patches], explanation.influence.mean[1, :4, 0]
    )
    ax = plots.influence(explanation, 1, by="variance")
    np.testing.assert_allclose(
        [bar.get_width() for bar in ax.patches], explanation.influence.variance[1, :, 0]
    )


# --- bad input -----------------------------------------------------------------------------


def test_bad_input_has_clear_errors_and_draws_nothing():
    predictive, loo = posterior().predict(NEW), posterior().loo()
    for error, match, call in (
        (
            TypeError,
            r"plots.bands is for one ordered target.*'class'",
            lambda: plots.bands(classes().predict(NEW), NEW[:, 0]),
        ),
        (TypeError, "Use plots.reliability", lambda: plots.pit(classes().loo())),
        (
            TypeError,
            "plots.reliability is for classes",
            lambda: plots.reliability(predictive, TRUTH),
        ),
        (ValueError, "needs y", lambda: plots.calibration(predictive)),
        (ValueError, "takes no y", lambda: plots.calibration(loo, TRUTH)),
        (ValueError, "one number for each of the 50 inputs", lambda: plots.bands(predictive, NEW)),
        (ValueError, "row must be one of the 50 inputs", lambda: plots.density(predictive, 50)),
        (ValueError, "predictives has no entry", lambda: plots.density({})),
        (ValueError, r"y must have shape \(50,\)", lambda: plots.intervals(predictive, TRUTH[:3])),
        (ValueError, "bins must be a whole number from 2", lambda: plots.pit(loo, bins=1)),
        (
            ValueError,
            "level must be strictly between 0 and 1",
            lambda: plots.intervals(predictive, TRUTH, level=90),
        ),
        (ValueError, "doubt of zero", lambda: plots.doubt(posterior().predict(NEW, refit="none"))),
        (
            ValueError,
            "output must be from 0 to 0",
            lambda: plots.influence(ssla.explain(posterior(), NEW[:1]), output=1),
        ),
    ):
        plt.close("all")
        with pytest.raises(error, match=match):
            call()


def test_importing_plots_does_not_need_matplotlib_and_drawing_names_the_extra():
    code = """
import sys
sys.modules["matplotlib"] = None
import torch, ssla
from ssla import plots
predictive = ssla.predictive.from_marginal(ssla.likelihoods.Gaussian(noise=1.0), torch.zeros(2, 1), torch.ones(2, 1, 1))
try:
    plots.density(predictive)
except ImportError as error:
    assert "pip install 'ssla[plots]'" in str(error)
else:
    raise SystemExit("expected a hint at the extra")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-800:]


def test_a_dark_style_has_other_tints_than_a_light_one():
    colors = []
    for style in ("default", "dark_background"):
        with plt.style.context(style):
            ax = plots.bands(on_a_line().predict(LINE), LINE)
            colors.append(tuple(ax.collections[0].get_facecolor()[0][:3]))
    assert sum(colors[0]) > 2
    assert sum(colors[1]) < 1
