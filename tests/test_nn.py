"""The layer: parameters, short convolution, padding, cache, gradients, errors."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import errors
import oracle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashkda.nn import GatedRMSNorm, KDACache, KimiDeltaAttention, ShortConvolution

# Cuts of one sequence: single tokens, nothing, and ends inside and at the edge of chunks.
CUTS = [0, 1, 2, 18, 18, 32, 33, 70]

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gva": {"num_v_heads": 4},
    "wide_values": {"expand_v": 1.5, "num_v_heads": 4},
    "bounded": {"safe_gate": True, "lower_bound": -5.0},
    "bounded_softly": {"lower_bound": -2.0},
    "negative_eigenvalues": {"allow_neg_eigval": True},
    "no_conv": {"use_short_conv": False},
    "conv_bias_width_3": {"conv_bias": True, "conv_size": 3},
    "conv_width_1": {"conv_size": 1},
    "recurrent": {"mode": "fused_recurrent"},
}


def make_layer(dtype: torch.dtype = torch.float64, **options: Any) -> KimiDeltaAttention:
    settings: dict[str, Any] = {
        "hidden_size": 32,
        "head_dim": 16,
        "num_heads": 2,
        "layer_idx": 0,
        "dtype": dtype,
    }
    return KimiDeltaAttention(**(settings | options))


def reference_conv(conv: ShortConvolution, x: Tensor) -> Tensor:
    """silu(conv1d) of one sequence [T, D] with zeros before it."""
    padded = F.pad(x.double().T[None], (conv.kernel_size - 1, 0))
    bias = None if conv.bias is None else conv.bias.double()
    return F.silu(F.conv1d(padded, conv.weight.double(), bias, groups=conv.hidden_size))[0].T


def reference_layer(layer: KimiDeltaAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Output [T, D] and state [HV, K, V] of one sequence [T, D], in float64 from the equations."""
    weights = {name: p.double() for name, p in layer.named_parameters()}
    x = x.double()

    def branch(name: str, heads: int, dim: int) -> Tensor:
        y = x @ weights[f"{name}_proj.weight"].T
        y = (
            reference_conv(getattr(layer, f"{name}_conv1d"), y)
            if layer.use_short_conv
            else F.silu(y)
        )
        return y.reshape(1, -1, heads, dim)

    heads, value_heads = layer.num_heads, layer.num_v_heads
    key_dim, value_dim = layer.head_k_dim, layer.head_v_dim
    g = x @ weights["f_proj.0.weight"].T @ weights["f_proj.1.weight"].T
    o, state = oracle.kda(
        branch("q", heads, key_dim),
        branch("k", heads, key_dim),
        branch("v", value_heads, value_dim),
        g.reshape(1, -1, value_heads, key_dim),
        (x @ weights["b_proj.weight"].T)[None],
        A_log=weights["A_log"],
        dt_bias=weights["dt_bias"],
        lower_bound=layer.lower_bound,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=layer.allow_neg_eigval,
    )
    gate = x @ weights["g_proj.0.weight"].T @ weights["g_proj.1.weight"].T
    gate = (gate + weights["g_proj.1.bias"]).reshape(-1, value_heads, value_dim)
    root = (o[0].square().mean(-1, keepdim=True) + layer.o_norm.eps).sqrt()
    normed = o[0] / root * weights["o_norm.weight"] * gate.sigmoid()
    return normed.flatten(1) @ weights["o_proj.weight"].T, state[0]


def run_pieces(
    layer: KimiDeltaAttention, x: Tensor, cuts: Sequence[int], cache: KDACache | None = None
) -> tuple[Tensor, KDACache]:
    outs = []
    for start, end in pairwise(cuts):
        o, weights, cache = layer(x[:, start:end], past_key_values=cache, use_cache=True)
        assert weights is None
        outs.append(o)
    assert cache is not None
    return torch.cat(outs, dim=1), cache


def recurrent_state(cache: KDACache | None) -> Tensor:
    assert cache is not None
    state = cache.get(0)
    assert state is not None
    return state.recurrent


# --- Parameters ---------------------------------------------------------------------------------


