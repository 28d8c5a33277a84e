"""nn.MultiheadAttention in steps: the outputs of torch's own function, and Kronecker factors of
its four projections.
"""

import itertools
import math

import pytest
import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.network.watch import LINEAR, NORM, Probe

DOUBLE = torch.float64
MASKS = (None, "boolean", "numbers", "for each row and head", "causal")
ROWS, TARGETS, SOURCES, WIDTH, HEADS = 5, 4, 3, 8, 2
pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")


def randn(*shape, seed=0, dtype=DOUBLE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE).to(
        dtype
    )


def attention(dtype=DOUBLE, **options):
    torch.manual_seed(1)
    layer = nn.MultiheadAttention(WIDTH, HEADS, **options).to(dtype).eval()
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(0, 0.5)
    return layer


def mask_of(kind, sources, dtype):
    if kind is None:
        return None
    if kind == "numbers":
        return randn(TARGETS, sources, seed=5, dtype=dtype)
    if kind == "causal":
        return torch.ones(TARGETS, sources, dtype=torch.bool).triu(1)
    shape = (TARGETS, sources) if kind == "boolean" else (ROWS * HEADS, TARGETS, sources)
    mask = randn(*shape, seed=6) > 0.5
    mask[..., 0] = False  # a place without any source has no attention at all
    return mask


def both(layer, parts, **options):
    """The layer's answer as it is, and while its calls are intercepted."""
    with torch.no_grad():
        expected = layer(*parts, **options)
        with Probe() as probe:
            found = layer(*parts, **options)
    return expected, found, probe


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_the_answer_is_that_of_torch(dtype, mask, batch_first):
    """With every option of the layer, and with different query, key and value."""
    switches = itertools.product([False, True], repeat=6)
    for bias, appended, zeros, other_sizes, need_weights, padded in switches:
        sizes = {"kdim": 5, "vdim": 6} if other_sizes else {}
        layer = attention(
            dtype,
            bias=bias,
            add_bias_kv=appended,
            add_zero_attn=zeros,
            batch_first=batch_first,
            **sizes,
        )
        sources = TARGETS if mask == "causal" else SOURCES
        shapes = [
            (ROWS, TARGETS, WIDTH),
            (ROWS, sources, sizes.get("kdim", WIDTH)),
            (ROWS, sources, sizes.get("vdim", WIDTH)),
        ]
        parts = [randn(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
        parts = parts if batch_first else [part.transpose(0, 1) for part in parts]
        padding = None
        if padded:
            padding = torch.zeros(ROWS, sources, dtype=torch.bool)
            padding[1:, -1] = True
        causal = mask == "causal" and not (appended or zeros)
        options = {
            "attn_mask": mask_of(mask, sources, dtype),
            "key_padding_mask": padding,
            "is_causal": causal,
        }
        expected, found, probe = both(layer, parts, need_weights=need_weights, **options)
        tolerance = 1e-6 if dtype == torch.float32 else 1e-14
        torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
        assert (found[1] is None) == (expected[1] is None)
        if need_weights:
            torch.testing.assert_close(found[1], expected[1], rtol=tolerance, atol=tolerance)
        assert sum(call.operation == LINEAR for call in probe.calls) == 4


@pytest.mark.parametrize("average", [False, True])
def test_self_attention_has_one_packed_product_in_torch_and_three_here(average):
    layer, x = attention(batch_first=True), randn(ROWS, TARGETS, WIDTH)
    expected, found, probe = both(layer, (x, x, x), average_attn_weights=average)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)
    assert [call.first for call in probe.calls] == [0, WIDTH, 2 * WIDTH, 0]


def test_one_sequence_without_rows_is_left_to_torch():
    layer, x = attention(), randn(TARGETS, WIDTH)
    expected, found, probe = both(layer, (x, x, x))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not probe.calls


class Encoder(nn.Module):
    """A transformer of torch's own layers.

    Rows are the second dimension of its inputs unless `batch_first`.
    """

    def __init__(self, batch_first=True, norm_first=False, depth=1):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            8, 2, 12, batch_first=batch_first, dropout=0.0, norm_first=norm_first
        )
        self.inside = nn.Linear(3, 8)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)
        self.batch_first = batch_first

    def forward(self, x):
        h = self.inside(x)
        h = self.encoder(h) if self.batch_first else self.encoder(h.transpose(0, 1)).transpose(0, 1)
        return self.head(h.mean(1))


class ByHand(nn.Module):
    """The same with nn.Linear alone, whose inputs and outputs hooks can read: the reference."""

    def __init__(self, model):
        super().__init__()
        layer = model.encoder.layers[0]
        attention, width = layer.self_attn, 8
        self.projections = nn.ModuleList(nn.Linear(width, width).double() for _ in range(3))
        for i, projection in enumerate(self.projections):
            projection.weight.data.copy_(attention.in_proj_weight[i * width : (i + 1) * width])
            projection.bias.data.copy_(attention.in_proj_bias[i * width : (i + 1) * width])
        self.out = nn.Linear(width, width).double()
        self.out.weight.data.copy_(attention.out_proj.weight)
        self.out.bias.data.copy_(attention.out_proj.bias)
        self.inside, self.layer, self.head = model.inside, layer, model.head

    def forward(self, x):
        h = self.inside(x)
        q, k, v = (p(h).unflatten(2, (2, 4)).transpose(1, 2) for p in self.projections)
        mixed = torch.softmax(q @ k.mT / math.sqrt(4), -1) @ v
        h = self.layer.norm1(h + self.out(mixed.transpose(1, 2).flatten(2)))
        h = self.layer.norm2(h + self.layer.linear2(torch.relu(self.layer.linear1(h))))
        return self.head(h.mean(1))


