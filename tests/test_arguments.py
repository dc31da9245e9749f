"""The argument contract: what is wrong is named, and a refused call has touched nothing."""

from __future__ import annotations

import inspect
from typing import Any

import oracle
import pytest
import torch
from calls import unmodified
from cases import KdaCase
from errors import FLOAT64, check_pair
from refusals import (
    META,
    NAN,
    Bad,
    Change,
    N,
    Ty,
    V,
    away,
    cast,
    cut,
    flat,
    grow,
    put,
    refused,
    table,
)

import flashkda


def base() -> dict[str, Any]:
    return KdaCase(T=6, B=2, H=2, HV=4, K=8, V=12, dtype=torch.float32).make()


def packed() -> dict[str, Any]:
    return KdaCase(lengths=(4, 0, 2), H=2, HV=4, K=8, V=12, dtype=torch.float32).make()


def negated(x: torch.Tensor) -> torch.Tensor:
    """A view whose values are those in memory with the sign turned."""
    return torch.complex(x, x).conj().imag


def tracked_q(call: dict[str, Any]) -> dict[str, Any]:
    return {"q": call["q"].clone().requires_grad_()}


def sparse(name: str) -> Change:
    return lambda call: {name: call[name].to_sparse()}


INPUTS = ("q", "k", "v", "g", "beta")

