"""Ctrl-C in training and in streams, and too little memory: what was there before stays usable."""

import signal
import subprocess
import sys
import textwrap

import numpy as np
import pandas
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.sklearn import (
    PredictiveClassifier,
    PredictiveRegressor,
    SSLAClassifier,
    SSLARegressor,
    TableEncoder,
)
from ssla.tables.cli.train import Request
from ssla.tables.cli.work import predict_file, train_file

RNG = np.random.default_rng(0)
X, NEW = RNG.normal(size=(60, 3)), RNG.normal(size=(20, 3))
OLD, OTHER = np.where(X[:, 0] > 0, "cat", "dog"), np.where(X[:, 0] > 0, "yak", "ant")


class InterruptAt:
    """Raises KeyboardInterrupt at one call of a function of ssla, counted from the first.

    Not in calls from torch's own context managers: like all, they are not safe while they are
    entered.
    """

    def __init__(self, at=None):
        self.at, self.seen = at, 0

    def __call__(self, frame, event, _):
        code = frame.f_code
        if (
            event == "call"
            and "/ssla/" in code.co_filename
            and code.co_name != "__torch_function__"
        ):
            self.seen += 1
            if self.seen == self.at:
                raise KeyboardInterrupt

    def during(self, work):
        """Whether the work was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


ESTIMATORS = {
    "networks, classes": (
        lambda: SSLAClassifier(max_epochs=1, members=1, random_state=0),
        OLD,
        OTHER,
    ),
    "networks, numbers": (
        lambda: SSLARegressor("gaussian", max_epochs=1, members=1, random_state=0),
        X[:, 0],
        X[:, 0] + 100,
    ),
    "trees, classes": (
        lambda: PredictiveClassifier(
            RandomForestClassifier(2, random_state=0), cv=2, random_state=0
        ),
        OLD,
        OTHER,
    ),
    "trees, numbers": (
        lambda: PredictiveRegressor(RandomForestRegressor(2, random_state=0), cv=2, random_state=0),
        X[:, 0],
        X[:, 0] + 100,
    ),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_interrupted_fit_leaves_the_estimator_as_it_was(name):
    """A classifier of cats and dogs answered "ant" and "yak" after Ctrl-C in a second fit."""
    make, y, other = ESTIMATORS[name]
    calls = InterruptAt()
    calls.during(lambda: make().fit(X, y))
    estimator = make().fit(X, y)
    before, names = estimator.predict(NEW), set(vars(estimator))
    for at in (20, calls.seen // 4, calls.seen // 2, int(0.85 * calls.seen)):
        assert InterruptAt(at).during(lambda: estimator.fit(np.hstack([X, X]), other))
        assert set(vars(estimator)) == names
        np.testing.assert_array_equal(estimator.predict(NEW), before)
    fresh = make()
    assert InterruptAt(calls.seen // 2).during(lambda: fresh.fit(X, y))
    assert set(vars(fresh)) == set(vars(make()))  # not half fitted either
    np.testing.assert_array_equal(fresh.fit(X, y).predict(NEW), before)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_fit_that_is_refused_leaves_the_estimator_as_it_was(name):
    make, y, _ = ESTIMATORS[name]
    estimator = make().fit(X, y)
    before = estimator.predict(NEW)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        estimator.fit(np.hstack([X, X]), y[:-1])
    np.testing.assert_array_equal(estimator.predict(NEW), before)


def test_an_encoder_that_fails_keeps_its_plan():
    encoder = TableEncoder().fit(pandas.DataFrame({"a": [1.0, 2.0], "b": ["x", "y"]}))
    columns = encoder.n_features_in_
    with pytest.raises(ValueError):
        encoder.fit(np.full((2, 5), np.inf))
    assert encoder.n_features_in_ == columns


@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_ctrl_c_while_a_loader_is_read_changes_nothing(weights):
    """A signal, as from a terminal, in the second batch; then interrupts in the middle of later
    passes.
    """
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()
    x, y = torch.tensor(X, dtype=torch.float32), torch.tensor(OLD == "cat").long()
    kept = {name: value.clone() for name, value in network.state_dict().items()}

    def batches():
        yield x[:30], y[:30]
        signal.raise_signal(signal.SIGINT)

    def fit(data):
        return ssla.fit(
            network, data, likelihood=L.Categorical(), prior=priors.Gaussian(1.0), weights=weights
        )

    def check():
        assert torch.is_grad_enabled()
        assert not any(
            module._forward_hooks or module._forward_pre_hooks for module in network.modules()
        )
        assert all(torch.equal(value, kept[name]) for name, value in network.state_dict().items())

    whole = [(x[:30], y[:30]), (x[30:], y[30:])]
    expected = fit(whole).predict(x).probs
    handler = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            fit(batches())
    finally:
        signal.signal(signal.SIGINT, handler)
    check()
    calls = InterruptAt()
    calls.during(lambda: fit(whole))
    for part in (0.3, 0.6, 0.9):
        assert InterruptAt(int(part * calls.seen)).during(lambda: fit(whole))
        check()
    assert torch.equal(fit(whole).predict(x).probs, expected)


def test_ctrl_c_in_the_third_block_of_a_table_leaves_no_file_and_a_scorer_that_works(
    tmp_path, monkeypatch
):
    table = pandas.DataFrame({"a": X[:, 0], "b": X[:, 1], "y": X[:, 0] + X[:, 2]})
    table.to_csv(tmp_path / "data.csv", index=False)
    train_file(Request(tmp_path / "data.csv", "y", tmp_path / "model", max_epochs=2), quiet=True)
    scorer = ssla.Scorer(tmp_path / "model")
    expected = scorer(table)
    before = {path.name for path in tmp_path.iterdir()}
    monkeypatch.setattr("ssla.tables.cli.work.BLOCK", 16)
    calls, columns = [], ssla.tables.scoring.saved_models.make_predictive_columns

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return columns(*args)

    monkeypatch.setattr("ssla.tables.scoring.saved_models.make_predictive_columns", interrupted)
    for name in ("out.csv", "out.parquet"):
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            predict_file(tmp_path / "model", tmp_path / "data.csv", tmp_path / name)
        assert {path.name for path in tmp_path.iterdir()} == before
    pandas.testing.assert_frame_equal(scorer(table), expected)


def test_too_little_address_space_is_an_error_and_not_the_end_of_the_process(tmp_path):
    """safetensors ends the process where it cannot allocate. A model at the path stays complete."""
    script = """
    import pathlib, resource, sys
    import torch
    from torch import nn
    import ssla

    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(1500, 30)
    network = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 1)).eval()
    noise, prior = ssla.likelihoods.Gaussian(noise=0.3), ssla.priors.Gaussian(1.0)
    post = ssla.fit(network, (x, x[:, 0]), likelihood=noise, prior=prior, weights="all", structure="dense")
    folder = pathlib.Path(sys.argv[1])
    post.save(folder / "model")
    words = pathlib.Path("/proc/self/statm").read_text().split()
    used = int(words[0]) * resource.getpagesize()
    for work in (post.save, lambda path: ssla.load(path, network)):
        for more in (1, 8, 20):
            resource.setrlimit(resource.RLIMIT_AS, (used + (more << 20), resource.RLIM_INFINITY))
            try:
                work(folder / "model")
                print("done")
            except MemoryError as error:
                print(error)
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    again = ssla.load(folder / "model", network).predict(x[:5]).mean
    print(torch.equal(again, post.predict(x[:5]).mean), [path.name for path in folder.iterdir()])
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
    *answers, last = done.stdout.splitlines()
    assert len(answers) == 6
    assert all("needs about" in answer and "ulimit -v" in answer for answer in answers), answers
    assert last == "True ['model']"
