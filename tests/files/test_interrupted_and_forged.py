"""Files that are complete at every instant, forged files that are refused, output that a
spreadsheet does not execute.
"""

import contextlib
import csv
import json
import os
import shutil
import stat
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import ssla
from ssla import likelihoods
from ssla.files import FileError, container, read_model, replacing, write_model
from ssla.sklearn import SSLAClassifier, SSLARegressor
from ssla.tables import columns as tables
from ssla.tables.columns import Plan, make_plan, write_table
from ssla.tables.columns.plan import DRAWS
from ssla.tables.estimators import loading as estimators

KIND = "posterior"


def save(path, number):
    """A model that is consistent only if its two files are of one save."""
    return write_model(path, KIND, {"number": number}, {"t": torch.full((50,), float(number))})


def number_at(path):
    content, tensors = read_model(path, KIND)
    assert bool((tensors["t"] == content["number"]).all())
    return content["number"]


@pytest.fixture(params=["exchange", "two renames"])
def way(request, monkeypatch):
    """Both ways of replacing a directory: the atomic exchange, and systems without it."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # slow, and only a power cut could show it
    if request.param == "two renames":
        monkeypatch.setattr(replacing, "_renameat2", None)
    elif replacing._renameat2 is None:
        pytest.skip("this system has no exchange of two directories")
    return request.param


class Interrupting:
    """Raises KeyboardInterrupt at one line of the code that saves, counted over all of its
    modules.
    """

    files = (replacing.__file__, container.__file__, contextlib.__file__)

    def __init__(self, at):
        self.at, self.seen = at, 0

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename not in self.files:
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self.at:
                raise KeyboardInterrupt
        return self


def interrupted_save(path, number, at):
    """Whether the save had more lines than `at`: it was interrupted at one."""
    before = sys.gettrace()
    sys.settrace(Interrupting(at))
    try:
        save(path, number)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_line_of_a_save_leaves_a_complete_model_at_the_path(way, tmp_path):
    outcomes = set()
    for at in range(1, 1000):
        path = save(tmp_path / str(at) / "model", 0)
        if not interrupted_save(path, 1, at):
            break
        assert sorted(os.listdir(path)) == ["manifest.json", "tensors.safetensors"], at
        outcomes.add(number_at(path))
        save(path, 2)
    assert 100 < at < 999
    assert outcomes == {0, 1}  # both sides of the exchange were interrupted
    assert number_at(path) == 1
    assert not list(tmp_path.glob("*/.*")), "the next save removes what an interrupted one left"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "name", ["mkdir", "rename", "replace", "fsync", "open", "close", "rmdir", "unlink", "scandir"]
)
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_beside_any_system_call_leaves_a_complete_model(
    name, after, way, tmp_path, monkeypatch
):
    path, real = save(tmp_path / "model", 0), getattr(os, name)
    for at in range(1, 40):
        calls = iter(range(1, 1000))

        def call(*arguments, at=at, calls=calls, **options):
            now = next(calls) == at
            if now and not after:
                raise KeyboardInterrupt
            result = real(*arguments, **options)
            if now:
                raise KeyboardInterrupt
            return result

        with monkeypatch.context() as patch:
            patch.setattr(os, name, call)
            try:
                save(path, 1)
            except KeyboardInterrupt:
                ended = False
            else:
                ended = True
        assert number_at(path) in (0, 1)
        if ended:
            break
        save(path, 0)
    assert ended


CHILD = """
    import importlib.util, os, signal, sys
    from pathlib import Path

    spec = importlib.util.spec_from_file_location("replacing", {file!r})  # the package itself is slow to import
    replacing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(replacing)
    if {way!r} == "two renames":
        replacing._renameat2 = None
    MODELS = {models!r}

    def save(path, number):
        with replacing.replace_folder(Path(path)) as draft:
            for name, data in MODELS[number].items():
                (draft / name).write_bytes(data)
