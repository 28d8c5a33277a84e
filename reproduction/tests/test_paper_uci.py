"""The UCI study: its reader, the constant width, ranks, peers and claims, each against another
way to have it.
"""

import math
import os
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import ssla_paper.uci.data as data
from ssla.sklearn import SSLARegressor
from ssla_paper.networks import Recipe
from ssla_paper.peers import GaussianMixture, scores
from ssla_paper.uci import Uci
from ssla_paper.uci.claims import claims
from ssla_paper.uci.data import SETS, STAND_IN, MissingDataError, load, read, split, stand_in
from ssla_paper.uci.ours import Case, fair, in_unit, networks, noise_nodes, own, refit_gap
from ssla_paper.uci.published import PUBLISHED, SCORES, constant_width, published_scores
from ssla_paper.uci.ranks import cliques, critical_difference, friedman, ranking
from ssla_paper.uci.report import allowed, best_run, hits, rank_tables, whole_rows
from ssla_paper.uci.results import COMPARED, gathered

CHECKS = {  # rows, inputs and the target's mean, from the README beside the data
    "auto_mpg": (392, 7, None),
    "liver_disorders": (345, 5, 69.8696),
    "concrete": (1030, 8, 35.8178),
    "wine_quality": (6497, 12, 10.4918),
    "bike_sharing_hour": (17379, 14, 0.4970),
    "airfoil_self_noise": (1503, 5, 124.8359),
    "daily_demand_orders": (60, 12, 300.8733),
    "real_estate_valuation": (414, 6, 37.9802),
}
FOLDER = Path(os.environ.get("SSLA_DATA", "nowhere"))
with_data = pytest.mark.skipif(
    not (FOLDER / "auto_mpg.csv").exists(), reason="SSLA_DATA does not name the UCI sets"
)


@with_data
@pytest.mark.parametrize("name", SETS)
def test_sets_are_read_whole(name):
    rows, (count, inputs, mean) = read(FOLDER, name), CHECKS[name]
    assert rows.x.shape == (count, inputs)
    assert np.isfinite(rows.x).all()
    if mean is not None:
        assert rows.y.mean() == pytest.approx(mean, abs=6e-5)
    if name == "wine_quality":
        colour = rows.x[:, -1]
        assert sorted([int(colour.sum()), int(len(colour) - colour.sum())]) == [1599, 4898]


@with_data
def test_test_rows_are_as_many_as_the_published_steps_of_coverage_say():
    small = {
        name: len(split(len(read(FOLDER, name).y), 42).test)
        for name in SETS
        if not SETS[name].medium
    }
    assert small == {
        "auto_mpg": 79,
        "liver_disorders": 69,
        "daily_demand_orders": 12,
        "real_estate_valuation": 83,
    }
    for name, count in small.items():
        for method in PUBLISHED[name].values():
            for cover in method[:3]:
                assert cover * count / 100 == pytest.approx(
                    round(cover * count / 100), abs=0.005 * count / 100 + 1e-9
                )


def test_what_is_not_there_is_said_with_the_remedy(tmp_path, monkeypatch):
    with pytest.raises(MissingDataError, match=r"auto_mpg.csv does not exist. Set SSLA_DATA"):
        read(tmp_path, "auto_mpg")
    (tmp_path / "auto_mpg.csv").write_text("a,b\n1,2\n")
    with pytest.raises(MissingDataError, match="must have the column 'mpg', but has a, b"):
        read(tmp_path, "auto_mpg")


def fake_ucimlrepo(monkeypatch, fetch):
    monkeypatch.setitem(
        __import__("sys").modules, "ucimlrepo", types.SimpleNamespace(fetch_ucirepo=fetch)
    )
    monkeypatch.delenv("SSLA_DATA", raising=False)
    load.cache_clear()


