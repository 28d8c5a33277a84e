"""Files: what is loaded predicts bit by bit as before; what cannot be loaded says why, and
nothing in it runs.
"""

import json
import pickle
import random
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file, save
from torch import nn

import ssla
from ssla import files as persistence
from ssla import likelihoods as L
from ssla import priors
from ssla.files import container

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = X[:, 0] - 0.5 * X[:, 1] ** 2 + 0.1 * torch.randn(40, generator=torch.Generator().manual_seed(1))


class Pair(nn.Module):
    """Two inputs by keyword, one of them integers, and a layer without a Kronecker form."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 2)

    def forward(self, table, kind):
        return self.head(torch.tanh(self.norm(torch.cat([table, self.embed(kind)], 1))))


def network(outputs=1, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return (
        nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, outputs))
        .to(dtype)
        .eval()
    )


def counts():
    return torch.poisson(torch.exp(0.3 * X[:, 0] + 1), generator=torch.Generator().manual_seed(3))


CASES = {
    "last layer": (lambda: network(), X, Y, {"likelihood": L.Gaussian(noise="estimate")}),
    "double": (lambda: network(dtype=torch.float64), X, Y, {"likelihood": L.Gaussian(noise=0.3)}),
    "all dense": (lambda: network(), X, Y, {"likelihood": L.Gaussian(noise=0.2), "weights": "all"}),
    "all kfac": (
        lambda: network(2),
        X,
        Y,
        {"likelihood": L.HeteroscedasticGaussian(), "weights": "all", "structure": "kfac"},
    ),
    "all low rank": (
        lambda: network(),
        X,
        Y,
        {"likelihood": L.Gaussian(noise=0.2), "weights": "all", "structure": "low_rank"},
    ),
    "diagonal, prior by layer": (
        lambda: network(3),
        X,
        (Y > 0).long() + (Y > 1).long(),
        {
            "likelihood": L.Categorical(),
            "weights": ["3.weight"],
            "structure": "diag",
            "prior": priors.Gaussian({"3": torch.rand(3, 6) + 0.5}),
        },
    ),
    "vector": (
        lambda: network(2),
        X,
        torch.stack([Y, -Y], 1),
        {"likelihood": L.Gaussian(noise=torch.tensor([0.2, 0.3]))},
    ),
    "counts": (
        lambda: network(),
        X,
        counts(),
        {"likelihood": L.Tempered(L.Poisson(), 0.5), "prior": priors.Gaussian(2.0, 0.1)},
    ),
    "keywords": (
        Pair,
        {"table": X, "kind": torch.arange(40) % 4},
        Y,
        {"likelihood": L.HeteroscedasticGaussian(), "weights": "all", "structure": "kfac"},
    ),
}


def fitted(name):
    make, x, y, options = CASES[name]
    torch.manual_seed(0)
    model = make().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return (
            model,
            x,
            ssla.fit(
                model, (x, y), **{"prior": priors.Gaussian(), "gaussian": "laplace", **options}
            ),
        )


def answers(posterior, x):
    p = posterior.predict(x)
    parts = [*posterior.marginal(x), p.mass, p.mean, p.variance, p.interval(0.9)]
    return [*parts, torch.tensor(posterior.log_evidence(), dtype=torch.float64)]


@pytest.mark.parametrize("name", CASES)
def test_loading_then_predicting_is_bit_identical(name, tmp_path):
    model, x, post = fitted(name)
    before = answers(post, x)
    again = ssla.load(post.save(tmp_path / "post"), model)
    assert all(torch.equal(a, b) for a, b in zip(before, answers(again, x), strict=True))
    assert again.report == post.report
    assert str(again.report) == str(post.report)
    assert repr(again.likelihood) == repr(post.likelihood)
    assert sorted(p.name for p in (tmp_path / "post").iterdir()) == [
        "manifest.json",
        "tensors.safetensors",
    ]


def test_it_is_the_same_in_a_fresh_process(tmp_path):
    model, x, post = fitted("last layer")
    post.save(tmp_path / "post")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    torch.save(x, tmp_path / "x.pt")
    torch.save(post.predict(x).interval(0.95), tmp_path / "interval.pt")
    code = f"""
