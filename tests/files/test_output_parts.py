"""The part of a network's result that is the output, in files."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ssla
from ssla import likelihoods as L
from ssla import priors
from support.parts import CLASSES, Parts, in_parts
from support.plain_network import X


def test_the_part_of_an_answer_is_kept_in_a_file_and_must_match(tmp_path):
    post, _ = in_parts("dict", "all")
    post.save(tmp_path / "p")
    assert ssla.load(tmp_path / "p", Parts("dict"), output="logits").report.output == "'logits'"
    with pytest.raises(
        ssla.FileError, match=r"saved with output='logits', but output= is 'hidden'"
    ):
        ssla.load(tmp_path / "p", Parts("dict"), output="hidden")
    own, _ = in_parts("function", "all")
    own.save(tmp_path / "own")
    with pytest.raises(
        ssla.FileError, match=r"output of .* is custom code .*function.*Give it as output="
    ):
        ssla.load(tmp_path / "own", Parts("function"))
    with pytest.raises(ssla.FileError, match=r"output of .* was a function, but output= is a str"):
        ssla.load(tmp_path / "own", Parts("function"), output="logits")
    hidden = ssla.fit(
        Parts("dict"),
        (X, CLASSES),
        likelihood=L.Categorical(),
        prior=priors.Gaussian(),
        gaussian="laplace",
        weights="all",
        output="hidden",
    )
    logits = ssla.fit(
        Parts("dict"),
        (X, CLASSES),
        likelihood=L.Categorical(),
        prior=priors.Gaussian(),
        gaussian="laplace",
        weights="all",
        output="logits",
    )
    with pytest.raises(ValueError, match=r"their output differ: 'hidden' and 'logits'"):
        hidden.merge(logits)


def test_a_saved_part_is_the_same_in_a_fresh_process(tmp_path):
    post, _ = in_parts("dataclass", "all")
    post.save(tmp_path / "p")
    torch.save(post.predict(X).probs, tmp_path / "probs.pt")
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "import torch, ssla; from support.parts import Parts, X\n"
        f"found = ssla.load({str(tmp_path / 'p')!r}, Parts('dataclass')).predict(X).probs\n"
        f"assert torch.equal(found, torch.load({str(tmp_path / 'probs.pt')!r}))"
    )
    where = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=where, timeout=120)