def test_without_a_folder_sets_are_downloaded(monkeypatch):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"mpg": [18.0, 15.5, 20.0], "horsepower": [130.0, None, 95.0], "car_name": ["a", "b", "c"]}
    )
    asked = []

    def fetch(id):
        asked.append(id)
        return types.SimpleNamespace(data=types.SimpleNamespace(original=frame))

    fake_ucimlrepo(monkeypatch, fetch)
    rows = load("auto_mpg")
    load.cache_clear()
    assert asked == [9]
    assert rows.x.tolist() == [[130.0], [95.0]]
    assert rows.y.tolist() == [18.0, 20.0]


def test_a_failed_download_says_what_to_do(monkeypatch):
    def fetch(id):
        raise ConnectionError("no network")

    fake_ucimlrepo(monkeypatch, fetch)
    with pytest.raises(
        MissingDataError,
        match=r"SSLA_DATA is not set.*\(no network\).*contains auto_mpg.csv, or install ucimlrepo",
    ):
        load("auto_mpg")


def test_quick_runs_need_no_data(monkeypatch):
    monkeypatch.delenv("SSLA_DATA", raising=False)
    assert {task.settings["name"] for task in Uci().tasks(True)} == {STAND_IN}
    assert data.title(STAND_IN).startswith("Synthetic")
    keys = [task.key for task in Uci().tasks(False)]
    assert len(keys) == len(set(keys)) == 8 * (1 + 21 + 20) + 4 * 5


@pytest.mark.parametrize("points", [20, 30, 57])
def test_the_constant_width_is_scipys_bandwidth(points):
    grid = np.linspace(-1.96, 1.96, points)
    kernel = stats.gaussian_kde(grid + 7.3, weights=np.exp(-(grid**2)))
    assert constant_width(points) == pytest.approx(math.sqrt(kernel.covariance.item()), rel=1e-12)
    assert constant_width(30) == pytest.approx(0.3985, abs=5e-5)


def constant(f):
    means = f.double()[None]
    return GaussianMixture(means, torch.full_like(means, constant_width()))


def test_scores_of_the_constant_width_have_their_closed_form():
    r = torch.linspace(-1.2, 1.3, 41, dtype=torch.float64)
    s = constant_width()
    found = published_scores(constant(torch.zeros(41)), r)
    assert found["nll"] == pytest.approx(
        float(0.5 * math.log(2 * math.pi * s**2) + (r**2).mean() / (2 * s**2)), abs=1e-12
    )
    z = (r / s).numpy()
    crps = s * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / math.sqrt(math.pi))
    assert found["crps"] == pytest.approx(crps.mean(), abs=1e-10)
    for level, factor in ((95, 1.96), (75, 1.15), (50, 0.67)):
        assert found[f"cover{level}"] == pytest.approx(
            100 * float((r.abs() <= factor * s).double().mean()), abs=1e-12
        )


def test_without_residuals_the_width_gives_the_published_floor_of_bike():
    zero = torch.zeros(5, dtype=torch.float64)
    found = published_scores(constant(zero), zero)
    assert round(found["nll"], 2) == 0.0 == PUBLISHED["bike_sharing_hour"]["ASSLA"][3]
    assert round(found["crps"], 2) == 0.09 == PUBLISHED["bike_sharing_hour"]["ASSLA"][4]


def test_ranks_are_scipys_and_the_critical_difference_is_demsars():
    generator = np.random.default_rng(0)
    blocks = {
        "a": generator.normal(size=(3, 4)),
        "b": generator.normal(size=(3, 4)),
        "c": generator.normal(size=(3, 4)),
    }
    found = ranking(("w", "x", "y", "z"), blocks)
    assert found.ranks.tolist() == pytest.approx(
        stats.rankdata(np.concatenate(list(blocks.values())), axis=1).mean(0).tolist()
    )
    assert found.ranks.sum() == pytest.approx(10)
    means = np.stack([part.mean(0) for part in blocks.values()])
    assert found.p == pytest.approx(stats.friedmanchisquare(*means.T).pvalue)
    assert (found.blocks, found.sets) == (9, 3)
    # Demšar (2006), table 5(a): q = 2.343 for two methods less one … 2.569 for four; his example
    # has k = 4, N = 14
    assert critical_difference(4, 14) == pytest.approx(
        2.569 * math.sqrt(4 * 5 / (6 * 14)), abs=1e-3
    )
    assert math.isnan(friedman(means[:1]))