import torch, ssla
from torch import nn
model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 1)).eval()
folder = {str(tmp_path)!r}
model.load_state_dict(torch.load(folder + "/weights.pt"))
post = ssla.load(folder + "/post", model)
assert torch.equal(post.predict(torch.load(folder + "/x.pt")).interval(0.95), torch.load(folder + "/interval.pt"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_loaded_posterior_takes_more_data(tmp_path):
    model, x, post = fitted("last layer")
    again = ssla.load(post.save(tmp_path / "post"), model)
    more = (x + 0.1, Y)
    assert torch.equal(again.update(more).theta, post.update(more).theta)


def test_posteriors_can_be_pickled():
    for name in ("last layer", "keywords"):
        _, x, post = fitted(name)
        again = pickle.loads(pickle.dumps(post))
        assert torch.equal(again.predict(x).mean, post.predict(x).mean)


def test_your_own_code_is_asked_for_at_load(tmp_path):
    def log_prob(y, f):
        return -((y - f[..., 0]) ** 2)

    model = network()
    post = ssla.fit(
        model,
        (X, Y),
        likelihood=L.custom(log_prob, outputs=1),
        prior=priors.Gaussian(),
        gaussian="laplace",
    )
    path = post.save(tmp_path / "post")
    with pytest.raises(ssla.FileError, match="Give it as likelihood="):
        ssla.load(path, model)
    with pytest.raises(ssla.FileError, match="was a Custom"):
        ssla.load(path, model, likelihood=L.Gaussian(noise=1.0))
    again = ssla.load(path, model, likelihood=L.custom(log_prob, outputs=1))
    assert torch.equal(again.predict(X).mean, post.predict(X).mean)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model, _, post = fitted("last layer")
    return model, post, post.save(tmp_path_factory.mktemp("saved") / "post")


def test_another_network_is_refused_by_what_differs(saved):
    _, _, path = saved
    with pytest.raises(
        ssla.FileError, match=r"'3.weight' was float32 \[1, 6\] and is float32 \[2, 6\]"
    ):
        ssla.load(path, network(outputs=2))
    with pytest.raises(ssla.FileError, match="other weights"):
        ssla.load(path, network(seed=1))
    other = network()
    other[1] = nn.ReLU()
    with pytest.raises(ssla.FileError, match="layers differ"):
        ssla.load(path, other)
    with pytest.raises(ValueError, match="training mode"):
        ssla.load(path, network().train())
    with pytest.raises(TypeError, match="second argument"):
        ssla.load(path, {"0.weight": X})


def edited(path, tmp_path, change, sign=True):
    """A copy whose manifest was changed, with a correct checksum again."""
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    change(manifest)
    if sign:
        manifest.pop("sha256")
        manifest["sha256"] = container._compute_checksum(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


def test_bad_files_are_named(saved, tmp_path):
    model, post, path = saved
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "notes.txt").write_text("mine")
    broken = tmp_path / "broken"
    shutil.copytree(path, broken)
    tensors = (broken / "tensors.safetensors").read_bytes()
    cases = {
        "no saved model at": tmp_path / "nowhere",
        "is a file": path / "manifest.json",
        "it has no manifest.json": bare,
    }
    for match, place in cases.items():
        with pytest.raises(ssla.FileError, match=match):
            ssla.load(place, model)
    with pytest.raises(ssla.FileError, match="not overwritten"):
        post.save(bare)
    assert (bare / "notes.txt").read_text() == "mine"
    (broken / "tensors.safetensors").write_bytes(tensors[:-7])
    with pytest.raises(ssla.FileError, match="truncated"):
        ssla.load(broken, model)
    (broken / "tensors.safetensors").write_bytes(tensors[:-1] + bytes([tensors[-1] ^ 1]))
    with pytest.raises(ssla.FileError, match="checksum"):
        ssla.load(broken, model)
    (broken / "tensors.safetensors").unlink()
    with pytest.raises(ssla.FileError, match="incomplete"):
        ssla.load(broken, model)
    for i, (change, sign, match) in enumerate(
        [
            (lambda m: m.update(version=2), True, "newer ssla"),
            (lambda m: m.update(format="else"), True, "not written by ssla"),
            (lambda m: m.update(kind="estimator"), True, "holds a saved 'estimator'"),
            (lambda m: m["content"].update(memory_budget=1), False, "checksum"),
            (lambda m: m["content"]["likelihood"].update({"class": "os.system"}), True, "usable"),
            (
                lambda m: m["content"]["statistics"]["fields"].update(n="many"),
                True,
                "cannot be a str",
            ),
        ]
    ):
        with pytest.raises(ssla.FileError, match=match):
            ssla.load(edited(path, tmp_path / str(i), change, sign), model)
    (path.parent / "deep").mkdir()
    (path.parent / "deep/manifest.json").write_text("[" * 100_000)
    with pytest.raises(ssla.FileError, match="not valid JSON"):
        ssla.load(path.parent / "deep", model)


def test_saving_replaces_whole_or_not_at_all(saved, tmp_path, monkeypatch):
    model, post, _ = saved
    path = post.save(tmp_path / "post")
    before = {p.name: p.read_bytes() for p in path.iterdir()}

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(container, "_write_bytes", fail)
    with pytest.raises(KeyboardInterrupt):
        post.save(path)
    monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["post"]
    post.save(path)
    assert torch.equal(ssla.load(path, model).theta, post.theta)


# --- mutations -------------------------------------------------------------------------------

VALUES = [
    None,
    True,
    -1,
    0,
    1e308,
    2**70,
    "",
    "x" * 50,
    [],
    {},
    {"tensor": "theta"},
    {"class": "Dense", "fields": {}},
    {"float": "nan"},
]


def mutate_bytes(data, rng):
    out = bytearray(data)
    kind = rng.randrange(5)
    at = rng.randrange(len(out))
    if kind == 0:
        out[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del out[at : at + rng.randrange(1, 40)]
    elif kind == 2:
        out[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 20)))
    elif kind == 3:
        out = out[:at]
    else:
        other = rng.randrange(len(out))
        out[at : at + 16], out[other : other + 16] = out[other : other + 16], out[at : at + 16]
    return bytes(out)


def mutate_json(node, rng):
    """Replace, drop or add something somewhere."""
    while True:
        children = (
            list(node)
            if isinstance(node, dict)
            else list(range(len(node)))
            if isinstance(node, list)
            else []
        )
        if not children:
            return
        key = rng.choice(children)
        child = node[key]
        if isinstance(child, dict | list) and child and rng.random() < 0.85:
            node = child
            continue
        action = rng.randrange(3)
        if action == 0:
            node[key] = rng.choice(VALUES)
        elif action == 1:
            del node[key]
        elif isinstance(node, dict):
            node[f"{key}?"] = child
        else:
            node.append(child)
        return


def mutate_tensors(tensors, rng):
    name = rng.choice(list(tensors))
    value = tensors[name]
    kind = rng.randrange(5)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors[name] = value.float() if value.is_floating_point() else value.int()
    elif kind == 2:
        tensors[name] = value.reshape(-1)[:-1].contiguous()
    elif kind == 3:
        tensors[name] = (
            torch.full_like(value, float("nan")) if value.is_floating_point() else value + 10**6
        )
    else:
        tensors[name] = tensors[rng.choice(list(tensors))].clone()


@pytest.mark.parametrize(("name", "count"), [("last layer", 8000), ("keywords", 2000)])
def test_mutated_files_end_in_our_error_or_load_the_same(name, count, tmp_path):
    """Damaged bytes (checksums catch them), and forged files with correct checksums (types,
    sizes and tables catch those).
    """
    model, x, post = fitted(name)
    path = post.save(tmp_path / "post")
    files = {p.name: p.read_bytes() for p in path.iterdir()}
    tensors = load_file(path / "tensors.safetensors")
    expected = post.predict({k: v[:3] for k, v in x.items()} if isinstance(x, dict) else x[:3]).mean
    rng = random.Random(0)
    loaded = refused = 0
    written = dict(files)
    for i in range(count):
        changed = dict(files)
        forged = i % 5 == 4
        if not forged:
            which = rng.choice(sorted(files))
            changed[which] = mutate_bytes(files[which], rng)
        else:
            manifest, parts = json.loads(files["manifest.json"]), dict(tensors)
            manifest.pop("sha256")
            if rng.random() < 0.5:
                mutate_json(manifest["content"], rng)
            else:
                mutate_tensors(parts, rng)
                data = save(parts)
                changed["tensors.safetensors"] = data
                manifest["tensors"] = {
                    "bytes": len(data),
                    "sha256": container.hashlib.sha256(data).hexdigest(),
                }
            manifest["sha256"] = container._compute_checksum(manifest)
            changed["manifest.json"] = json.dumps(manifest).encode()
        for file, data in changed.items():
            if written.get(file) is not data:
                (path / file).write_bytes(data)
                written[file] = data
        try:
            again = ssla.load(path, model)
        except ssla.FileError:
            refused += 1
            continue
        loaded += 1
        part = {k: v[:3] for k, v in x.items()} if isinstance(x, dict) else x[:3]
        if forged:  # a file may state other numbers, but must be a usable posterior
            try:
                again.marginal(part)
            except ValueError as error:
                assert "as at fit" in str(error) or "must have the parts" in str(error), repr(error)  # noqa: PT017
        else:
            assert torch.equal(again.predict(part).mean, expected)
    assert refused > 0.7 * count
    assert loaded + refused == count


def test_the_extra_is_named_when_it_is_missing(saved, monkeypatch, tmp_path):
    model, post, path = saved
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for work in (lambda: post.save(tmp_path / "p"), lambda: ssla.load(path, model)):
        with pytest.raises(ImportError, match=r"ssla\[files\]"):
            work()
    assert not (tmp_path / "p").exists()
    assert persistence.VERSION == 1


def test_a_place_that_cannot_be_written_is_our_error(tmp_path):
    _, _, post = fitted("last layer")
    (tmp_path / "file").write_text("")
    with pytest.raises(ssla.FileError, match=r"cannot be written .*Nothing was changed"):
        post.save(tmp_path / "file" / "inside")
    assert (tmp_path / "file").read_text() == ""
