"""vLLM's call sites on the CPU: its extension's operator, and functions on its pool."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import contracts
import pytest
import torch
from contracts import BF, F32
from torch import Tensor

import flashkda
from flashkda.integrations import vllm

NAMESPACE = "flashkda_test"


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    vllm.register(NAMESPACE)


@pytest.mark.parametrize("state_dtype", [F32, BF], ids=str)
@pytest.mark.parametrize("with_state", [True, False], ids=["state", "nostate"])
def test_fwd(state_dtype: torch.dtype, with_state: bool) -> None:
    contracts.check_vllm_fwd(
        torch.ops.flashkda_test.fwd, torch.ops.flashkda_test.get_workspace_size, "cpu",
        state_dtype=state_dtype, with_state=with_state,
    )  # fmt: skip


def test_fwd_of_an_old_checkpoint_without_offsets() -> None:
    """A_log [1, 1, H, 1]; a buffer of checkpoints that this step has no use for."""
    contracts.check_vllm_fwd(
        vllm.fwd, vllm.get_workspace_size, "cpu",
        table=contracts.VLLM_OLD_CHECKPOINT, offsets=None,
    )  # fmt: skip


def test_the_schema_is_that_of_the_extension() -> None:
    schema = str(torch.ops.flashkda_test.fwd.default._schema)
    names = [x.name for x in torch.ops.flashkda_test.fwd.default._schema.arguments]
    assert " ".join(names) == (
        "q k v g beta scale out workspace A_log dt_bias lower_bound initial_state final_state "
        "cu_seqlens checkpoint_state checkpoint_offsets"
    )
    written = [
        x.name
        for x in torch.ops.flashkda_test.fwd.default._schema.arguments
        if x.alias_info is not None and x.alias_info.is_write
    ]
    assert written == ["out", "workspace", "final_state", "checkpoint_state"]
    assert schema.endswith("-> ()")
    size = torch.ops.flashkda_test.get_workspace_size(100, 12, 8)
    assert size == flashkda.get_workspace_size(100, 12, 8)


def test_the_operator_is_traced_without_data() -> None:
    x = torch.empty(1, 8, 2, 128, dtype=BF, device="meta")
    beta, row = torch.empty(1, 8, 2, dtype=BF, device="meta"), torch.empty(2, device="meta")
    bias = torch.empty(2, 128, device="meta")
    assert torch.ops.flashkda_test.fwd(x, x, x, x, beta, 1.0, x, beta, row, bias, -5.0) is None


def test_register_in_the_namespace_of_the_extension() -> None:
    """In a process of its own: twice is once; a namespace that is taken is refused."""
    code = """
import torch
from flashkda.integrations import vllm
vllm.register()
vllm.register()
assert torch.ops._flashkda_C.get_workspace_size(16, 1, 1) > 0
library = torch.library.Library("taken", "FRAGMENT")
library.define("fwd(Tensor x) -> ()")
try:
    vllm.register("taken")
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("namespace: expected one without an operator fwd, got 'taken'")


def test_a_workspace_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="workspace: expected at least"):
        contracts.check_vllm_fwd(vllm.fwd, lambda *_: 16, "cpu")


@pytest.mark.parametrize("gate", ["slow", "softplus"])
@pytest.mark.parametrize("state_dtype", [F32, BF], ids=str)
def test_prefill(gate: str, state_dtype: torch.dtype) -> None:
    contracts.check_vllm_prefill(vllm.prefill, "cpu", gate=gate, state_dtype=state_dtype)


def test_prefill_wants_both_tables_of_checkpoints() -> None:
    call = contracts.make(contracts.VLLM, "cpu")
    index = torch.zeros(contracts.N, dtype=torch.int32)
    with pytest.raises(ValueError, match="checkpoint_offsets: expected checkpoint_indices"):
        vllm.prefill(
            **call, pool=torch.zeros(1, 12, 128, 128), state_indices=index,
            cu_seqlens=contracts.boundaries(contracts.LENGTHS, "cpu", torch.int32),
            checkpoint_offsets=index,
        )  # fmt: skip


def small_prefill(pool: Tensor, **more: Any) -> Tensor:
    x = torch.randn(1, 60, 1, 128).to(BF)
    call = {"state_indices": torch.tensor([2, 1]), "cu_seqlens": torch.tensor([0, 40, 60])} | more
    return vllm.prefill(
        x, x, x, x, torch.randn(1, 60, 1).to(BF), A_log=torch.zeros(1), dt_bias=None,
        lower_bound=-5.0, pool=pool, **call,
    )  # fmt: skip


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_prefill_keeps_no_checkpoint_in_the_null_block(index_dtype: torch.dtype) -> None:
    pool = torch.zeros(5, 1, 128, 128)
    small_prefill(
        pool, checkpoint_offsets=torch.full((2, 2), 16, dtype=index_dtype),
        checkpoint_indices=torch.tensor([[0, 4], [0, -1]], dtype=index_dtype),
    )  # fmt: skip
    assert [bool(x.any()) for x in pool] == [False, True, True, False, True]