"""
KILLED = """
    class Killing:
        def __init__(self, at):
            self.at = at

        def __call__(self, frame, event, _):
            if frame.f_code.co_filename not in ({file!r}, "<string>"):
                return None
            self.at -= event == "line"
            if not self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            return self

    at, status = 0, 1
    while status:
        at += 1
        path = os.path.join({folder!r}, str(at), "model")
        save(path, 0)
        child = os.fork()
        if not child:
            sys.settrace(Killing(at))
            save(path, 1)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
    print(at)
"""
WRITER = """
    for number in range(100):
        save({folder!r} + "/model", number % 3)
"""


def started(code, way, folder):
    """Another process that writes models to the folder."""
    made = [
        save(folder.with_name(f"{folder.name}-made") / str(number), number) for number in range(3)
    ]
    models = [{file.name: file.read_bytes() for file in model.iterdir()} for model in made]
    text = textwrap.dedent(CHILD + code).format(
        file=replacing.__file__, way=way, models=models, folder=str(folder)
    )
    return subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_kill_at_any_line_of_a_save_leaves_a_complete_model(way, tmp_path):
    process = started(KILLED, way, tmp_path)
    out, error = process.communicate()
    assert process.returncode == 0, error[-800:]
    count, outcomes, moved = int(out), set(), 0
    assert count > 40
    for at in range(1, count + 1):
        path = tmp_path / str(at) / "model"
        if path.exists():
            outcomes.add(number_at(path))
        # only between two renames: the reader finds the old one and says so, the next save puts it
        # back
        else:
            moved += 1
            with pytest.warns(UserWarning, match=r"The last save to .* was interrupted"):
                assert number_at(path) == 0
            with pytest.raises(RuntimeError), replacing.replace_folder(path):
                raise RuntimeError
            assert number_at(path) == 0
        save(path, 2)
        assert number_at(path) == 2
    assert outcomes == {0, 1}
    assert (moved > 0) == (way == "two renames")
    assert not list(tmp_path.glob("*/.*")), "the next save removes what a killed one left"


def test_an_old_model_that_cannot_be_put_back_is_kept(tmp_path, monkeypatch):
    """Without the exchange: both the second rename and the one back fail."""
    path, real = save(tmp_path / "model", 0), os.rename
    monkeypatch.setattr(replacing, "_renameat2", None)

    def rename(one, other):
        if Path(other) == path:
            raise OSError(5, "Input/output error")
        real(one, other)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(FileError, match="cannot be written"):
            save(path, 1)
    with pytest.warns(UserWarning, match="was interrupted"):
        assert number_at(path) == 0
    save(path, 2)
    assert number_at(path) == 2
    assert os.listdir(tmp_path) == ["model"]


def test_no_reader_finds_a_model_that_is_being_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(replacing, "_renameat2", None)
    path, real, found = save(tmp_path / "model", 0), shutil.rmtree, []

    def rmtree(where, **options):
        found.append(list(tmp_path.glob(".*/old")))
        real(where, **options)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", rmtree)
        save(path, 1)
    assert found
    assert not any(found)
    assert os.listdir(tmp_path) == ["model"]


def in_threads(*works):
    """Run until the first error, or the end of all."""
    faults = []

    def guarded(work):
        try:
            work()
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults


def test_readers_beside_writers_read_complete_models(way, tmp_path):
    path, start, reads = save(tmp_path / "model", 0), time.monotonic(), []

    def going():
        """For two seconds, or on a slow disk until enough was read."""
        passed = time.monotonic() - start
        return passed < 2 or (passed < 30 and len(set(reads)) <= 10)

    def writer(number):
        while going():
            save(path, number)
            number += 2

    def reader():
        while going():
            reads.append(number_at(path))

    in_threads(lambda: writer(0), lambda: writer(1), reader, reader)
    assert len(set(reads)) > 10
    assert number_at(path) >= 0
    if (
        way == "two renames"
    ):  # a writer that ends between the renames of another leaves its draft to the next save
        save(path, 0)
    assert os.listdir(tmp_path) == ["model"]


def test_a_writer_that_is_removing_its_draft_has_not_been_interrupted(tmp_path):
    """Its lock goes before the rest: a reader that comes in between must not lock the remains
    and call them abandoned.
    """
    place = tmp_path / ".model.0123.saving"
    (place / "old").mkdir(parents=True)
    assert replacing.locate_folder(tmp_path / "model") == (place / "old", False)
    assert not (place / "lock").exists()
    (place / "lock").touch()  # of a writer that was killed
    assert replacing.locate_folder(tmp_path / "model") == (place / "old", True)


def test_writers_in_several_processes_leave_one_complete_model(way, tmp_path):
    processes = [started(WRITER, way, tmp_path) for _ in range(3)]
    reads = set()
    while any(process.poll() is None for process in processes):
        if (tmp_path / "model").exists():
            reads.add(number_at(tmp_path / "model"))
    assert [process.communicate()[1] for process in processes] == ["", "", ""]
    assert reads == {0, 1, 2}
    assert number_at(tmp_path / "model") == 0  # each wrote it last
    if way == "two renames":
        save(tmp_path / "model", 0)
    assert os.listdir(tmp_path) == ["model"]


def test_the_draft_of_a_living_writer_is_not_removed(way, tmp_path):
    path = save(tmp_path / "model", 0)
    with replacing.replace_folder(path) as draft:
        (draft / "mine").write_text("")
        save(path, 1)
        assert (draft / "mine").exists()
        assert number_at(path) == 1
    assert os.listdir(path) == ["mine"]


def test_a_foreign_name_beside_a_model_is_left_alone(tmp_path):
    for name in (".model-abc", ".model.saving.txt", ".models.1.saving", "model.1.saving"):
        (tmp_path / name).mkdir()
    save(tmp_path / "model", 0)
    assert len(os.listdir(tmp_path)) == 5


def test_a_damaged_model_is_an_error_beside_no_writer(tmp_path):
    path = save(tmp_path / "model", 0)
    (path / "tensors.safetensors").write_bytes(b"")
    with pytest.raises(FileError, match="truncated"):
        number_at(path)


def test_a_link_to_a_model_stays_a_link(way, tmp_path):
    (tmp_path / "store").mkdir()
    save(tmp_path / "store" / "v1", 0)
    (tmp_path / "current").symlink_to(tmp_path / "store" / "v1")
    save(tmp_path / "current", 1)
    assert (tmp_path / "current").is_symlink()
    assert number_at(tmp_path / "store" / "v1") == number_at(tmp_path / "current") == 1
    assert sorted(os.listdir(tmp_path)) == ["current", "store"]
    assert os.listdir(tmp_path / "store") == ["v1"]


def test_a_parent_that_cannot_be_written_is_our_error(tmp_path, monkeypatch):
    path = save(tmp_path / "model", 0)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(
        FileError, match=r"cannot be written .*Permission denied.* Nothing was changed"
    ):
        save(path, 1)
    monkeypatch.undo()
    monkeypatch.chdir(path)
    with pytest.raises(FileError, match="current directory"):
        save(".", 1)
    assert number_at(path) == 0


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_what_is_written_has_the_modes_of_the_umask(mask, tmp_path):
    before = os.umask(mask)
    try:
        model = save(tmp_path / "a" / "model", 0)
        with replacing.replace_file(tmp_path / "table.csv") as draft:
            draft.write_text("")
        write_table(tmp_path / "out.csv", {"mean": np.zeros(1)})
    finally:
        os.umask(before)
    assert mode(tmp_path / "out.csv") == 0o666 & ~mask
    assert mode(model) == mode(model.parent) == 0o777 & ~mask
    assert (
        {mode(file) for file in model.iterdir()}
        == {mode(tmp_path / "table.csv")}
        == {0o666 & ~mask}
    )


def test_formulas_in_a_csv_are_escaped_and_numbers_are_not(tmp_path):
    texts = [
        "=1+1",
        "+cmd",
        "-2+3",
        "@SUM(A1)",
        "\tx",
        "\rx",
        "-1.5",
        "+3e-2",
        "-.5",
        "-1.234,5",
        "-",
        "-inf",
        "a=b",
        "",
        "yes",
    ]
    columns = {"=HYPERLINK(A1)": np.array(texts, dtype=object), "n": -np.arange(len(texts)) / 2}
    write_table(tmp_path / "t.csv", columns)
    with (tmp_path / "t.csv").open(newline="", encoding="utf-8") as stream:
        head, *rows = csv.reader(stream)
    assert head == ["'=HYPERLINK(A1)", "n"]
    assert [row[0] for row in rows] == [
        *("'=1+1", "'+cmd", "'-2+3", "'@SUM(A1)", "'\tx", "'\rx"),
        *("-1.5", "+3e-2", "-.5", "-1.234,5", "-", "'-inf", "a=b", "", "yes"),
    ]
    assert [float(row[1]) for row in rows] == columns["n"].tolist()


HOSTILE = [
    0,
    -1,
    1e300,
    -1e300,
    1 << 70,
    "",
    "unknown",
    None,
    {"float": "nan"},
    {"float": "-inf"},
    [],
    {"tuple": [0] * 10_000},
]
SECONDS = 5  # for one load with a prediction; they take milliseconds


def scalars(node, place=()):
    """The places of all values in JSON that hold no others."""
    for key, child in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(child, dict | list) and child:
            yield from scalars(child, (*place, key))
        else:
            yield (*place, key)


def forged(path, content, tensors=None):
    """A file with other content, and a checksum that is right."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["content"] = content
    if tensors is not None:
        data = container._import_safetensors().save(tensors)
        (path / "tensors.safetensors").write_bytes(data)
        manifest["tensors"] = {
            "bytes": len(data),
            "sha256": container.hashlib.sha256(data).hexdigest(),
        }
    manifest["sha256"] = container._compute_checksum(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def with_value(content, place, value):
    node = content = json.loads(json.dumps(content))
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    return content


def outcomes(path, places, work, values=HOSTILE):
    """{place: {value: "refused" | "works"}} of every forged file.

    Any other exception, or a slow one, fails the test.
    """
    content = json.loads((path / "manifest.json").read_text())["content"]
    found = {}
    for place in places(content):
        named = found.setdefault(".".join(map(str, place)).replace("fields.", ""), {})
        for value in values:
            forged(path, with_value(content, place, value))
            start = time.monotonic()
            try:
                work()
            except ValueError:  # FileError is one
                named[str(value)] = "refused"
            except Exception as error:
                raise AssertionError(f"{place} = {str(value)[:40]}: {error!r}") from error
            else:
                named[str(value)] = "works"
            assert time.monotonic() - start < SECONDS, (place, value)
    return found


def posterior():
    torch.manual_seed(0)
    model = (
        torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        .double()
        .eval()
    )
    x = torch.randn(20, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return (
        model,
        x,
        ssla.fit(
            model,
            (x, x[:, 0]),
            likelihood=likelihoods.Gaussian(noise=0.3),
            prior=ssla.priors.Gaussian(),
        ),
    )


@pytest.mark.filterwarnings("ignore")
def test_every_forged_number_of_a_posterior_is_refused_or_does_no_harm(tmp_path):
    model, x, post = posterior()
    path = post.save(tmp_path / "post")

    def work():
        again = ssla.load(path, model)
        p = again.predict(x[:2])
        assert str(again.report)
        assert bool(
            torch.isfinite(torch.stack([p.mean, p.variance, *p.interval(0.9).unbind(1)])).all()
        )
        assert np.isfinite(again.log_evidence())

    named = outcomes(
        path, lambda content: [place for place in scalars(content) if place[0] != "network"], work
    )
    for place in (
        "report.mode",
        "report.convention",
        "convention",
        "statistics.weight",
        "statistics.n",
    ):
        assert (
            named[place]["-1"]
            == named[place]["unknown"]
            == named[place]["{'float': 'nan'}"]
            == "refused"
        )
    for place in (
        "report.parameters",
        "report.n",
        "report.outputs",
        "statistics.n",
        "statistics.weight",
        "likelihood.noise",
    ):
        assert named[place]["0"] == "refused", place
    for place in (
        "report.steps",
        "report.residual",
        "report.memory",
        "report.passes",
        "report.weight",
        "report.output_shift",
    ):
        assert named[place]["-1"] == "refused", place
    assert named["likelihood.noise"]["1e+300"] == "refused"
    assert named["statistics.curvature.size"]["0"] == "refused"


@pytest.mark.parametrize("value", [1e300, -1e300, 1e101, float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["theta", "statistics.gradient", "statistics.curvature.matrix"])
def test_forged_tensors_of_a_posterior_are_refused(which, value, tmp_path):
    model, _, post = posterior()
    path = post.save(tmp_path / "post")
    content = json.loads((path / "manifest.json").read_text())["content"]
    tensors = container._import_safetensors().load((path / "tensors.safetensors").read_bytes())
    tensors[which] = torch.full_like(tensors[which], value)
    forged(path, content, tensors)
    with pytest.raises(FileError):
        ssla.load(path, model)


def estimator(kind):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 2))
    options = {"hidden": (3,), "max_epochs": 2, "early_stopping": False, "random_state": 0}
    if kind == "classes":
        return SSLAClassifier(**options).fit(
            X, np.array(["a", "b", "c"])[rng.integers(0, 3, 40)]
        ), X
    return SSLARegressor(conformal=True, **options).fit(X, X[:, 0] + 0.1 * rng.normal(size=40)), X


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["numbers", "classes"])
def test_every_forged_number_of_an_estimator_is_refused_or_does_no_harm(kind, tmp_path):
    model, X = estimator(kind)
    path = model.save(tmp_path / "model")

    def places(content):
        """Without the posteriors, which the test above is about, and with one component for all."""
        components = [
            {
                key: part
                for key, part in content["ensemble"]["components"][0].items()
                if key != "posterior"
            }
        ]
        return scalars(content | {"ensemble": content["ensemble"] | {"components": components}})

    def work():
        again = estimators.load(path)
        answer = (
            again.predict_proba(X[:2]) if kind == "classes" else again.predict_interval(X[:2], 0.8)
        )
        assert answer.shape == (2, 3 if kind == "classes" else 2)
        assert np.isfinite(answer).all()

    named = outcomes(path, places, work, [-1, 1e300, 1 << 70, "unknown", {"float": "nan"}, []])
    for place in (
        "columns",
        "ensemble.components.0.member",
        "ensemble.components.0.weight",
        "ensemble.one_target",
    ):
        assert named[place]["-1"] == "refused", place
    for place in ("ensemble.settings.dict.0.1", "ensemble.architecture.dict.3.1", "estimator"):
        assert named[place]["unknown"] == "refused", place


