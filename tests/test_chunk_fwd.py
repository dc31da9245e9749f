"""`chunk_kda` forward against the float64 token recurrence."""

from __future__ import annotations

import math
from typing import Any

import oracle
import pytest
import torch
from cases import EDGE_LENGTHS, EMPTIES, FLAGS, SHAPES, THREE_GATES, VARLEN, KdaCase, ids
from errors import BF16, FLOAT32, FLOAT64, check, check_pair, norm_error

import flashkda

ALL_GATES = ("fast", "slow", "none", "bare", "mild", "saturated", "softplus", "softplus500")
LOG_GATES = ("log", "logdeep", "mixed")

LENGTHS = [KdaCase(T=T, gate=gate, H=2) for gate in THREE_GATES for T in EDGE_LENGTHS]
UNBOUNDED = [
    KdaCase(T=T, gate=gate) for gate in ("softplus", "softplus500", "logdeep") for T in EDGE_LENGTHS
]
REPEATED = [
    KdaCase(T=300, gate=gate, keys=keys, beta_logit=9.0)
    for gate in ("none", "slow")
    for keys in ("one", "repeated4")
]
VARLENS = [VARLEN.but(gate=gate) for gate in (*ALL_GATES, *LOG_GATES)]


@pytest.mark.parametrize(
    "case", [*LENGTHS, *UNBOUNDED, *REPEATED, *SHAPES, *FLAGS, *EMPTIES, *VARLENS], ids=ids
)
def test_float64_is_exact(case: KdaCase) -> None:
    call = case.make()
    check_pair(flashkda.chunk_kda(**call), oracle.kda(**call), FLOAT64)


FLOAT32_CASES = [
    *(KdaCase(T=300, gate=gate) for gate in (*ALL_GATES, *LOG_GATES)),
    *(KdaCase(T=1000, gate=gate) for gate in (*THREE_GATES, "softplus500")),
    KdaCase(T=300, gate="none", keys="repeated4", beta_logit=9.0),
    KdaCase(T=300, gate="slow", beta="neg"),
    VARLEN.but(gate="softplus500"),
    KdaCase(T=200, K=128, V=128, H=1),
    *SHAPES,
]


@pytest.mark.parametrize("case", [x.but(dtype=torch.float32) for x in FLOAT32_CASES], ids=ids)
def test_float32(case: KdaCase, device: str) -> None:
    call = case.make(device)
    check_pair(flashkda.chunk_kda(**call, backend="torch"), oracle.kda(**call), FLOAT32)


@pytest.mark.parametrize("T", [40, 64, 200])
@pytest.mark.parametrize("at", [0, 5, 16, 33])
@pytest.mark.parametrize("size", [1e3, 1e6])
def test_float32_large_state_erased_by_one_token(T: int, at: int, size: float) -> None:
    """After the erasing token nothing of the old state is left: the error there is judged alone."""
    case = KdaCase(T=T, gate="none", dtype=torch.float32)
    call = case.make()
    call["g"][:, at] = -100.0
    call["initial_state"] *= size
    o, state = flashkda.chunk_kda(**call)
    want_o, want_state = oracle.kda(**call)
    check({"o": o, "final_state": state}, {"o": want_o, "final_state": want_state}, FLOAT32)
    check({"o after": o[:, at:]}, {"o after": want_o[:, at:]}, FLOAT32)


def test_float32_large_state_erased_through_the_softplus_gate() -> None:
    case = KdaCase(T=80, gate="softplus", dtype=torch.float32)
    call = case.make()
    call["A_log"].fill_(math.log(16))
    call["dt_bias"].zero_()
    call["g"].fill_(-12.0)
    call["g"][:, 20] = 6.25
    call["initial_state"] *= 1e3
    o, state = flashkda.chunk_kda(**call)
    want_o, want_state = oracle.kda(**call)
    check({"o": o, "final_state": state}, {"o": want_o, "final_state": want_state}, FLOAT32)
    check({"o after": o[:, 20:]}, {"o after": want_o[:, 20:]}, FLOAT32)


BF16_CASES = {
    "fast": KdaCase(gate="fast"),
    "slow": KdaCase(gate="slow"),
    "mixed": KdaCase(gate="mixed"),
    "none": KdaCase(gate="none"),
    "saturated": KdaCase(gate="saturated"),
    "repeated4": KdaCase(gate="none", keys="repeated4", beta_logit=9.0),
}


@pytest.mark.parametrize("kind", list(BF16_CASES))
@pytest.mark.parametrize("state", [True, False], ids=["state", "nostate"])
def test_bfloat16_within_budget(kind: str, state: bool, device: str) -> None:
    case = BF16_CASES[kind].but(T=1024, H=1, K=128, V=128, dtype=torch.bfloat16, state=state)
    call = case.make(device)
    got = flashkda.chunk_kda(**call, backend="torch")
    assert got[0].dtype == torch.bfloat16
    check_pair(got, oracle.kda(**call), BF16[kind])