COMMON: list[Bad] = [
    # shapes
    *((f"{x}_ndim", V, x, flat(x)) for x in ("q", "k", "v", "g", "beta", "initial_state")),
    ("k_batch", V, "k", cut("k", 0)),
    ("k_tokens", V, "k", cut("k", 1)),
    ("k_heads", V, "k", cut("k", 2)),
    ("k_channels", V, "k", cut("k", 3)),
    ("v_batch", V, "v", cut("v", 0)),
    ("v_tokens", V, "v", cut("v", 1)),
    ("v_heads_not_a_multiple", V, "v", cut("v", 2)),
    *((f"g_dim{d}", V, "g", cut("g", d)) for d in range(4)),
    ("g_of_q_heads", V, "g", lambda c: {"g": c["g"][:, :, :2]}),
    ("g_without_channels", V, "g", lambda c: {"g": c["g"][..., 0]}),
    *((f"beta_dim{d}", V, "beta", cut("beta", d)) for d in range(3)),
    ("beta_of_q_heads", V, "beta", lambda c: {"beta": c["beta"][:, :, :2]}),
    ("beta_with_channels", V, "beta", lambda c: {"beta": c["beta"][..., None]}),
    ("K_over_256", V, "q", lambda c: {x: torch.zeros(2, 6, 2, 257) for x in ("q", "k")}),
    ("K_zero", V, "q", lambda c: {x: torch.zeros(2, 6, 2, 0) for x in ("q", "k")}),
    ("V_over_256", V, "v", put(v=torch.zeros(2, 6, 4, 257))),
    ("V_zero", V, "v", put(v=torch.zeros(2, 6, 4, 0))),
    # kinds and dtypes
    *((f"{x}_missing", Ty, x, put(**{x: None})) for x in ("q", "k", "v", "g", "beta")),
    *((f"{x}_list", Ty, x, put(**{x: [1.0]})) for x in ("q", "k", "v", "g", "beta")),
    *((f"{x}_sparse", Ty, x, sparse(x)) for x in (*INPUTS, "A_log", "dt_bias", "initial_state")),
    *((f"{x}_int", Ty, x, cast(x, torch.int32)) for x in ("q", "k", "v", "g", "beta")),
    *((f"{x}_complex", Ty, x, cast(x, torch.complex64)) for x in ("q", "k", "v", "g", "beta")),
    ("k_dtype_of_its_own", Ty, "k", cast("k", torch.bfloat16)),
    ("v_dtype_of_its_own", Ty, "v", cast("v", torch.float16)),
    ("g_float64_alone", Ty, "g", cast("g", torch.float64)),
    ("beta_float64_alone", Ty, "beta", cast("beta", torch.float64)),
    ("state_float16", Ty, "initial_state", cast("initial_state", torch.float16)),
    ("state_int", Ty, "initial_state", cast("initial_state", torch.int64)),
    ("state_float64_alone", Ty, "initial_state", cast("initial_state", torch.float64)),
    ("state_list", Ty, "initial_state", put(initial_state=[0.0])),
    ("A_log_int", Ty, "A_log", cast("A_log", torch.int32)),
    ("dt_bias_int", Ty, "dt_bias", cast("dt_bias", torch.int32)),
    ("scale_text", Ty, "scale", put(scale="0.1")),
    ("lower_bound_text", Ty, "lower_bound", put(lower_bound="-5")),
    ("cu_seqlens_list", Ty, "cu_seqlens", put(cu_seqlens=[0, 6])),
    ("backend_number", Ty, "backend", put(backend=3)),
    *(
        (f"{x}_not_bool", Ty, x, put(**{x: "yes"}))
        for x in (
            "output_final_state",
            "use_qk_l2norm_in_kernel",
            "use_gate_in_kernel",
            "use_beta_sigmoid_in_kernel",
            "allow_neg_eigval",
            "state_v_first",
        )
    ),
    # devices
    *(
        (f"{x}_elsewhere", V, x, away(x))
        for x in ("k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    ),
    # parameters
    ("A_log_size", V, "A_log", cut("A_log", 0)),
    ("A_log_of_q_heads", V, "A_log", lambda c: {"A_log": c["A_log"][:2]}),
    ("dt_bias_heads", V, "dt_bias", cut("dt_bias", 0)),
    ("dt_bias_channels", V, "dt_bias", cut("dt_bias", 1)),
    ("dt_bias_per_head", V, "dt_bias", lambda c: {"dt_bias": c["dt_bias"][:, 0]}),
    ("dt_bias_flat_size", V, "dt_bias", lambda c: {"dt_bias": c["dt_bias"].flatten()[:-1]}),
    ("A_log_without_gate", V, "A_log", put(use_gate_in_kernel=False, dt_bias=None)),
    ("dt_bias_without_gate", V, "dt_bias", put(use_gate_in_kernel=False, A_log=None)),
    ("softplus_without_A_log", V, "A_log", put(lower_bound=None, A_log=None)),
    # ranges
    *(
        (f"lower_bound_{x}", V, "lower_bound", put(lower_bound=x))
        for x in (-10.0, -5.001, 0.0, 1.0, NAN, float("-inf"))
    ),
    *((f"scale_{x}", V, "scale", put(scale=x)) for x in (NAN, float("inf"))),
    *(
        (f"{x}_{text}", V, x, put(**{x: value}))
        for x in ("scale", "lower_bound")
        for text, value in (("huge", 10**400), ("too_long_to_print", -(10**5000)))
    ),
    (
        "neg_eigval_without_sigmoid",
        V,
        "allow_neg_eigval",
        put(allow_neg_eigval=True, use_beta_sigmoid_in_kernel=False),
    ),
    # states
    ("state_count", V, "initial_state", grow("initial_state", 0)),
    ("state_heads", V, "initial_state", cut("initial_state", 1)),
    ("state_K", V, "initial_state", cut("initial_state", 2)),
    ("state_V", V, "initial_state", cut("initial_state", 3)),
    ("state_in_the_other_layout", V, "initial_state", put(state_v_first=True)),
    # varlen
    ("cu_seqlens_with_a_batch", V, "q", put(cu_seqlens=torch.tensor([0, 6]))),
    # out
    ("out_shape", V, "out", put(out=torch.zeros(2, 6, 4, 8))),
    ("out_dtype", Ty, "out", put(out=torch.zeros(2, 6, 4, 12, dtype=torch.bfloat16))),
    ("out_elsewhere", V, "out", put(out=torch.zeros(2, 6, 4, 12, device=META))),
    ("out_list", Ty, "out", put(out=[0.0])),
    ("out_sparse", Ty, "out", put(out=torch.zeros(2, 6, 4, 12).to_sparse())),
    ("out_negated", V, "out", put(out=negated(torch.zeros(2, 6, 4, 12)))),
    (
        "state_negated",
        V,
        "initial_state",
        lambda c: {"initial_state": negated(c["initial_state"]), "inplace_final_state": True},
    ),
    ("out_requires_grad", V, "out", put(out=torch.zeros(2, 6, 4, 12, requires_grad=True))),
    ("out_overlaps_itself", V, "out", put(out=torch.zeros(1, 1, 1, 12).expand(2, 6, 4, 12))),
    (
        "out_rows_overlap",
        V,
        "out",
        put(out=torch.zeros(700).as_strided((2, 6, 4, 12), (288, 40, 12, 1))),
    ),
    # backends
    ("backend_unknown", V, "backend", put(backend="triton")),
]

PACKED: list[Bad] = [
    ("state_count", V, "initial_state", cut("initial_state", 0)),
    ("two_dimensional", V, "cu_seqlens", put(cu_seqlens=torch.tensor([[0, 4, 4, 6]]))),
    ("scalar", V, "cu_seqlens", put(cu_seqlens=torch.tensor(6))),
    ("empty", V, "cu_seqlens", put(cu_seqlens=torch.tensor([], dtype=torch.int64))),
    ("float", Ty, "cu_seqlens", put(cu_seqlens=torch.tensor([0.0, 4.0, 4.0, 6.0]))),
    ("int16", Ty, "cu_seqlens", cast("cu_seqlens", torch.int16)),
    ("sparse", Ty, "cu_seqlens", sparse("cu_seqlens")),
    ("not_from_zero", V, "cu_seqlens", put(cu_seqlens=torch.tensor([1, 4, 4, 6]))),
    ("negative", V, "cu_seqlens", put(cu_seqlens=torch.tensor([-1, 4, 4, 6]))),
    ("decreasing", V, "cu_seqlens", put(cu_seqlens=torch.tensor([0, 5, 4, 6]))),
    ("past_the_end", V, "cu_seqlens", put(cu_seqlens=torch.tensor([0, 4, 4, 7]))),
    ("elsewhere", V, "cu_seqlens", away("cu_seqlens")),
]

CHUNK_ONLY: list[Bad] = [
    ("safe_gate_without_bound", V, "safe_gate", put(safe_gate=True, lower_bound=None)),
    ("out_under_autograd", V, "out", lambda c: tracked_q(c) | {"out": torch.zeros_like(c["v"])}),
    ("host_copy_alone", V, "cu_seqlens_cpu", put(cu_seqlens_cpu=torch.tensor([0, 6]))),
    ("max_num_seqs_text", Ty, "max_num_seqs", put(use_graph=True, max_num_seqs="2")),
    *(
        (f"{x}_not_bool", Ty, x, put(**{x: 1}))
        for x in ("safe_gate", "disable_recompute", "return_intermediate_states", "use_graph")
    ),
    ("cp_context", N, "cp_context", put(cp_context=object())),
    ("intermediate_states", N, "return_intermediate_states", put(return_intermediate_states=True)),
    ("chunk_size", V, "chunk_size", put(chunk_size=48)),
    ("chunk_size_text", Ty, "chunk_size", put(chunk_size="64")),
]

CHUNK_PACKED: list[Bad] = [
    ("max_num_seqs", V, "max_num_seqs", put(use_graph=True, max_num_seqs=2)),
    ("host_copy_size", V, "cu_seqlens_cpu", put(cu_seqlens_cpu=torch.tensor([0, 6]))),
    ("host_copy_float", Ty, "cu_seqlens_cpu", put(cu_seqlens_cpu=torch.tensor([0.0, 4, 4, 6]))),
    (
        "host_copy_elsewhere",
        V,
        "cu_seqlens_cpu",
        put(cu_seqlens_cpu=torch.zeros(4, dtype=torch.int64, device=META)),
    ),
    ("host_copy_differs", V, "cu_seqlens_cpu", put(cu_seqlens_cpu=torch.tensor([0, 3, 3, 6]))),
]


both = pytest.mark.parametrize(
    "function", [flashkda.chunk_kda, flashkda.fused_recurrent_kda], ids=["chunk", "recurrent"]
)


@both
@table(COMMON)
def test_refused(function: Any, error: type[Exception], name: str, change: Change) -> None:
    call = base()
    refused(function, call | change(call), error, name)


@both
@table(PACKED)
def test_refused_varlen(function: Any, error: type[Exception], name: str, change: Change) -> None:
    call = packed()
    refused(function, call | change(call), error, name)


@table(CHUNK_ONLY)
def test_refused_by_chunk(error: type[Exception], name: str, change: Change) -> None:
    call = base()
    refused(flashkda.chunk_kda, call | change(call), error, name)


@table(CHUNK_PACKED)
def test_refused_by_chunk_varlen(error: type[Exception], name: str, change: Change) -> None:
    call = packed()
    refused(flashkda.chunk_kda, call | change(call), error, name)


@both
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused(function: Any, layout: torch.layout) -> None:
    """Rows of different lengths, of which not even a shape can be asked."""
    for name in INPUTS:
        call = base()
        rows = [call[name][0], call[name][1, :3]]
        call[name] = torch.nested.as_nested_tensor(rows, layout=layout)
        with pytest.raises(TypeError, match=f"^{name}: expected a dense .*, got a nested one"):
            function(**call)


def test_messages_show_what_was_expected_and_what_came() -> None:
    call = base()
    call["dt_bias"] = call["dt_bias"][:, 0]
    message = refused(flashkda.chunk_kda, call, ValueError, "dt_bias")
    assert "32" in message  # four heads of eight channels, flat as what came
    assert "[4]" in message
    call = base() | {"lower_bound": -10.0}
    message = refused(flashkda.chunk_kda, call, ValueError, "lower_bound")
    assert "-5" in message
    assert "-10" in message


def test_forced_cuda_on_cpu_says_why() -> None:
    call = base()
    with unmodified(call), pytest.raises(RuntimeError, match=r"backend.*cuda") as caught:
        flashkda.chunk_kda(**call, backend="cuda")
    assert flashkda.backend("cpu").reason in str(caught.value) or "cpu" in str(caught.value)


# --- decode ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"])
def test_gradient_through_decode_points_to_chunk(name: str) -> None:
    call = base()
    call[name] = call[name].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="chunk_kda"):
        flashkda.fused_recurrent_kda(**call)
    with torch.no_grad():
        o, _ = flashkda.fused_recurrent_kda(**call)
    assert not o.requires_grad


def test_in_place_state_without_a_state() -> None:
    call = base() | {"initial_state": None, "inplace_final_state": True}
    refused(flashkda.fused_recurrent_kda, call, ValueError, "initial_state")


# --- fwd ------------------------------------------------------------------------------------------


def fwd_call() -> dict[str, Any]:
    case = KdaCase(T=6, B=2, H=2, K=8, V=12, dtype=torch.float32, state_v_first=True)
    call = case.make()
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "lower_bound", "initial_state")
    return {x: call[x] for x in names} | {
        "scale": 0.3,
        "out": torch.zeros_like(call["v"]),
        "final_state": torch.zeros_like(call["initial_state"]),
    }