@pytest.mark.parametrize(
    ("which", "value"),
    [
        ("inputs.scale", 0.0),
        ("inputs.scale", -1.0),
        ("target.scale", 0.0),
        ("target.scale", float("nan")),
        ("inputs.shift", 1e300),
        ("conformal.scores", -1.0),
        ("conformal.scores", float("inf")),
        ("conformal.weights", -1.0),
    ],
)
def test_a_forged_scaling_or_score_is_refused(which, value, tmp_path):
    model, _ = estimator("numbers")
    path = model.save(tmp_path / "model")
    content = json.loads((path / "manifest.json").read_text())["content"]
    tensors = container._import_safetensors().load((path / "tensors.safetensors").read_bytes())
    tensors[which] = torch.full_like(tensors[which], value)
    forged(path, content, tensors)
    with pytest.raises(FileError, match=r"scaling|scores|weights"):
        estimators.load(path)


def test_classes_that_do_not_fit_are_refused(tmp_path):
    model, _ = estimator("classes")
    path = model.save(tmp_path / "model")
    content = json.loads((path / "manifest.json").read_text())["content"]
    for values in (["a", "b"], ["a", "b", "b"], ["a", "b", "c", "d"]):
        forged(path, content | {"classes": {"dtype": "str", "values": values}})
        with pytest.raises(FileError, match="classes do not fit"):
            estimators.load(path)


