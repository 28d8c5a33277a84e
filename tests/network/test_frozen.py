"""How inputs reach the private copy: integers, lengths, columns, no rows."""

from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.network.frozen import (
    CALLS,
    Frozen,
    call_with_one_argument,
    check_output_argument,
    count_rows_within,
    describe_result,
    list_integer_dtypes,
    list_named_tensors,
    list_result_parts,
    select_output,
    split_into_chunks,
    to_outputs,
)
from support.plain_network import FIT, Tokens, X, Y, net, numbers


class IdsAndNumbers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(7, 1)
        self.double()

    def forward(self, ids, x):
        return self.head(torch.cat([self.table(ids), x], 1))


class Scaled(nn.Module):
    """Takes integers as well as fractions."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1).double()

    def forward(self, x):
        return self.head(x.double() / 255)


@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_integers_at_predict_are_cast_to_the_models_dtype(weights):
    post = ssla.fit(net(), (X, Y), weights=weights, **FIT)
    whole = torch.arange(12).reshape(4, 3)
    expected = post.predict(whole.double())
    for x in (whole, whole.int(), whole.tolist(), whole.numpy()):
        assert torch.equal(post.predict(x).variance, expected.variance)
    assert torch.equal(
        post.predict(whole % 2 == 0).mean, post.predict((whole % 2 == 0).double()).mean
    )


def test_integers_stay_integers_where_they_were_at_fit():
    ids = torch.arange(120).reshape(30, 4) % 6
    post = ssla.fit(Tokens(), (ids, Y), **FIT)
    expected = post.predict(ids[:5]).mean
    for x in (ids[:5].int(), ids[:5].double(), ids[:5].float()):
        assert torch.equal(post.predict(x).mean, expected)
    with pytest.raises(
        ValueError,
        match=r"failed on the inputs x \(N, 4\) of torch.float64.*indices are whole numbers",
    ):
        post.predict(ids[:5] + 0.5)
    with pytest.raises(
        ValueError,
        match=r"failed on the inputs x \(N, 4\) of torch.int64: index out of range.*their emb",
    ):
        post.predict(ids[:5] + 3)
    both = ssla.fit(IdsAndNumbers(), ((ids[:, 0], X), Y), **FIT)
    mixed = both.predict((ids[:2, 0], torch.ones(2, 3, dtype=torch.long))).mean
    assert torch.equal(
        mixed, both.predict((ids[:2, 0], torch.ones(2, 3, dtype=torch.float64))).mean
    )


def test_fractions_are_kept_where_the_module_took_integers_at_fit_and_takes_both():
    post = ssla.fit(Scaled(), ((100 * X).long(), Y), **FIT)
    assert not torch.equal(post.predict(X[:2] + 0.5).mean, post.predict(X[:2].round()).mean)


class Signal(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv1d(2, 3, 3).double(), nn.Linear(3, 1).double()

    def forward(self, x):
        return self.head(torch.tanh(self.conv(x)).mean(2))


@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_signals_of_several_lengths_are_fitted_predicted_and_refitted(weights):
    likelihood, data = (
        L.StudentT(df=4.0, scale=0.5),
        [(numbers(20, 2, 9), Y[:20]), (numbers(10, 2, 6), Y[20:])],
    )
    post = ssla.fit(
        Signal(),
        data,
        weights=weights,
        mode="polish",
        likelihood=likelihood,
        prior=priors.Gaussian(precision=20.0),
        gaussian="laplace",
    )
    x = numbers(2, 2, 12, seed=4)
    assert post.predict(x, refit="weights").diagnostics.rung == ("weights", "weights")
    with pytest.raises(
        ValueError, match=r"failed on the inputs x \(N, 2, 2\).*At fit they were x \(N, 2, 9\)"
    ):
        post.predict(numbers(2, 2, 2))


def test_columns_are_no_length():
    post = ssla.fit(net(), (X, Y), **FIT)
    for columns in (1, 2, 4):
        with pytest.raises(
            ValueError, match=r"x must have shape \(N, 3\) as at fit, but one row of it is \(\d,\)"
        ):
            post.predict(numbers(2, columns))
    with pytest.raises(
        ValueError,
        match=r"must have shape \(N, 3\) as at fit.*\(N, 1, length\), the length may vary",
    ):
        ssla.fit(net(), [(X, Y), (X[:, :1], Y)], **FIT)


def test_no_rows_of_an_unusual_network_are_not_given_to_it():
    """A module need not take an empty batch: it is not called."""

    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()

        def forward(self, x):
            assert len(x), "empty"
            return self.inner(x)

    for weights in ("last_layer", "all"):
        post = ssla.fit(Picky(), (X, Y), weights=weights, **FIT)
        assert post.predict(X[:0]).interval(0.9).shape == (0, 2)
        with pytest.raises(ValueError, match=r"as at fit"):
            post.predict(X[:0, :2])


# --- functions alone -------------------------------------------------------------------------


def frozen(**options):
    known = {"x": (3,)}
    return Frozen(
        net(),
        torch.float64,
        torch.device("cpu"),
        call_with_one_argument,
        True,
        8,
        known,
        {},
        **options,
    )


def test_outputs_are_one_row_for_each_input():
    f = numbers(4, 2)
    assert torch.equal(to_outputs(f, 4), f)
    assert torch.equal(to_outputs(f[:, 0], 4), f[:, :1])
    assert torch.equal(to_outputs(f[0], 1), f[:1])  # squeezed
    assert torch.equal(to_outputs(f[0, 0], 1), f[:1, :1])
    assert torch.equal(to_outputs(f[:1, 0], 1), f[:1, :1])
    for wrong in (numbers(4, 2, 1), numbers(3, 2), numbers(3), numbers(())):
        with pytest.raises(ValueError, match=r"shape \(N, C\), here \(4, C\), but returned"):
            to_outputs(wrong, 4)
    with pytest.raises(TypeError, match=r"returned a list without tensors.*output=lambda"):
        to_outputs([1.0], 4)


class Holder:
    def __init__(self, **held):
        vars(self).update(held)


Point = namedtuple("Point", "a b")
RESULTS = {
    "mapping": ({"a": 1, "b": 2}, {"a": 1, "b": 2}),
    "tuple": ((1, 2), {0: 1, 1: 2}),
    "list": ([1, 2], {0: 1, 1: 2}),
    "named tuple": (Point(1, 2), {"a": 1, "b": 2}),
    "object": (Holder(a=1, b=2), {"a": 1, "b": 2}),
    "tensor": (torch.ones(2), {}),
    "number": (1.0, {}),
}


@pytest.mark.parametrize("name", RESULTS)
def test_parts_of_a_result(name):
    result, expected = RESULTS[name]
    assert list_result_parts(result) == expected
    for key, value in expected.items():
        assert select_output(result, key) == value
    assert select_output(result, None) is result


def test_parts_are_picked_by_index_also_from_named_tuples_and_from_the_end():
    point = Point(1, 2)
    assert (select_output(point, 0), select_output(point, -1)) == (1, 2)
    assert select_output([1, 2], -2) == 1
    assert select_output(point, lambda result: result.a + result.b) == 3
    with pytest.raises(ValueError, match="no part 2: it is a Point without tensors"):
        select_output(point, 2)
    with pytest.raises(ValueError, match=r"output= failed .*AttributeError"):
        select_output(point, lambda result: result.c)


def test_an_error_of_the_users_function_of_another_kind_is_passed_on():
    def interrupted(result):
        raise ZeroDivisionError("own")

    with pytest.raises(ZeroDivisionError, match="own"):
        select_output((1, 2), interrupted)


def test_descriptions_name_the_tensors_alone():
    assert describe_result({"f": torch.ones(1), "n": 3}) == "a dict with the tensors 'f'"
    assert describe_result(3) == "a int without tensors"


@pytest.mark.parametrize("output", [None, "logits", 0, -1, len])
def test_valid_outputs_are_returned_as_they_are(output):
    assert check_output_argument(output) is output


def test_rows_of_a_chunk_are_bounded_on_both_sides():
    assert count_rows_within(100, 8) == 12
    assert count_rows_within(1, 8) == 1
    assert count_rows_within(1 << 40, 8) == 65536


@pytest.mark.parametrize("rows", [1, 3, 7, 30, 100])
def test_chunks_are_the_rows_in_their_order(rows):
    for x in (X, (X, Y), {"a": X, "b": Y}):
        parts = list(split_into_chunks(x, rows))
        assert len(parts) == -(-30 // rows)
        for place, (_, expected) in enumerate(list_named_tensors(x)):
            found = [list_named_tensors(part)[place][1] for part in parts]
            assert torch.equal(torch.cat(found), expected)
            assert max(map(len, found)) <= rows


def test_parts_have_names_and_integers_their_dtype():
    x = {"ids": torch.arange(3), "on": torch.tensor([True] * 3), "v": torch.ones(3, 2)}
    assert [name for name, _ in list_named_tensors(x)] == ["x['ids']", "x['on']", "x['v']"]
    assert [name for name, _ in list_named_tensors((X, Y))] == ["x[0]", "x[1]"]
    assert list_integer_dtypes(x) == {"x['ids']": "int64", "x['on']": "bool"}


def test_casting_keeps_values_and_refuses_other_shapes():
    own = frozen()
    assert own.cast(X.float()).dtype == torch.float64
    assert torch.equal(own.cast(X.float()), X.float().double())
    assert torch.equal(own.cast(torch.ones(2, 3, dtype=torch.int8)), torch.ones(2, 3).double())
    assert own.cast(X[:0]).shape == (0, 3)
    for wrong in (X[:, :2], X[:, :1], X[:, None], X[:, 0]):
        with pytest.raises(ValueError, match=r"x must have shape \(N, 3\) as at fit"):
            own.cast(wrong)


def test_integers_of_the_fit_are_kept_in_their_dtype_if_they_are_whole():
    own = replace(frozen(), shapes={"x": ()}, integers={"x": "int32"})
    for given in (torch.arange(3), torch.arange(3.0), torch.arange(3).to(torch.uint8)):
        found = own.cast(given)
        assert found.dtype == torch.int32
        assert found.tolist() == [0, 1, 2]
    assert own.cast(torch.tensor([0.5, 1.0])).dtype == torch.float64
    beyond = own.cast(torch.tensor([2**40, 1]))  # int32 would wrap around
    assert beyond.dtype == torch.float64
    assert beyond.tolist() == [2**40, 1]


def test_a_file_of_an_older_version_keeps_integers_if_all_were_kept():
    own = replace(frozen(), integers=None)
    ids = torch.ones(2, 3, dtype=torch.long)
    assert own.cast(ids).dtype == torch.long
    assert replace(own, keep_integers=False).cast(ids).dtype == torch.float64


def test_forward_is_the_modules_own_and_has_a_graph_only_if_asked():
    own, x = frozen(), X[:4].clone().requires_grad_(True)
    assert torch.equal(own.forward(x), net()(x))
    assert not own.forward(x).requires_grad
    assert own.forward(x, graph=True).requires_grad


def test_an_error_of_the_module_names_the_inputs_of_now_and_of_the_fit():
    own = frozen()
    with (
        pytest.raises(
            ValueError,
            match=r"failed on the inputs x \(N, 2\) of torch.float64: .* At fit .*x \(N, 3\)",
        ) as caught,
        own.explain_failures(X[:, :2]),
    ):
        own.module(X[:, :2])
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(ValueError, match=r"^own$"), own.explain_failures(X):
        raise ValueError("own")


@pytest.mark.parametrize(
    ("call", "given"), [("whole", X), ("by_position", (X,)), ("by_keyword", {"input": X})]
)
def test_ways_to_call_a_module(call, given):
    assert torch.equal(CALLS[call](net(), given), net()(X))