def test_state_dict_has_the_names_and_shapes_of_the_fla_layer() -> None:
    layer = KimiDeltaAttention(
        hidden_size=48, head_dim=16, num_heads=2, num_v_heads=4, expand_v=2, conv_bias=True
    )
    key, value, gate = 2 * 16, 4 * 32, 4 * 16
    want = {
        "q_proj.weight": (key, 48),
        "k_proj.weight": (key, 48),
        "v_proj.weight": (value, 48),
        "q_conv1d.weight": (key, 1, 4),
        "q_conv1d.bias": (key,),
        "k_conv1d.weight": (key, 1, 4),
        "k_conv1d.bias": (key,),
        "v_conv1d.weight": (value, 1, 4),
        "v_conv1d.bias": (value,),
        "f_proj.0.weight": (32, 48),
        "f_proj.1.weight": (gate, 32),
        "b_proj.weight": (4, 48),
        "A_log": (4,),
        "dt_bias": (gate,),
        "g_proj.0.weight": (32, 48),
        "g_proj.1.weight": (value, 32),
        "g_proj.1.bias": (value,),
        "o_norm.weight": (32,),
        "o_proj.weight": (48, value),
    }
    assert {name: tuple(p.shape) for name, p in layer.state_dict().items()} == want


def test_defaults_are_those_of_the_fla_layer() -> None:
    layer = KimiDeltaAttention(device="meta")
    assert (layer.hidden_size, layer.num_heads, layer.num_v_heads) == (2048, 16, 16)
    assert (layer.head_k_dim, layer.head_v_dim, layer.conv_size) == (128, 128, 4)
    assert layer.q_conv1d.bias is None
    assert "head_k_dim=128" in repr(layer)


def test_initial_gate_with_safe_gate() -> None:
    layer = make_layer(torch.float32, num_heads=64, safe_gate=True, lower_bound=-5)
    assert bool((layer.A_log == 0).all())


def test_initial_gate_statistics() -> None:
    layer = make_layer(torch.float32, hidden_size=8, num_heads=512)
    rate = layer.A_log.detach().double().exp()
    assert 1 <= float(rate.min()) < 1.3
    assert 15.7 < float(rate.max()) <= 16.001
    assert abs(float(rate.mean()) - 8.5) < 0.6  # the deviation of the mean is 0.19
    dt = F.softplus(layer.dt_bias.detach().double())
    assert 0.99e-3 < float(dt.min()) < 1.01e-3
    assert 0.099 < float(dt.max()) < 0.1001
    log_dt = dt.log()
    assert abs(float(log_dt.mean()) - math.log(1e-2)) < 0.05  # deviation of the mean 0.015
    assert abs(float(log_dt.std()) - math.log(100) / math.sqrt(12)) < 0.05


def test_gate_parameters_stay_float32_and_are_marked_against_weight_decay() -> None:
    layer = make_layer(torch.bfloat16)
    for parameter in (layer.A_log, layer.dt_bias):
        assert parameter.dtype == torch.float32
        assert getattr(parameter, "_no_weight_decay", False)
    assert layer.q_proj.weight.dtype == torch.bfloat16


def loaded_by_assignment(layer: KimiDeltaAttention) -> KimiDeltaAttention:
    layer.load_state_dict(make_layer(torch.float32).state_dict(), assign=True)
    return layer