def test_cliques_are_the_widest_stretches():
    assert cliques(np.array([3.0, 1.0, 1.5, 2.6]), 1.0) == [(1.0, 1.5), (2.6, 3.0)]
    assert cliques(np.array([1.0, 1.8, 2.6, 5.0]), 1.0) == [(1.0, 1.8), (1.8, 2.6)]
    assert cliques(np.array([1.0, 1.5, 2.0, 5.0]), 1.0) == [(1.0, 2.0)]


def test_units_change_scores_as_they_change_densities():
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(20, generator=generator, dtype=torch.float64)
    p = GaussianMixture(torch.zeros(1, 20).double(), torch.ones(1, 20).double())
    wide = GaussianMixture(p.means * 7, p.sds * 7)
    found, plain = in_unit(scores(wide, 7 * y), 7.0), scores(p, y)
    for name, value in plain.items():
        assert found[name] == pytest.approx(value, abs=1e-9), name


@pytest.fixture(scope="module")
def fitted():
    case = Case.of(STAND_IN, 0)
    return case, SSLARegressor(
        "gaussian", members=1, activation="silu", max_epochs=40, random_state=0
    ).fit(case.x, case.y).ensemble_


def test_real_refits_agree_with_the_closed_form(fitted):
    case, ensemble = fitted
    assert refit_gap(ensemble, case) < 1e-10


def test_the_noise_is_repeated_by_its_shares(fitted):
    case, ensemble = fitted
    nodes = noise_nodes(ensemble, 0)
    assert len(nodes) == 6
    assert sorted(nodes.count(value) for value in set(nodes)) == [1, 1, 4]
    answer = networks(ensemble, case, own_noise=False)
    scale = float(ensemble.target.scale[0])
    assert answer.sds[:, 0].tolist() == pytest.approx([scale * value for value in nodes])


def test_laplace_with_our_noise_is_near_our_output_rung(fitted):
    pytest.importorskip("laplace")
    case, ensemble = fitted
    theirs, ours = (
        fair(ensemble, case, polished=False),
        ensemble.predict(torch.from_numpy(case.new), "output"),
    )
    assert float((theirs.stddev / ours.stddev).log().abs().max()) < 0.2
    z = ensemble.inputs(torch.from_numpy(case.new))
    with torch.no_grad():  # its mean is the network's, ours that of the polished one
        mean = ensemble.target.shift[0] + ensemble.target.scale[0] * ensemble.modules[0](z)[:, 0]
    assert torch.allclose(theirs.mean, mean, atol=1e-9)
    polished = fair(ensemble, case, polished=True)  # and at our mode it is our predictive
    assert torch.allclose(polished.mean, ours.mean, atol=1e-6 * float(ensemble.target.scale[0]))
    assert float((polished.stddev / ours.stddev).log().abs().max()) < 0.01


def test_dropout_is_seeded_leaves_the_global_state_and_finds_the_noise():
    from ssla_paper.peers.dropout import mc_dropout

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 1, generator=generator, dtype=torch.float64)
    y = x[:, 0] + 0.3 * torch.randn(300, generator=generator, dtype=torch.float64)
    before = torch.random.get_rng_state()
    one, two = (
        mc_dropout(x, y, x[:50], rate=0.05, draws=20, seed=1, recipe=Recipe(epochs=30))
        for _ in range(2)
    )
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(one.means, two.means)
    assert float(one.means.std(0).min()) > 0  # units were dropped
    assert 0.2 < float(one.sds[0, 0]) < 0.45