@pytest.mark.parametrize("case", [*SHAPES, VARLEN], ids=ids)
def test_bfloat16_shapes(case: KdaCase) -> None:
    call = case.but(dtype=torch.bfloat16).make()
    check_pair(flashkda.chunk_kda(**call), oracle.kda(**call), BF16["slow"])


@pytest.mark.parametrize("gate", THREE_GATES)
def test_float16(gate: str) -> None:
    """fp16 has three more bits than bf16, so bf16's figures are upper limits."""
    call = KdaCase(T=200, gate=gate, dtype=torch.float16).make()
    got = flashkda.chunk_kda(**call)
    assert got[0].dtype == torch.float16
    check_pair(got, oracle.kda(**call), BF16[gate])


@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gates_have_their_own_dtype(dtype: torch.dtype, gate_dtype: torch.dtype) -> None:
    call = KdaCase(T=70, dtype=dtype, gate_dtype=gate_dtype).make()
    got = flashkda.chunk_kda(**call)
    assert got[0].dtype == dtype
    limit = FLOAT32 if dtype == torch.float32 else BF16["fast"]
    check_pair(got, oracle.kda(**call), limit)


def test_g_and_beta_differ_in_dtype() -> None:
    call = KdaCase(T=70, dtype=torch.float32).make()
    call["g"], call["beta"] = call["g"].bfloat16(), call["beta"].half()
    check_pair(flashkda.chunk_kda(**call), oracle.kda(**call), FLOAT32)


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "bounded"])
def test_dt_bias_flat_or_by_head(lower_bound: float | None) -> None:
    call = KdaCase(T=20, H=2, HV=4).make() | {"lower_bound": lower_bound}
    flat = call | {"dt_bias": call["dt_bias"].reshape(-1)}
    want = oracle.kda(**call)
    check_pair(flashkda.chunk_kda(**call), want, FLOAT64)
    check_pair(flashkda.chunk_kda(**flat), want, FLOAT64)


@pytest.mark.parametrize("present", [(), ("A_log",), ("dt_bias",)], ids=["neither", "A", "bias"])
def test_gate_parameters_are_optional_with_a_bound(present: tuple[str, ...]) -> None:
    call = KdaCase(T=40).make()
    for name in {"A_log", "dt_bias"} - set(present):
        del call[name]
    check_pair(flashkda.chunk_kda(**call), oracle.kda(**call), FLOAT64)


def test_softplus_without_bias() -> None:
    call = KdaCase(T=40, gate="softplus").make()
    del call["dt_bias"]
    check_pair(flashkda.chunk_kda(**call), oracle.kda(**call), FLOAT64)


@pytest.mark.parametrize("chunk_size", [32, 64])
def test_chunk_size_changes_no_value(chunk_size: int) -> None:
    call = KdaCase(T=150).make()
    got = flashkda.chunk_kda(**call, chunk_size=chunk_size)
    check_pair(got, oracle.kda(**call), FLOAT64)


@pytest.mark.parametrize(
    "keyword",
    [
        {"safe_gate": True},
        {"disable_recompute": True},
        {"use_graph": False},
        {"max_num_seqs": None},
        {"cp_context": None},
        {"return_intermediate_states": False},
        {"backend": "torch"},
    ],
    ids=lambda x: next(iter(x)),
)
def test_hints_change_no_value(keyword: dict[str, Any]) -> None:
    call = KdaCase(T=70).make()
    check_pair(flashkda.chunk_kda(**call, **keyword), oracle.kda(**call), FLOAT64)


def _strided(name: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values in unfriendly memory."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"), dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    doubled = torch.full((*x.shape[:-1], x.shape[-1], 2), float("nan"), dtype=x.dtype)
    doubled[..., 0] = x
    rows = torch.full((x.shape[0], 2 * x.shape[1], *x.shape[2:]), float("nan"), dtype=x.dtype)
    rows[:, ::2] = x
    layouts = {
        "padded": wide[..., : x.shape[-1]],
        "scattered": doubled[..., 0],
        "every_other": rows[:, ::2],
        "heads_first": x.transpose(1, 2).contiguous().transpose(1, 2),
    }
    assert all(torch.equal(y, x) for y in layouts.values()), name
    return layouts


@pytest.mark.parametrize("layout", ["padded", "scattered", "every_other", "heads_first"])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
def test_strided_inputs(name: str, layout: str) -> None:
    call = KdaCase(T=40, B=2, H=2, HV=4, K=16, V=24).make()
    want = oracle.kda(**call)
    call[name] = _strided(name, call[name])[layout]
    check_pair(flashkda.chunk_kda(**call), want, FLOAT64)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_expanded_inputs(name: str) -> None:
    """Stride 0 over tokens: one row of memory for all of them."""
    call = KdaCase(T=40).make()
    call[name] = call[name][:, :1].expand_as(call[name])
    check_pair(flashkda.chunk_kda(**call), oracle.kda(**call), FLOAT64)