def explicit_factors(model, layers, x, likelihood):
    """Σ a aᵀ and Σ δᵀΛδ of each layer: row by row, place by place, output by output."""
    seen = {}

    def keep(layer, inputs, output):
        output.retain_grad()
        seen[layer] = (inputs[0], output)

    hooks = [layer.register_forward_hook(keep) for layer in layers]
    sums = dict.fromkeys(layers, (0, 0))
    for row in x.split(1):
        f = model(row)
        precision = likelihood.fisher(f.detach())[0]
        grads = {layer: [] for layer in layers}
        for c in range(f.shape[1]):
            for layer in layers:
                seen[layer][1].grad = None
            f[0, c].backward(retain_graph=True)
            for layer in layers:
                grads[layer].append(seen[layer][1].grad[0].clone())
        for layer in layers:
            A, G = sums[layer]
            for t in range(x.shape[1]):
                a = torch.cat([seen[layer][0][0, t].detach(), torch.ones(1, dtype=DOUBLE)])
                delta = torch.stack([grad[t] for grad in grads[layer]])  # (C, out)
                A, G = A + torch.outer(a, a), G + delta.mT @ precision @ delta
            sums[layer] = (A, G)
    for hook in hooks:
        hook.remove()
    return [sums[layer] for layer in layers]


@pytest.mark.parametrize("batch_first", [True, False])
def test_factors_of_the_projections_are_sums_of_outer_products(batch_first):
    torch.manual_seed(0)
    model = Encoder(batch_first).double().eval()
    reference = ByHand(model)
    x, y = randn(7, 4, 3), torch.arange(7) % 3
    torch.testing.assert_close(reference(x), model(x), rtol=1e-12, atol=1e-13)
    likelihood = L.Categorical()
    post = ssla.fit(
        model,
        (x, y),
        likelihood=likelihood,
        weights="all",
        structure="kfac",
        prior=priors.Gaussian(3.0),
        gaussian="laplace",
    )
    layer = reference.layer
    layers = [*reference.projections, reference.out, layer.linear1, layer.linear2]
    expected = explicit_factors(reference, layers, x, likelihood)
    sums = post.statistics.curvature
    starts = dict(zip(post.report.names, _starts(model, post.report.names), strict=True))
    prefix = "encoder.layers.0."
    firsts = [starts[prefix + "self_attn.in_proj_weight"] + i * 64 for i in range(3)]
    firsts += [
        starts[prefix + name]
        for name in ("self_attn.out_proj.weight", "linear1.weight", "linear2.weight")
    ]
    found = {int(factors.positions[0, 0]): factors for factors in sums.layers}
    for first, (A, G) in zip(firsts, expected, strict=True):
        factors = found[first]
        torch.testing.assert_close(factors.A, A, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(factors.G, G, rtol=1e-10, atol=1e-12)
        assert factors.count == 7 * 4


def _starts(model, names):
    sizes = [dict(model.named_parameters())[name].numel() for name in names]
    return [sum(sizes[:i]) for i in range(len(sizes))]


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_every_linear_layer_of_an_encoder_has_factors(batch_first, norm_first):
    """Also where rows are the second dimension, and as many as places: their dimension is found
    by another number of rows.
    """
    torch.manual_seed(0)
    model = Encoder(batch_first, norm_first, depth=2).double().eval()
    x, y = randn(4, 4, 3), torch.arange(4) % 3
    post = ssla.fit(
        model,
        (x, y),
        likelihood=L.Categorical(),
        weights="all",
        structure="kfac",
        prior=priors.Gaussian(3.0),
        gaussian="laplace",
    )
    for name, kind in post.report.blocks.items():
        assert kind == ("diag" if "norm" in name else "kfac"), name


class Appended(nn.Module):
    """Attention with a bias that is appended to keys and values, between two sequences."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(
            8, 2, kdim=3, vdim=3, add_bias_kv=True, batch_first=True
        )
        self.query = nn.Parameter(torch.randn(1, 2, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.attention(self.query.expand(len(x), -1, -1), x, x)[0].mean(1))


def test_what_has_no_kronecker_form_is_diagonal_and_said_to_be():
    torch.manual_seed(0)
    model = Appended().double().eval()
    x, y = randn(9, 4, 3), torch.arange(9) % 3
    post = ssla.fit(
        model,
        (x, y),
        likelihood=L.Categorical(),
        weights="all",
        structure="kfac",
        prior=priors.Gaussian(3.0),
        gaussian="laplace",
    )
    assert post.report.blocks == {
        "": "diag",
        "attention.q_proj_weight": "kfac",
        "attention.k_proj_weight": "kfac",
        "attention.v_proj_weight": "kfac",
        "attention.in_proj_bias": "kfac",
        "attention.bias_k": "diag",
        "attention.bias_v": "diag",
        "attention.out_proj": "kfac",
        "head": "kfac",
    }
    assert "attention.bias_k: diag" in str(post.report)


def test_norms_are_recorded_with_their_scale():
    layer, x = nn.GroupNorm(2, 4).double(), randn(3, 4, 5)
    with torch.no_grad(), Probe() as probe:
        layer(x)
    assert [call.operation for call in probe.calls] == [NORM]
    with torch.no_grad(), Probe() as probe:
        nn.LayerNorm(5, elementwise_affine=False).double()(x)
    assert not probe.calls