def test_mean_field_sums_its_divergence_and_finds_the_line():
    pytest.importorskip("bayesian_torch")
    import bayesian_torch.layers as layers

    from ssla_paper.peers.bayesian_layers import _layer, divergence, layered_mean_field

    torch.manual_seed(0)
    layer = _layer(layers, 3, 2)
    expected = 0.0
    for part, sd in (("weight", 3**-0.5), ("bias", 1.0)):
        q = torch.distributions.Normal(
            getattr(layer, f"mu_{part}"),
            torch.nn.functional.softplus(getattr(layer, f"rho_{part}")),
        )
        expected += float(
            torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, sd)).sum().detach()
        )
    assert float(divergence([layer]).detach()) == pytest.approx(expected, rel=1e-5)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 1, generator=generator, dtype=torch.float64)
    y = 0.8 * x[:, 0] + 0.3 * torch.randn(200, generator=generator, dtype=torch.float64)
    one, two = (
        layered_mean_field(x, y, x[:30], hidden=(10,), steps=600, draws=20, seed=1)
        for _ in range(2)
    )
    assert torch.equal(one.means, two.means)
    assert float((one.mean - 0.8 * x[:30, 0]).abs().mean()) < 0.15
    assert 0.2 < float(one.sds[0, 0]) < 0.5


def test_split_conformal_covers_exchangeable_rows():
    pytest.importorskip("mapie")
    from ssla_paper.peers.conformal import interval_scores, split_conformal

    generator = np.random.default_rng(0)
    covered = {0.75: [], 0.5: []}
    for _ in range(60):
        y = generator.standard_t(3, size=139)
        ends = split_conformal(
            lambda rows: np.zeros(len(rows)),
            np.zeros((39, 1)),
            y[:39],
            np.zeros((100, 1)),
            (0.75, 0.5),
        )
        rank = {level: np.sort(np.abs(y[:39]))[math.ceil(40 * level) - 1] for level in ends}
        for level, interval in ends.items():
            assert interval[0, 1] == pytest.approx(rank[level], abs=1e-12)
            covered[level].append(
                interval_scores({level: interval}, y[39:])[f"cover{round(100 * level)}"]
            )
    for (
        level,
        values,
    ) in covered.items():  # 40·level is whole, so the coverage is exactly the level on average
        assert abs(np.mean(values) - 100 * level) < 4 * np.std(values) / math.sqrt(len(values))


def test_too_few_rows_give_an_infinite_interval():
    pytest.importorskip("mapie")
    from ssla_paper.peers.conformal import interval_scores, split_conformal

    ends = split_conformal(
        lambda rows: rows[:, 0], np.zeros((9, 1)), np.arange(9.0), np.zeros((2, 1)), (0.95, 0.5)
    )
    assert np.isinf(ends[0.95]).all()
    assert ends[0.5][0].tolist() == [-4.0, 4.0]
    assert interval_scores(ends, np.array([1.0, 9.0])) == {
        "cover95": 100.0,
        "width95": math.inf,
        "cover50": 50.0,
        "width50": 8.0,
    }


def made_up(ours, theirs):
    """Records of all sets in which `output` has one NLL and the others another."""
    records = {}
    for name in SETS:
        cells = {
            method: dict(zip(SCORES, values, strict=True))
            for method, values in PUBLISHED[name].items()
        }
        worse = {
            method: {score: value + 50 for score, value in cell.items()}
            for method, cell in cells.items()
        }
        fitted = {"LA fitted": dict.fromkeys(SCORES, -1.0 if ours < theirs else 9.0)}
        runs = [
            {"validation": 1.0, "methods": cells | fitted},
            {"validation": 2.0, "methods": worse | fitted},
        ]
        records[f"published-{name}"] = {"set": name, "trials": 100, "test": 50, "runs": runs}
        for seed in (42, *range(200, 206)):
            methods = {}
            for method in (*COMPARED, "weights", "weights x5"):
                value = ours if method.startswith(("output", "weights")) else theirs
                methods[method] = {"nll": value, "crps": value, "rmse": 1.0, "cost": 1.0} | {
                    f"{what}{level}": float(level)
                    for what in ("cover", "width")
                    for level in (95, 75, 50)
                }
            own_record = {
                "set": name,
                "split": seed,
                "methods": methods,
                "refit_gap": 1e-12,
                "refit_seconds": 0.1,
            }
            records[f"own-{name}-{seed}"] = own_record
    return gathered(records)