def test_packed_qkv_views() -> None:
    """SGLang splits one projection into q, k, v: the row stride is three times the head's."""
    call = KdaCase(T=40, H=2).make()
    packed = torch.cat([call[x] for x in ("q", "k", "v")], dim=-1)
    views = dict(zip(("q", "k", "v"), packed.split(16, dim=-1), strict=True))
    check_pair(flashkda.chunk_kda(**(call | views)), oracle.kda(**call), FLOAT64)


def test_final_state_only_when_asked() -> None:
    call = KdaCase(T=20).make()
    o, state = flashkda.chunk_kda(**call)
    assert state is not None
    other, nothing = flashkda.chunk_kda(**(call | {"output_final_state": False}))
    assert nothing is None
    assert torch.equal(o, other)


def test_out_is_overwritten_and_returned() -> None:
    call = KdaCase(T=40, dtype=torch.float32).make()
    want, _ = flashkda.chunk_kda(**call)
    out = torch.full_like(call["v"], float("nan"))
    got, _ = flashkda.chunk_kda(**call, out=out)
    assert got.data_ptr() == out.data_ptr()
    assert torch.equal(out, want)


def test_out_may_be_strided() -> None:
    call = KdaCase(T=40, dtype=torch.float32).make()
    want, _ = flashkda.chunk_kda(**call)
    big = torch.full((1, 40, 2, 48), 7.0)
    flashkda.chunk_kda(**call, out=big[..., 16:32])
    assert torch.equal(big[..., 16:32], want)
    assert bool((big[..., :16] == 7).all())
    assert bool((big[..., 32:] == 7).all())


fwd: Any = flashkda.fwd  # called with lists of arguments


def _fwd_inputs(case: KdaCase) -> tuple[dict[str, Any], list[Any]]:
    call = case.make()
    order = [call[x] for x in ("q", "k", "v", "g", "beta")]
    order += [0.25, torch.full_like(call["v"], float("nan"))]
    return call, [*order, call["A_log"], call["dt_bias"], call["lower_bound"]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_fwd_positional(dtype: torch.dtype) -> None:
    """Moonshot's call: ten positional arguments, states [N,H,V,K], everything activated inside."""
    case = KdaCase(T=70, B=2, K=8, V=24, state_v_first=True, dtype=dtype)
    call, args = _fwd_inputs(case)
    initial = call["initial_state"]
    final = torch.full_like(initial, float("nan"))
    assert fwd(*args, initial_state=initial, final_state=final) is None
    want = oracle.kda(**(call | {"scale": 0.25}))
    limit = FLOAT64 if dtype == torch.float64 else BF16["fast"]
    check_pair((args[6], final), want, limit)


def test_fwd_without_states() -> None:
    call, args = _fwd_inputs(KdaCase(T=33, state=False))
    fwd(*args)
    assert norm_error(args[6], oracle.kda(**(call | {"scale": 0.25}))[0]) <= FLOAT64


def test_fwd_may_overwrite_its_initial_state() -> None:
    call, args = _fwd_inputs(KdaCase(T=33, state_v_first=True))
    want = oracle.kda(**(call | {"scale": 0.25}))
    state = call["initial_state"].clone()
    fwd(*args, initial_state=state, final_state=state)
    check_pair((args[6], state), want, FLOAT64)


def test_fwd_varlen_leaves_the_tail_alone() -> None:
    case = KdaCase(lengths=(20, 0, 13), tail=7, state_v_first=True)
    call, args = _fwd_inputs(case)
    args[6].fill_(7.0)
    final = torch.full_like(call["initial_state"], float("nan"))
    fwd(
        *args,
        initial_state=call["initial_state"],
        final_state=final,
        cu_seqlens=call["cu_seqlens"],
    )
    want_o, want_state = oracle.kda(**(call | {"scale": 0.25}))
    check_pair((args[6][:, :33], final), (want_o[:, :33], want_state), FLOAT64)
    assert bool((args[6][:, 33:] == 7).all())


@pytest.mark.parametrize("cut", ["channels", "tokens", "heads_first"])
def test_fwd_writes_into_any_layout(cut: str) -> None:
    _, args = _fwd_inputs(KdaCase(T=40, B=2))
    fwd(*args)
    want = args[6].clone()
    big = torch.full((2, 60, 4, 48), 7.0, dtype=torch.float64)
    if cut == "channels":
        view = big[:, :40, :2, 16:32]
    elif cut == "tokens":
        view = big[:, 10:50, 1:3, :16]
    else:
        view = big.view(2, 4, 60, 48)[:, 1:3, 3:43, :16].transpose(1, 2)
    args[6] = view
    fwd(*args)
    assert torch.equal(view, want)
    assert int((big != 7).sum()) == want.numel()


def test_get_workspace_size() -> None:
    small = flashkda.get_workspace_size(64, 2)
    large = flashkda.get_workspace_size(8192, 96, 16)
    assert isinstance(small, int)
    assert isinstance(large, int)
    assert 0 < small < large
    # Operands k, k, q of 256 bytes a token, in the dtype of the inputs, are the least of it.
    assert large > 8192 * 96 * 3 * 256