NEW_PARAMETERS: dict[str, Callable[[KimiDeltaAttention], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "in_a_model": lambda layer: copy.deepcopy(torch.nn.Sequential(layer))[0],
    "to_meta": lambda layer: layer.to("meta"),
    "to_empty": lambda layer: layer.to("meta").to_empty(device="cpu"),
    "of_a_model": lambda layer: torch.nn.Sequential(layer.to("meta")).to_empty(device="cpu")[0],
    "double": lambda layer: layer.double(),
    "assign": loaded_by_assignment,
}


@pytest.mark.parametrize("way", NEW_PARAMETERS)
def test_marks_against_weight_decay_outlast_parameters(way: str) -> None:
    layer = NEW_PARAMETERS[way](make_layer(torch.float32))
    marked = {name for name, x in layer.named_parameters() if getattr(x, "_no_weight_decay", False)}
    assert marked == {"A_log", "dt_bias"}
    assert layer.requires_grad_(False) is layer


@pytest.mark.parametrize("config", ["plain", "bounded", "conv_bias_width_3", "no_conv"])
def test_a_materialised_layer_is_reset_as_it_is_constructed(config: str) -> None:
    torch.manual_seed(3)
    want = make_layer(torch.float32, **CONFIGS[config]).state_dict()
    layer = make_layer(torch.float32, device="meta", **CONFIGS[config]).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(math.nan)
    torch.manual_seed(3)
    layer.reset_parameters()
    got = layer.state_dict()
    assert list(got) == list(want)
    for name, x in got.items():
        assert torch.equal(x, want[name]), name


def test_a_materialised_norm_is_reset() -> None:
    norm = GatedRMSNorm(8, device="meta").to_empty(device="cpu")
    torch.nn.init.zeros_(norm.weight)
    norm.reset_parameters()
    assert bool((norm.weight == 1).all())
    assert norm.weight.requires_grad


def test_a_meta_layer_can_be_materialised() -> None:
    layer = KimiDeltaAttention(16, head_dim=8, num_heads=2, device="meta").to_empty(device="cpu")
    layer.load_state_dict(make_layer(torch.float32, hidden_size=16, head_dim=8).state_dict())
    layer.reset_gate_parameters()
    layer.q_conv1d.reset_parameters()
    assert bool(torch.isfinite(layer(torch.randn(1, 5, 16))[0]).all())


# --- Against the equations ----------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
def test_layer_matches_the_equations(config: str) -> None:
    layer = make_layer(**CONFIGS[config])
    x = torch.randn(2, 37, 32, dtype=torch.float64)
    with torch.no_grad():
        got, _, cache = layer(x, use_cache=True)
        for n in range(2):
            want, state = reference_layer(layer, x[n])
            assert errors.norm_error(got[n], want) < 1e-11
            assert errors.norm_error(recurrent_state(cache)[n].mT, state) < 1e-11


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_layer_in_low_precision(dtype: torch.dtype, limit: float) -> None:
    layer = make_layer(dtype, lower_bound=-5.0, safe_gate=True)
    x = torch.randn(1, 70, 32).to(dtype)
    got, _, cache = layer(x, use_cache=True)
    want, state = reference_layer(layer, x[0])
    assert got.dtype == dtype
    assert recurrent_state(cache).dtype == torch.float32
    assert errors.norm_error(got[0], want) < limit
    assert errors.norm_error(recurrent_state(cache)[0].mT, state) < limit


def test_a_whole_layer_cast_to_bfloat16_runs() -> None:
    layer = make_layer(torch.float32).to(torch.bfloat16)
    assert layer.A_log.dtype == torch.bfloat16
    out = layer(torch.randn(1, 20, 32, dtype=torch.bfloat16))[0]
    assert bool(torch.isfinite(out).all())


def test_autocast_runs_in_its_dtype_and_stays_close() -> None:
    layer = make_layer(torch.float32)
    x = torch.randn(1, 40, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _, cache = layer(x, use_cache=True)
    assert got.dtype == torch.bfloat16
    assert recurrent_state(cache).dtype == torch.float32
    assert errors.norm_error(got, layer(x)[0]) < 2e-2


# --- Short convolution --------------------------------------------------------------------------

CONV_LENGTHS = {
    "empties_everywhere": [0, 0, 5, 0, 1, 2, 9, 0],
    "one": [13],
    "all_empty": [0, 0],
    "single_tokens": [1, 1, 1],
}


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("lengths", CONV_LENGTHS)
def test_packed_convolution_is_the_plain_one_of_each_sequence(
    lengths: str, bias: bool, width: int
) -> None:
    conv = ShortConvolution(6, width, bias, dtype=torch.float64)
    sizes = CONV_LENGTHS[lengths]
    cu_seqlens = F.pad(torch.tensor(sizes).cumsum(0), (1, 0)).int()
    x = torch.randn(1, sum(sizes) + 3, 6, dtype=torch.float64)  # three rows of no sequence
    x[:, sum(sizes) :] = math.nan
    history = torch.randn(len(sizes), width - 1, 6, dtype=torch.float64)
    y, state = conv(x, history, cu_seqlens)
    assert state.shape == history.shape
    for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        whole = torch.cat([history[n], x[0, start:end]])
        if start < end:  # conv1d itself refuses an empty input
            want = reference_conv(conv, whole)[width - 1 :]
            torch.testing.assert_close(y[0, start:end], want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state[n], whole[len(whole) - width + 1 :], rtol=0, atol=0)


def test_convolution_cut_anywhere_is_equal_to_the_bit() -> None:
    conv = ShortConvolution(5, 4, True)  # pieces that fill no vector of the CPU
    x = torch.randn(2, 70, 5)
    want, want_state = conv(x)
    state, outs = None, []
    for start, end in pairwise(CUTS):
        y, state = conv(x[:, start:end], state)
        outs.append(y)
    assert torch.equal(torch.cat(outs, dim=1), want)
    assert state is not None
    assert torch.equal(state, want_state)


def test_convolution_state_does_not_hold_the_sequence() -> None:
    _, state = ShortConvolution(8, 4)(torch.randn(1, 1000, 8))
    assert state.untyped_storage().nbytes() == 3 * 8 * 4


def test_convolution_refuses_a_state_of_another_shape() -> None:
    conv = ShortConvolution(8, 4)
    with pytest.raises(ValueError, match=r"state: expected shape \(2, 3, 8\), got \(2, 4, 8\)"):
        conv(torch.randn(2, 5, 8), torch.zeros(2, 4, 8))
    assert "kernel_size=4" in repr(conv)


def test_packed_convolution_gradients() -> None:
    conv = ShortConvolution(3, 3, True, dtype=torch.float64)
    x = torch.randn(1, 7, 3, dtype=torch.float64, requires_grad=True)
    history = torch.randn(3, 2, 3, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, 4, 4, 7])
    parameters = tuple(conv.parameters())

    def call(x: Tensor, history: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        return conv(x, history, cu_seqlens)

    assert torch.autograd.gradcheck(call, (x, history, *parameters))


def test_gated_norm() -> None:
    norm = GatedRMSNorm(8, 1e-3, dtype=torch.float64)
    torch.nn.init.normal_(norm.weight)
    x, gate = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(2, 3, 8, dtype=torch.float64)
    want = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight * gate.sigmoid()
    torch.testing.assert_close(norm(x, gate), want, rtol=1e-12, atol=1e-12)
    assert "eps=0.001" in repr(norm)


# --- Cache --------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_chunked_prefill_and_decode_equal_one_shot(config: str, grad: bool) -> None:
    layer = make_layer(**CONFIGS[config])
    x = torch.randn(2, 70, 32, dtype=torch.float64)
    with torch.set_grad_enabled(grad):
        want, _, want_cache = layer(x, use_cache=True)
        got, cache = run_pieces(layer, x, CUTS)
    assert errors.norm_error(got, want) < 1e-12
    assert errors.norm_error(recurrent_state(cache), recurrent_state(want_cache)) < 1e-12
    assert cache.seen_tokens() == 70


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_decode_of_every_token_equals_one_shot(dtype: torch.dtype, limit: float) -> None:
    layer = make_layer(dtype, num_v_heads=4)
    x = torch.randn(2, 70, 32).to(dtype)
    with torch.inference_mode():
        want = layer(x)[0]
        got, _ = run_pieces(layer, x, range(71))
    assert errors.norm_error(got, want) < limit


def test_reading_a_cache_does_not_change_it() -> None:
    layer = make_layer()
    x = torch.randn(1, 20, 32, dtype=torch.float64)
    with torch.no_grad():
        _, cache = run_pieces(layer, x, [0, 12])
        before = cache.clone()
        first, _, returned = layer(x[:, 12:13], past_key_values=cache)
        again = layer(x[:, 12:13], past_key_values=cache)[0]
    assert returned is cache
    assert torch.equal(first, again)
    assert torch.equal(recurrent_state(cache), recurrent_state(before))
    assert cache.seen_tokens() == 12


def test_a_clone_is_not_touched_by_later_steps() -> None:
    layer = make_layer()
    x = torch.randn(1, 20, 32, dtype=torch.float64)
    with torch.no_grad():
        _, cache = run_pieces(layer, x, [0, 12])
        fork, want = cache.clone(), recurrent_state(cache).clone()
        run_pieces(layer, x, [12, 13, 20], cache)
    assert torch.equal(recurrent_state(fork), want)
    assert (fork.seen_tokens(), cache.seen_tokens()) == (12, 20)


def test_select_reorders_drops_and_repeats_sequences() -> None:
    layer = make_layer()
    x = torch.randn(3, 20, 32, dtype=torch.float64)
    with torch.no_grad():
        _, cache = run_pieces(layer, x, [0, 12])
        picked = torch.tensor([2, 0, 0])
        got = layer(x[picked, 12:], past_key_values=cache.select(picked))[0]
        want = layer(x[:, 12:], past_key_values=cache)[0][picked]
    assert errors.norm_error(got, want) < 1e-12


@pytest.mark.parametrize(
    ("indices", "kind", "message"),
    [
        ([1, 0], TypeError, "a torch.Tensor, got a value of type list"),
        (torch.tensor([True, False]), TypeError, "int32 or int64, got bool"),
        (torch.tensor([[1, 0]]), ValueError, r"shape \[M\], got \[1, 2\]"),
        (torch.tensor(1), ValueError, r"shape \[M\], got \[\]"),
    ],
    ids=["list", "mask", "matrix", "scalar"],
)
def test_select_refuses(indices: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^indices: expected {message}"):
        KDACache().select(indices)


def test_layers_of_a_model_share_a_cache() -> None:
    layers = [make_layer(layer_idx=i) for i in range(2)]
    x = torch.randn(1, 20, 32, dtype=torch.float64)
    with torch.no_grad():
        want = layers[1](layers[0](x)[0])[0]
        cache, outs = KDACache(), []
        for start, end in ((0, 7), (7, 20)):
            y = x[:, start:end]
            for layer in layers:
                y = layer(y, past_key_values=cache, use_cache=True)[0]
            outs.append(y)
    assert errors.norm_error(torch.cat(outs, dim=1), want) < 1e-12
    assert len(cache) == 2
    assert repr(cache) == "KDACache(seen_tokens={0: 20, 1: 20})"
    cache.reset()
    assert (len(cache), cache.seen_tokens(1)) == (0, 0)


def test_packed_prefill_then_decode_as_a_batch() -> None:
    layer = make_layer(num_v_heads=4)
    x = torch.randn(3, 12, 32, dtype=torch.float64)
    sizes = [4, 0, 9]
    packed = torch.cat([x[n, :size] for n, size in enumerate(sizes)])[None]
    with torch.no_grad():
        _, _, cache = layer(packed, cu_seqlens=torch.tensor([0, 4, 4, 13]), use_cache=True)
        steps = torch.stack([x[n, size : size + 2] for n, size in enumerate(sizes)])
        got, _ = run_pieces(layer, steps, [0, 1, 2], cache)
        for n, size in enumerate(sizes):
            want = layer(x[n : n + 1, : size + 2])[0][0, size:]
            assert errors.norm_error(got[n], want) < 1e-12


def test_packed_sequences_go_on_from_a_cache() -> None:
    layer = make_layer()
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    with torch.no_grad():
        _, _, cache = layer(x[:, :11], use_cache=True)
        packed = torch.cat([x[0, 11:], x[1, 11:15]])[None]
        got = layer(packed, past_key_values=cache, cu_seqlens=torch.tensor([0, 9, 13]))[0][0]
        want = layer(x)[0]
    assert errors.norm_error(got[:9], want[0, 11:]) < 1e-12
    assert errors.norm_error(got[9:], want[1, 11:15]) < 1e-12


# --- Packed and padded batches ------------------------------------------------------------------


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_packed_sequences_equal_separate_ones(index_dtype: torch.dtype) -> None:
    layer = make_layer(num_v_heads=4)
    ends = [0, 0, 5, 6, 6, 39, 41, 41]
    x = torch.randn(1, 44, 32, dtype=torch.float64)
    got, _, cache = layer(x, cu_seqlens=torch.tensor(ends, dtype=index_dtype), use_cache=True)
    for n, (start, end) in enumerate(pairwise(ends)):
        if start == end:
            assert bool((recurrent_state(cache)[n] == 0).all())
            continue
        want, _, alone = layer(x[:, start:end], use_cache=True)
        assert errors.norm_error(got[:, start:end], want) < 1e-12
        assert errors.norm_error(recurrent_state(cache)[n], recurrent_state(alone)[0]) < 1e-12
    assert bool((got[:, 41:] == 0).all())


def test_rows_past_the_end_reach_neither_results_nor_gradients() -> None:
    layer = make_layer()
    cu_seqlens = torch.tensor([0, 9, 20])
    x = torch.randn(1, 24, 32, dtype=torch.float64)
    x[:, 20:] = math.nan
    clean = x[:, :20].clone()
    results = []
    for inputs in (x, clean):
        leaf = inputs.clone().requires_grad_()
        layer.zero_grad()
        out = layer(leaf, cu_seqlens=cu_seqlens)[0]
        out.square().sum().backward()
        assert leaf.grad is not None
        gradients = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
        results.append((out[:, :20], leaf.grad[:, :20], *gradients))
    for got, want in zip(*results, strict=True):
        assert errors.norm_error(got, want) < 1e-12


MASKS = {
    "left": lambda t: t >= torch.tensor([[0], [13], [29], [35]]),
    "right": lambda t: t < torch.tensor([[36], [20], [1], [0]]),
    "both": lambda t: (t >= torch.tensor([[0], [3], [8], [1]])) & (t < 30),
    "holes": lambda t: (t * torch.tensor([[1], [3], [5], [7]])) % 4 != 1,
}


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("kind", MASKS)
def test_B75_padding_does_not_change_a_sequence(kind: str, mask_dtype: torch.dtype) -> None:
    layer = make_layer(num_v_heads=4)
    keep = MASKS[kind](torch.arange(36)[None])
    x = torch.randn(4, 36, 32, dtype=torch.float64)
    x[~keep] = 1e6  # what stands under the mask must not matter
    got, _, cache = layer(x, attention_mask=keep.to(mask_dtype), use_cache=True)
    for n in range(4):
        want, _, alone = layer(x[n : n + 1, keep[n]], use_cache=True)
        assert errors.norm_error(got[n, keep[n]], want[0]) < 1e-12
        assert errors.norm_error(recurrent_state(cache)[n], recurrent_state(alone)[0]) < 1e-12
        assert bool((got[n, ~keep[n]] == 0).all())


@pytest.mark.parametrize("whole_mask", [True, False], ids=["mask_of_all", "mask_of_step"])
def test_B75_padded_prefill_then_decode(whole_mask: bool) -> None:
    layer = make_layer()
    x = torch.randn(3, 30, 32, dtype=torch.float64)
    keep = torch.ones(3, 30, dtype=torch.bool)
    keep[1, :9] = False  # left padding
    keep[2, 26:] = False  # this sequence ends while the others go on
    with torch.no_grad():
        cache, outs = None, []
        for start, end in ((0, 20), (20, 21), (21, 27), (27, 28), (28, 30)):
            mask = keep[:, :end] if whole_mask else keep[:, start:end]
            o, _, cache = layer(
                x[:, start:end], attention_mask=mask, past_key_values=cache, use_cache=True
            )
            outs.append(o)
        got = torch.cat(outs, dim=1)
        for n in range(3):
            want, _, alone = layer(x[n : n + 1, keep[n]], use_cache=True)
            assert errors.norm_error(got[n, keep[n]], want[0]) < 1e-12
            assert errors.norm_error(recurrent_state(cache)[n], recurrent_state(alone)[0]) < 1e-12


def test_a_mask_of_ones_changes_nothing() -> None:
    layer = make_layer()
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    assert errors.norm_error(layer(x, attention_mask=torch.ones(2, 20))[0], layer(x)[0]) < 1e-12


def test_no_tokens_at_all() -> None:
    layer = make_layer()
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    _, cache = run_pieces(layer, x, [0, 20])
    out, _, cache_after = layer(x[:, :0], past_key_values=cache.clone(), use_cache=True)
    assert out.shape == (2, 0, 32)
    assert torch.equal(recurrent_state(cache_after), recurrent_state(cache))
    masked = layer(x, attention_mask=torch.zeros(2, 20))[0]
    assert bool((masked == 0).all())


# --- Gradients and compilation ------------------------------------------------------------------


@pytest.mark.parametrize("config", ["plain", "gva", "bounded", "no_conv", "conv_bias_width_3"])
def test_gradients_match_the_equations(config: str) -> None:
    layer = make_layer(**CONFIGS[config])
    x = torch.randn(1, 37, 32, dtype=torch.float64, requires_grad=True)
    inputs = {"hidden_states": x, **dict(layer.named_parameters())}
    cotangent = torch.randn(1, 37, 32, dtype=torch.float64)
    got = torch.autograd.grad(layer(x)[0], list(inputs.values()), cotangent)
    want = torch.autograd.grad(reference_layer(layer, x[0])[0], list(inputs.values()), cotangent[0])
    for name, a, b in zip(inputs, got, want, strict=True):
        assert errors.norm_error(a, b) < 1e-9, name


def test_gradients_through_padding_and_through_the_cache() -> None:
    layer = make_layer()
    x = torch.randn(1, 24, 32, dtype=torch.float64, requires_grad=True)
    (want,) = torch.autograd.grad(layer(x)[0].square().sum(), x)
    pieces, cache = run_pieces(layer, x, [0, 10, 11, 24])
    (through_cache,) = torch.autograd.grad(pieces.square().sum(), x)
    padded = F.pad(x, (0, 0, 5, 0))
    mask = F.pad(torch.ones(1, 24), (5, 0))
    (through_padding,) = torch.autograd.grad(layer(padded, mask)[0].square().sum(), x)
    assert errors.norm_error(through_cache, want) < 1e-10
    assert errors.norm_error(through_padding, want) < 1e-10
    assert recurrent_state(cache).requires_grad
    cache.detach_()
    assert not recurrent_state(cache).requires_grad


def test_a_copied_layer_is_independent() -> None:
    layer = make_layer()
    other = copy.deepcopy(layer)
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    assert torch.equal(layer(x)[0], other(x)[0])
    assert other.A_log is not layer.A_log


@pytest.mark.parametrize("call", ["dense", "packed", "masked"])
def test_compiles_without_graph_breaks(call: str) -> None:
    layer = make_layer(torch.float32)
    x = torch.randn(2, 20, 32) if call != "packed" else torch.randn(1, 40, 32)
    options: dict[str, Tensor] = {}
    if call == "packed":
        options["cu_seqlens"] = torch.tensor([0, 13, 13, 37])
    if call == "masked":
        options["attention_mask"] = torch.arange(20)[None] >= torch.tensor([[0], [7]])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got, want = compiled(x, **options)[0], layer(x, **options)[0]
    assert errors.norm_error(got, want) < 1e-5
    got.sum().backward()
    assert layer.q_proj.weight.grad is not None
    assert bool(torch.isfinite(layer.q_proj.weight.grad).all())


# --- Errors -------------------------------------------------------------------------------------

BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 0}, r"hidden_size: expected at least 1, got 0"),
    ({"num_heads": 0}, r"num_heads: expected at least 1, got 0"),
    ({"conv_size": 0}, r"conv_size: expected at least 1, got 0"),
    ({"head_dim": 257}, r"head_dim: expected at most 256, got 257"),
    ({"num_v_heads": 3}, r"num_v_heads: expected a multiple of num_heads=2, got 3"),
    ({"num_v_heads": 1}, r"num_v_heads: expected a multiple of num_heads=2, got 1"),
    ({"expand_v": 1.03}, r"expand_v: expected head_dim \* expand_v to be a whole number"),
    ({"expand_v": math.inf}, r"expand_v: .* in 1\.\.256, got 16 \* inf"),
    ({"expand_v": math.nan}, r"expand_v: .* in 1\.\.256, got 16 \* nan"),
    ({"expand_v": 17}, r"expand_v: .* in 1\.\.256, got 16 \* 17"),
    ({"mode": "parallel"}, r"mode: expected 'chunk' or 'fused_recurrent', got 'parallel'"),
    ({"lower_bound": -6.0}, r"lower_bound: expected None or a value in \[-5, 0\), got -6\.0"),
    ({"lower_bound": 0.0}, r"lower_bound: expected None or a value in \[-5, 0\), got 0\.0"),
    ({"lower_bound": math.nan}, r"lower_bound: .* got nan"),
    ({"safe_gate": True}, r"lower_bound: expected a value in \[-5, 0\) with safe_gate, got None"),
]