@pytest.mark.parametrize(("ours", "theirs", "better"), [(-3.0, 2.0, True), (2.0, -3.0, False)])
def test_claims_follow_the_scores(ours, theirs, better, tmp_path):
    results = made_up(ours, theirs)
    found = {claim.statement: claim for claim in claims(results, rank_tables(results, tmp_path))}
    for statement, claim in found.items():
        if (
            "lower NLL and CRPS" in statement
            or "better mean rank" in statement
            or "with its noise fitted" in statement
        ):
            assert claim.holds == better, statement
        if (
            "published procedure gives" in statement
            or "rows of Table 4" in statement
            or "coverage closer" in statement
        ):
            assert claim.holds, statement
        if "conservative" in statement or "fail on Liver" in statement:
            assert not claim.holds, statement
        if "a lower NLL on most sets than" in statement:
            assert claim.holds == (better and statement.startswith("SSLA")), statement
        if "sharper than" in statement or "better calibrated than" in statement:
            assert not claim.holds, statement  # widths and coverages are equal
    assert sum("sharper than" in statement for statement in found) == 4
    assert sum("rows of Table 4" in statement for statement in found) == 3
    assert sum("fails on Liver" in statement for statement in found) == 2
    assert sum("lower NLL and CRPS" in statement for statement in found) == 4
    assert sum("better mean rank" in statement for statement in found) == 3
    assert sum("with its noise fitted" in statement for statement in found) == 1


def test_calibration_and_sharpness_follow_coverage_and_width(tmp_path):
    """ASSLA narrower and closer to nominal than LA, SSLA wider and farther."""
    results = made_up(1.0, 2.0)
    for name in SETS:
        for splits in (results.scores[m][name] for m in ("none", "weights", "LA", "LA, polished")):
            for record in splits.values():
                record |= {"cover95": 93.0}
        for method, cover, width in (("none", 94.0, 80.0), ("weights", 90.0, 110.0)):
            for record in results.scores[method][name].values():
                record |= {"cover95": cover, "width95": width}
    found = claims(results, rank_tables(results, tmp_path))
    for method, holds in (("SSLA", False), ("ASSLA", True)):
        lines = [
            claim
            for claim in found
            if claim.statement.startswith(f"{method} beside classical Laplace")
            and "lower NLL" not in claim.statement
        ]
        assert [claim.holds for claim in lines] == [holds] * 4
        assert {claim.number for claim in lines} == {"4", "7"}


def test_a_cell_is_hit_within_one_test_row():
    record = made_up(0.0, 0.0).published["auto_mpg"]
    first, second = record["runs"]
    assert best_run(record) is first
    assert hits(record, first, "ASSLA") == [True] * 5
    assert hits(record, second, "ASSLA") == [False] * 5
    assert whole_rows(record, "ASSLA") == 1
    first["methods"]["ASSLA"] |= {"cover75": 82.28 + 2.1, "nll": 0.32 - 0.03}
    assert hits(record, first, "ASSLA") == [True, False, True, False, True]
    assert whole_rows(record, "ASSLA") == 0
    assert allowed("cover95", 50) == pytest.approx(2, abs=0.01)


def test_a_missing_peer_is_told_and_not_ranked(tmp_path, monkeypatch):
    import ssla_paper.uci.ours as ours
    from ssla_paper.peers import MissingPeerError

    def missing(*arguments, **options):
        raise MissingPeerError("needs laplace-torch")

    monkeypatch.setattr(ours, "laplace", missing)
    record = own(STAND_IN, 0, epochs=5)
    assert record["methods"]["LA"] == {"missing": "needs laplace-torch"}
    results = gathered({"own": record})
    assert results.missing == dict.fromkeys(
        ("LA", "LA, noise", "LA, polished"), "needs laplace-torch"
    )
    assert "LA" not in results.there(COMPARED)


def test_the_stand_in_is_the_same_each_time():
    assert np.array_equal(stand_in().x, stand_in().x)
    assert load(STAND_IN).unit == pytest.approx(float(stand_in().y.std()))