FWD: list[Bad] = [
    ("under_autograd", V, "out", tracked_q),
    ("out_is_bfloat16", Ty, "out", cast("out", torch.bfloat16)),
    ("out_missing", Ty, "out", put(out=None)),
    ("out_shape", V, "out", cut("out", 1)),
    ("out_requires_grad", V, "out", put(out=torch.zeros(2, 6, 2, 12, requires_grad=True))),
    ("final_shape", V, "final_state", cut("final_state", 0)),
    ("final_other_layout", V, "final_state", put(final_state=torch.zeros(2, 2, 8, 12))),
    ("final_dtype", Ty, "final_state", cast("final_state", torch.float16)),
    (
        "final_requires_grad",
        V,
        "final_state",
        put(final_state=torch.zeros(2, 2, 12, 8, requires_grad=True)),
    ),
    ("initial_other_layout", V, "initial_state", put(initial_state=torch.zeros(2, 2, 8, 12))),
    ("out_negated", V, "out", lambda c: {"out": negated(c["out"])}),
    ("final_negated", V, "final_state", lambda c: {"final_state": negated(c["final_state"])}),
    ("lower_bound", V, "lower_bound", put(lower_bound=-10.0)),
    ("dt_bias_per_head", V, "dt_bias", lambda c: {"dt_bias": c["dt_bias"][:, 0]}),
    ("beta", V, "beta", cut("beta", 2)),
]