def test_prefill_refuses_other_tables_of_checkpoints() -> None:
    for table, message in (([[0], [0]], "torch.Tensor, got"), (torch.zeros(2) > 0, "int32 or")):
        with pytest.raises(TypeError, match=f"^checkpoint_indices: expected .*{message}"):
            small_prefill(
                torch.zeros(5, 1, 128, 128), checkpoint_indices=table,
                checkpoint_offsets=torch.tensor([16, 16]),
            )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "kind", "message"),
    [
        ([True, False], TypeError, "a torch.Tensor, got a value of type list"),
        (torch.tensor([1, 0]), TypeError, "bool, got int64"),
        (torch.tensor([True]), ValueError, r"shape \[N\] = \[2\], got \[1\]"),
        (torch.tensor(True), ValueError, r"shape \[N\] = \[2\], got \[\]"),
        (torch.empty(2, dtype=torch.bool, device="meta"), ValueError, "on cpu .* one on meta"),
    ],
    ids=["list", "int", "one", "scalar", "device"],
)
def test_prefill_refuses_flags(flags: Any, kind: type[Exception], message: str) -> None:
    pool = torch.zeros(3, 1, 128, 128)
    with pytest.raises(kind, match=f"^has_initial_state: expected .*{message}"):
        small_prefill(pool, has_initial_state=flags)
    assert not bool(pool.any())


def test_prefill_with_flags_names_what_else_is_wrong() -> None:
    flags, pool = torch.tensor([True, False]), torch.zeros(3, 1, 128, 128)
    for name, x, kind in (
        ("pool", [], TypeError),
        ("state_indices", [2, 1], TypeError),
        ("state_indices", torch.empty(2, dtype=torch.int32, device="meta"), ValueError),
    ):
        with pytest.raises(kind, match=f"^{name}: expected"):
            small_prefill(**{"pool": pool, "has_initial_state": flags, name: x})


Rows = tuple[Tensor, Tensor, Tensor]


def packed_decode(
    rows: Rows, call: contracts.Call, pool: Tensor, index: Tensor, out: Tensor
) -> Tensor:
    return vllm.packed_decode(
        *rows, call["A_log"], call["dt_bias"], call["lower_bound"], initial_state=pool,
        state_indices=index, out=out,
    )  # fmt: skip


@pytest.mark.parametrize("gate", ["slow", "softplus"])
@pytest.mark.parametrize("out_shape", [(6, 1), (1, 6), (6,)], ids=str)
def test_packed_decode(gate: str, out_shape: tuple[int, ...]) -> None:
    contracts.check_packed_decode(
        packed_decode, "cpu", table=contracts.VLLM, pad=0, out_shape=out_shape, gate=gate
    )


def test_packed_decode_without_out() -> None:
    rows = torch.randn(3, 3 * 128).to(BF), torch.randn(3, 128).to(BF), torch.randn(3, 1).to(BF)
    pool, index = torch.zeros(5, 1, 128, 128), torch.tensor([1, 4, 2])
    o = vllm.packed_decode(*rows, torch.zeros(1), None, -5.0, pool, index)
    assert o.shape == (3, 1, 1, 128)
    assert [bool(x.any()) for x in pool] == [False, True, True, False, True]


@pytest.mark.parametrize(
    ("width", "shape"),
    [(385, (5, 1, 128, 128)), (384, (1, 128, 128)), (128, (5, 1, 128, 128))],
)
def test_packed_rows_that_do_not_match_the_states(width: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="mixed_qkv: expected"):
        vllm.packed_decode(
            torch.zeros(2, width, dtype=BF), torch.zeros(2, 128, dtype=BF),
            torch.zeros(2, 1, dtype=BF), torch.zeros(1), None, -5.0,
            torch.zeros(shape), torch.tensor([1, 2]),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "shape"),
    [("raw_g", (256, 3)), ("raw_g", (1, 768)), ("raw_g", (3, 255)), ("raw_beta", (2, 3))],
)
def test_packed_decode_wants_gates_of_its_rows(name: str, shape: tuple[int, ...]) -> None:
    """As many elements in another shape would be other rows' gates."""
    call = {"raw_g": torch.randn(3, 256).to(BF), "raw_beta": torch.randn(3, 2).to(BF)}
    call[name] = torch.randn(shape).to(BF)
    with pytest.raises(ValueError, match=rf"^{name}: expected shape \[3, 2.*, got "):
        vllm.packed_decode(
            torch.randn(3, 6 * 128).to(BF), **call, A_log=torch.zeros(2), dt_bias=None,
            lower_bound=-5.0, initial_state=torch.zeros(5, 2, 128, 128),
            state_indices=torch.tensor([1, 4, 2]),
        )  # fmt: skip


@pytest.mark.parametrize("gate", ["slow", "softplus"])
def test_speculative_decode(gate: str) -> None:
    contracts.check_vllm_speculative(vllm.speculative_decode, "cpu", gate=gate)