PLAN = {
    "features": [
        {"name": "age", "kind": "number", "fill": 1.5, "flag": True, "levels": []},
        {"name": "town", "kind": "text", "fill": 0.0, "flag": False, "levels": ["x", "y"]},
    ],
    "left_out": {"id": "constant"},
}
REST = {"rare": [], "rare_rows": 0, "style": {}, "start": 0.0, "periods": [], "gaps": 20}
REST |= {"shares": [1.0], "interpretation": "", "codes": []}
DRAWN = {"number": [1.5], "text": ["x"]}


def complete(plan):
    """The plan with entries that are not forged here."""
    features = [REST | {"draws": DRAWN.get(f["kind"], [1.0])} | f for f in plan["features"]]
    return plan | {"features": features, "rows": [[1.5, "x"]] * DRAWS}


def test_every_forged_value_of_a_plan_of_columns_is_refused_or_does_no_harm():
    def told(plan):
        """The entries that are forged here."""
        content = json.loads(json.dumps(plan.as_json()))
        features = [
            {key: feature[key] for key in PLAN["features"][0]} for feature in content["features"]
        ]
        return {"features": features, "left_out": content["left_out"]}

    assert told(Plan.from_json(complete(PLAN))) == PLAN
    harmless = {("features", 0, "name"), ("features", 1, "name"), ("left_out", "id")}
    refused = 0
    for place in scalars(PLAN):
        for value in [*HOSTILE, float("nan"), True, "town", "number"]:
            try:
                plan = Plan.from_json(complete(with_value(PLAN, place, value)))
            except (TypeError, ValueError):  # a FileError by `ssla predict`
                refused += 1
            else:
                same = told(plan) == with_value(PLAN, place, value)
                assert same, (place, value)
                assert (
                    place in harmless
                    or "levels" in place
                    or place[-1] in ("fill", "flag")
                    or value == "number"
                ), (
                    place,
                    value,
                )
    assert refused > 80
    twice = PLAN | {"features": PLAN["features"] * 2}
    with pytest.raises(ValueError, match="twice"):
        Plan.from_json(complete(twice))


def test_every_forged_value_of_a_plan_with_training_rows_is_refused_or_reads_a_table():
    cells = {
        "a": [1.0, None, 3.0, 4.0] * 10,
        "b": ["x", "y", "x", "z"] * 10,
        "c": [f"2024-01-{i + 1:02}" for i in range(20)] * 2,
    }
    table = tables.Table(Path("a.csv"), cells, 40)
    content = json.loads(json.dumps(make_plan(table, set()).as_json()))
    assert Plan.from_json(content).encode(table).values.shape[0] == 40
    refused = 0
    for place in scalars(content):
        for value in [*HOSTILE, float("nan"), True]:
            try:
                plan = Plan.from_json(with_value(content, place, value))
                encoded = plan.encode(table)
                list(encoded.make_filled_copies())
            except (TypeError, ValueError):
                refused += 1
            else:
                assert np.isfinite(encoded.values).all(), (place, value)
    assert refused > 300