@pytest.mark.parametrize(("options", "message"), BAD_CONFIGS)
def test_bad_configurations(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_layer(**options)


@pytest.mark.parametrize("name", ["expand_v", "lower_bound"])
@pytest.mark.parametrize("x", ["x", True, [1.0]], ids=str)
def test_configurations_of_another_kind(name: str, x: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name}: expected a float, got"):
        make_layer(**{name: x})


X = torch.zeros(2, 5, 32, dtype=torch.float64)
BAD_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"hidden_states": X[0]}, ValueError, r"hidden_states: expected \[B, T, 32\], got \(5, 32\)"),
    ({"hidden_states": [0.0]}, TypeError, r"hidden_states: expected a torch.Tensor, got .* list"),
    ({"attention_mask": [[1] * 5] * 2}, TypeError, r"attention_mask: expected a torch.Tensor"),
    ({"cu_seqlens": [0, 5]}, TypeError, r"cu_seqlens: expected a torch.Tensor, got .* list"),
    ({"use_cache": "yes"}, TypeError, r"^use_cache: expected a bool, got 'yes'"),
    ({"hidden_states": X[..., :31]}, ValueError, r"hidden_states: .* got \(2, 5, 31\)"),
    ({"output_attentions": True}, NotImplementedError, r"output_attentions: expected False"),
    ({"past_key_values": object()}, TypeError, r"past_key_values: expected a KDACache or None"),
    ({"attention_mask": X[..., 0, None]}, ValueError, r"attention_mask: expected \[2, 5\]"),
    ({"attention_mask": X[:1, :, 0]}, ValueError, r"attention_mask: .* got \[1, 5\]"),
    ({"attention_mask": X[:, :4, 0]}, ValueError, r"attention_mask: .* got \[2, 4\]"),
    ({"attention_mask": X[..., 0] - 1}, ValueError, r"attention_mask: expected 0 for padding"),
    (
        {"cu_seqlens": torch.tensor([0, 5])},
        ValueError,
        r"hidden_states: expected a batch of 1 with cu_seqlens, got a batch of 2",
    ),
    (
        {"cu_seqlens": torch.tensor([0, 5]), "attention_mask": X[..., 0]},
        ValueError,
        r"attention_mask: expected None with cu_seqlens",
    ),
    ({"cu_seqlens": torch.tensor([0.0, 5.0])}, TypeError, r"cu_seqlens: expected int32 or int64"),
    ({"cu_seqlens": torch.tensor([0])}, ValueError, r"cu_seqlens: expected \[N \+ 1\]"),
    ({"cu_seqlens": torch.tensor([[0, 5]])}, ValueError, r"cu_seqlens: expected \[N \+ 1\]"),
]


@pytest.mark.parametrize(("options", "kind", "message"), BAD_CALLS)
def test_bad_calls(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make_layer()(**({"hidden_states": X} | options))


@pytest.mark.parametrize("ends", [[1, 5], [0, 4, 3], [0, 6], [0, -1, 5]])
def test_bad_boundaries(ends: list[int]) -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens: expected"):
        make_layer()(X[:1], cu_seqlens=torch.tensor(ends))


def test_bad_caches() -> None:
    layer = make_layer()
    _, _, cache = layer(X, use_cache=True)
    with pytest.raises(ValueError, match=r"past_key_values: expected states of 1 sequences, got 2"):
        layer(X[:1], past_key_values=cache)
    with pytest.raises(ValueError, match=r"attention_mask: expected \[2, 5\] or \[2, 10\]"):
        layer(X, attention_mask=torch.ones(2, 9), past_key_values=cache)
    for options in ({"use_cache": True}, {"past_key_values": cache}):
        with pytest.raises(ValueError, match=r"layer_idx: expected an int"):
            make_layer(layer_idx=None)(X, **options)