@table(FWD)
def test_refused_fwd(error: type[Exception], name: str, change: Change) -> None:
    call = fwd_call()
    refused(flashkda.fwd, call | change(call), error, name)


@pytest.mark.parametrize(
    ("arguments", "name"), [((-1, 2), "T_total"), ((8, -1), "H"), ((8, 2, -1), "N")], ids=str
)
def test_workspace_size_of_nonsense(arguments: tuple[int, ...], name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        flashkda.get_workspace_size(*arguments)


# --- the keywords of fla-core 0.6.0 ---------------------------------------------------------------

FLA_CHUNK = {
    "scale": None,
    "initial_state": None,
    "output_final_state": False,
    "use_qk_l2norm_in_kernel": False,
    "use_gate_in_kernel": False,
    "use_beta_sigmoid_in_kernel": False,
    "allow_neg_eigval": False,
    "safe_gate": False,
    "lower_bound": None,
    "disable_recompute": False,
    "return_intermediate_states": False,
    "state_v_first": False,
    "cu_seqlens": None,
    "cu_seqlens_cpu": None,
    "cp_context": None,
    "use_graph": False,
    "max_num_seqs": None,
}
FLA_RECURRENT = {
    "A_log": None,
    "dt_bias": None,
    "scale": None,
    "initial_state": None,
    "output_final_state": False,
    "use_qk_l2norm_in_kernel": False,
    "use_gate_in_kernel": False,
    "use_beta_sigmoid_in_kernel": False,
    "allow_neg_eigval": False,
    "lower_bound": None,
    "state_v_first": False,
    "cu_seqlens": None,
}


@pytest.mark.parametrize(
    ("function", "expected"),
    [(flashkda.chunk_kda, FLA_CHUNK), (flashkda.fused_recurrent_kda, FLA_RECURRENT)],
    ids=["chunk", "recurrent"],
)
def test_signature_is_that_of_fla(function: Any, expected: dict[str, Any]) -> None:
    """Names, order and defaults: positional calls written for fla-core 0.6.0 mean the same here."""
    parameters = list(inspect.signature(function).parameters.values())
    positional = [x for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    assert [x.name for x in positional] == ["q", "k", "v", "g", "beta", *expected]
    assert {x.name: x.default for x in positional[5:]} == expected


@both
def test_every_keyword_of_fla_at_its_default(function: Any) -> None:
    call = KdaCase(T=6, gate="log", beta="activated", l2norm=False, state=False).make()
    expected = FLA_CHUNK if function is flashkda.chunk_kda else FLA_RECURRENT
    more: dict[str, Any] = {"A_log": None, "dt_bias": None, "chunk_size": None}
    if function is flashkda.fused_recurrent_kda:
        more = {
            "inplace_final_state": False,
            "ssm_state_indices": None,
            "num_accepted_tokens": None,
            "out": None,
        }
    got = function(**(expected | call | more))
    check_pair(got, oracle.kda(**call), FLOAT64)


@both
def test_deprecated_layout_keyword(function: Any) -> None:
    call = KdaCase(T=6, K=8, V=12, state_v_first=True).make()
    want = oracle.kda(**call)
    del call["state_v_first"]
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        got = function(**call, transpose_state_layout=True)
    check_pair(got, want, FLOAT64)


@both
def test_deprecated_layout_keyword_set_to_false(function: Any) -> None:
    call = KdaCase(T=6, K=8, V=12).make()
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        got = function(**call, transpose_state_layout=False)
    check_pair(got, oracle.kda(**call), FLOAT64)


@both
def test_both_spellings_of_the_layout(function: Any) -> None:
    call = KdaCase(T=6, K=8, V=12, state_v_first=True).make()
    with (
        pytest.warns(DeprecationWarning, match="state_v_first"),
        pytest.raises(ValueError, match=r"^transpose_state_layout: expected .*, got "),
    ):
        function(**call, transpose_state_layout=True)


def test_graph_hints_are_accepted() -> None:
    """Graph mode pads `cu_seqlens` with empty sequences up to `max_num_seqs`."""
    call = KdaCase(lengths=(4, 2, 0, 0)).make()
    got = flashkda.chunk_kda(**call, use_graph=True, max_num_seqs=4)
    check_pair(got, oracle.kda(**call), FLOAT64)


@both
def test_unknown_keywords_are_never_swallowed(function: Any) -> None:
    with pytest.raises(TypeError, match="head_first"):
        function(**base(), head_first=True)


@both
def test_lower_bound_without_the_gate_has_no_effect(function: Any) -> None:
    """As in fla, where one configuration serves gates inside and outside of the kernel."""
    call = KdaCase(T=20, gate="log").make()
    want = function(**call | {"lower_bound": None})
    got = function(**call | {"lower_bound": -0.1})
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@both
@pytest.mark.parametrize("name", [*INPUTS, "A_log", "dt_bias", "initial_state"])
def test_inputs_may_be_views_of_negatives(function: Any, name: str) -> None:
    call = base()
    want = function(**call | {name: -call[name]})
    got = function(**call | {name: negated(call[name])})
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@both
def test_accepted_calls_modify_nothing(function: Any) -> None:
    for call in (base(), packed()):
        with unmodified(call):
            function(**call)


def test_fwd_modifies_only_its_destinations() -> None:
    call = fwd_call()
    with unmodified(call, but=("out", "final_state")):
        flashkda.fwd(**call)
    assert bool((call["out"] != 0).any())
    assert bool((call["final_state"] != 0).any())
