"""The tensors that FlashKDA's callers, vLLM and SGLang pass, and what must come of them.

Shapes, strides and dtypes are recorded from the call sites of vLLM 0.33.0 (Kimi K3 at TP8: 12 heads
a GPU) and SGLang 0.5.23. Memory between the rows of a strided tensor is NaN, or a sentinel where it
must stay as it was. Nothing here knows a device: tests on the CPU and on a GPU run the same checks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import oracle
import torch
from calls import double
from cases import KdaCase
from errors import BF16, check
from pools import SENTINEL, padded_pool
from torch import Tensor

BF, F32, I32 = torch.bfloat16, torch.float32, torch.int32
D = 128
LIMIT = BF16["slow"]  # of outputs and of float32 states
BF16_STATE = 6e-3  # rounded to bfloat16 on the way out (2^-9), and on the way in

LENGTHS = (70, 16, 0, 50)
N, TOKENS = len(LENGTHS), sum(LENGTHS)


class Recorded(NamedTuple):
    """A tensor of a call site; no stride: contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None

    def hold(self, values: Tensor, device: str | torch.device) -> Tensor:
        """The values in a tensor of exactly this kind."""
        if self.stride is None:
            return values.to(device, self.dtype).reshape(self.shape).contiguous()
        size = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        fill = float("nan") if self.dtype.is_floating_point else 99
        memory = torch.full((size,), fill, dtype=self.dtype, device=device)
        view = memory.as_strided(self.shape, self.stride)
        view.copy_(values.reshape(self.shape))
        return view


def rows(heads: int, stride: int | None = None, tokens: int = TOKENS) -> Recorded:
    """``[1, tokens, heads, 128]``, dense or with another step from token to token."""
    shape = (1, tokens, heads, D)
    return Recorded(shape, BF, None if stride is None else (tokens * stride, stride, D, 1))


VLLM_HEADS = 12
# beta is a slice of a fused projection: 6288 elements from row to row at TP8.
VLLM = {
    "q": rows(VLLM_HEADS),
    "k": rows(VLLM_HEADS),
    "v": rows(VLLM_HEADS),
    "g": rows(VLLM_HEADS),
    "beta": Recorded((1, TOKENS, VLLM_HEADS), BF, (TOKENS * 6288, 6288, 1)),
    "A_log": Recorded((VLLM_HEADS,), F32),
    "dt_bias": Recorded((VLLM_HEADS, D), F32),
}
VLLM_OLD_CHECKPOINT = VLLM | {
    "A_log": Recorded((1, 1, VLLM_HEADS, 1), F32),
    "dt_bias": Recorded((VLLM_HEADS * D,), F32),
}
# q, k and v of a draft are columns of one convolution.
VLLM_DRAFT = VLLM | {x: rows(VLLM_HEADS, 3 * VLLM_HEADS * D) for x in "qkv"}
VLLM_MAX_TOKENS, VLLM_MAX_SEQS = 256, 8

SGLANG_HEADS = 6  # TP16
SGLANG = {
    "q": rows(SGLANG_HEADS, 3 * SGLANG_HEADS * D),
    "k": rows(SGLANG_HEADS, 3 * SGLANG_HEADS * D),
    "v": rows(SGLANG_HEADS, 3 * SGLANG_HEADS * D),
    "g": rows(SGLANG_HEADS),
    "beta": Recorded((1, TOKENS, SGLANG_HEADS), BF),
    "A_log": Recorded((1, 1, SGLANG_HEADS, 1), F32),
    "dt_bias": Recorded((SGLANG_HEADS * D,), F32),
}
# SGLang's flashkda choice calls flash_kda.fwd with tensors made dense.
FLASH_KDA = {
    "q": rows(SGLANG_HEADS),
    "k": rows(SGLANG_HEADS),
    "v": rows(SGLANG_HEADS),
    "g": rows(SGLANG_HEADS),
    "beta": Recorded((1, TOKENS, SGLANG_HEADS), BF),
    "A_log": Recorded((SGLANG_HEADS,), F32),
    "dt_bias": Recorded((SGLANG_HEADS, D), F32),
}

Table = dict[str, Recorded]
Call = dict[str, Any]


def for_tokens(table: Table, tokens: int) -> Table:
    """The table for another number of tokens, with the same steps between them."""
    result = dict(table)
    for name in ("q", "k", "v", "g", "beta"):
        shape, dtype, stride = table[name]
        step = None if stride is None else (tokens * stride[1], *stride[1:])
        result[name] = Recorded((1, tokens, *shape[2:]), dtype, step)
    return result


def make(table: Table, device: str | torch.device, gate: str = "slow") -> Call:
    """q, k, v, g, beta, A_log, dt_bias and lower_bound (None for a softplus gate)."""
    _, tokens, heads, _ = table["q"].shape
    case = KdaCase(T=tokens, H=heads, K=D, V=D, gate=gate, state=False)
    values = case.make()
    call: Call = {name: kind.hold(values[name], device) for name, kind in table.items()}
    return call | {"lower_bound": values.get("lower_bound")}


def reference_call(call: Call) -> Call:
    """What the oracle takes: raw inputs, V-first states."""
    flags = {f"use_{x}_in_kernel": True for x in ("gate", "qk_l2norm", "beta_sigmoid")}
    return double(call) | flags | {"state_v_first": True}


def boundaries(lengths: tuple[int, ...], device: str | torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype, device=device)


def states(
    count: int, heads: int, device: str | torch.device, dtype: torch.dtype, seed: int = 5
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, heads, D, D, generator=generator, dtype=torch.float64)
    return values.to(device, dtype)


def state_limit(dtype: torch.dtype) -> float:
    return LIMIT[1] if dtype == F32 else BF16_STATE


def check_pool(pool: Tensor, memory: Tensor, before: Tensor, written: set[int]) -> None:
    """Nothing but those slots changed, nor the memory between slots."""
    row = pool[0].numel()
    assert bool((memory[:, row:] == SENTINEL).all()), "memory between slots changed"
    others = [slot for slot in range(pool.shape[0]) if slot not in written]
    assert torch.equal(pool[others], before[others]), "another slot changed"


# --- destination passing: flash_kda.fwd and _flashkda_C.fwd --------------------------------------


def check_flash_kda(
    fwd: Callable[..., None],
    device: str | torch.device,
    *,
    state_dtype: torch.dtype = F32,
    with_state: bool = True,
    **changes: Any,
) -> None:
    """The call of SGLang's ``flashkda`` choice: ten arguments by position, int64 boundaries."""
    call = make(FLASH_KDA, device) | changes
    initial = states(N, SGLANG_HEADS, device, state_dtype) if with_state else None
    final = states(N, SGLANG_HEADS, device, state_dtype, seed=6)
    out = torch.full_like(call["v"], float("nan"))
    cu_seqlens = boundaries(LENGTHS, device, torch.int64)
    returned: Any = fwd(
        call["q"], call["k"], call["v"], call["g"], call["beta"], D**-0.5, out,
        call["A_log"], call["dt_bias"], call["lower_bound"],
        initial_state=initial, final_state=final, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    assert returned is None
    want = oracle.kda(**reference_call(call | {"initial_state": initial, "cu_seqlens": cu_seqlens}))
    check(
        {"o": out, "final_state": final},
        {"o": want[0], "final_state": want[1]},
        {"o": LIMIT[0], "final_state": state_limit(state_dtype)},
    )


def check_vllm_fwd(
    fwd: Callable[..., Any],
    get_workspace_size: Callable[[int, int, int], int],
    device: str | torch.device,
    *,
    table: Table = VLLM,
    state_dtype: torch.dtype = F32,
    with_state: bool = True,
    offsets: tuple[int, ...] | None = (64, 0, 0, 48),
) -> None:
    """The prefill of vLLM's Kimi K3, with one checkpoint for a sequence (0: none)."""
    call = make(table, device)
    out = torch.full((1, VLLM_MAX_TOKENS, VLLM_HEADS, D), SENTINEL, dtype=BF, device=device)
    finals = torch.full(
        (VLLM_MAX_SEQS, VLLM_HEADS, D, D), SENTINEL, dtype=state_dtype, device=device
    )
    kept = torch.full((N, VLLM_HEADS, D, D), SENTINEL, dtype=state_dtype, device=device)
    size = get_workspace_size(VLLM_MAX_TOKENS, VLLM_HEADS, VLLM_MAX_SEQS)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    initial = states(N, VLLM_HEADS, device, state_dtype) if with_state else None
    cu_seqlens = boundaries(LENGTHS, device, I32)
    table_of = None if offsets is None else torch.tensor(offsets, dtype=I32, device=device)
    fwd(
        call["q"], call["k"], call["v"], call["g"], call["beta"], D**-0.5, out[:, :TOKENS],
        workspace, call["A_log"], call["dt_bias"], call["lower_bound"], initial, finals[:N],
        cu_seqlens, kept, table_of,
    )  # fmt: skip
    reference = reference_call(call | {"initial_state": initial, "cu_seqlens": cu_seqlens})
    o, final = oracle.kda(**reference)
    got = {"o": out[:, :TOKENS], "final_state": finals[:N]}
    want = {"o": o, "final_state": final}
    limits = {"o": LIMIT[0], "final_state": state_limit(state_dtype)}
    taken = [n for n in range(N) if offsets is not None and offsets[n]]
    assert offsets is None or taken
    after = [(n, offsets[n]) for n in taken] if offsets is not None else []
    for (n, offset), state in zip(
        after, oracle.states_inside(**reference, after=after), strict=True
    ):
        name = f"{n}@{offset}"
        got[name], want[name], limits[name] = kept[n], state, state_limit(state_dtype)
    check(got, want, limits)
    assert bool((out[:, TOKENS:] == SENTINEL).all()), "rows past the step changed"
    assert bool((finals[N:] == SENTINEL).all()), "states past the step changed"
    others = [n for n in range(N) if n not in taken]
    assert bool((kept[others] == SENTINEL).all()), "a checkpoint that nobody asked for"


# --- vLLM: on its pool ---------------------------------------------------------------------------

BLOCKS = 9  # block 0 is the null block


def check_vllm_prefill(
    prefill: Callable[..., Tensor],
    device: str | torch.device,
    *,
    gate: str = "slow",
    state_dtype: torch.dtype = F32,
) -> None:
    """Requests with a prefix, without one, without tokens, and a pad, in a pool with gaps."""
    call = make(VLLM, device, gate)
    before = states(BLOCKS, VLLM_HEADS, device, state_dtype)
    pool, memory = padded_pool(before)
    index = torch.tensor([5, 3, 7, 0], dtype=I32, device=device)  # the last one is a pad
    has_state = torch.tensor([True, False, True, True], device=device)
    cu_seqlens = boundaries(LENGTHS, device, I32)
    o = prefill(
        **call, pool=pool, state_indices=index, cu_seqlens=cu_seqlens, has_initial_state=has_state,
        checkpoint_offsets=torch.tensor([64, 0, 0, 0], dtype=I32, device=device),
        checkpoint_indices=torch.tensor([8, 0, 0, 0], dtype=I32, device=device),
        max_seqlen=max(LENGTHS),
    )  # fmt: skip
    source = torch.where(has_state, index, 0)
    reference = reference_call(call | {"cu_seqlens": cu_seqlens})
    want_o, want_pool = oracle.kda_pool(
        **reference, pool=before, ssm_state_indices=source, final_state_indices=index, pad_slot_id=0
    )
    (inside,) = oracle.states_inside(
        **reference, after=[(0, 64)], initial_state=before[[5, 3, 7, 0]]
    )
    written = [5, 3]
    check(
        {"o": o, "states": pool[written], "checkpoint": pool[8]},
        {"o": want_o, "states": want_pool[written], "checkpoint": inside},
        {"o": LIMIT[0]} | dict.fromkeys(("states", "checkpoint"), state_limit(state_dtype)),
    )
    assert bool((o[:, -LENGTHS[3] :] == 0).all()), "outputs of a pad"
    check_pool(pool, memory, before, {*written, 8})


def packed(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(rows of q, k and v, gate logits ``[B, H * 128]``, logits ``[B, H]``) of one token each."""
    mixed = torch.cat([call[x].flatten(2)[0] for x in "qkv"], dim=1)
    return mixed, call["g"].flatten(2)[0], call["beta"][0]


def one_each(call: Call) -> Call:
    """Tokens of one row as a batch of sequences of one token."""
    return call | {x: call[x].transpose(0, 1) for x in ("q", "k", "v", "g", "beta")}


def check_packed_decode(
    decode: Callable[[tuple[Tensor, Tensor, Tensor], Call, Tensor, Tensor, Tensor], Any],
    device: str | torch.device,
    *,
    table: Table,
    pad: int,
    out_shape: tuple[int, ...] = (6, 1),
    gate: str = "slow",
    state_dtype: torch.dtype = F32,
) -> None:
    """A token for each of six rows, of which two are pads; ``decode`` makes the call."""
    batch, heads = 6, table["q"].shape[2]
    call = make(for_tokens(table, batch), device, gate)
    before = states(BLOCKS, heads, device, state_dtype)
    pool, memory = padded_pool(before)
    index = torch.tensor([3, 8, pad, 1, pad, 5], dtype=I32, device=device)
    out = torch.full((*out_shape, heads, D), float("nan"), dtype=BF, device=device)
    returned = decode(packed(call), call, pool, index, out)
    assert returned is None or returned.data_ptr() == out.data_ptr()
    o = out.reshape(batch, 1, heads, D)
    want_o, want_pool = oracle.kda_pool(
        **reference_call(one_each(call)), pool=before, ssm_state_indices=index, pad_slot_id=pad
    )
    check(
        {"o": o, "states": pool[[1, 3, 5, 8]]},
        {"o": want_o, "states": want_pool[[1, 3, 5, 8]]},
        {"o": LIMIT[0], "states": state_limit(state_dtype)},
    )
    assert bool((o[[2, 4]] == 0).all()), "outputs of pads"
    check_pool(pool, memory, before, {1, 3, 5, 8})


def check_vllm_speculative(
    decode: Callable[..., Any], device: str | torch.device, *, gate: str = "slow"
) -> None:
    """Drafts of three tokens: blocks for each token, a start after those that were accepted."""
    lengths = (4, 4, 3, 4)
    call = make(for_tokens(VLLM_DRAFT, sum(lengths)), device, gate)
    before = states(16, VLLM_HEADS, device, F32)
    pool, memory = padded_pool(before)
    index = torch.tensor(
        [[1, 2, 3, 4], [8, 7, 6, 5], [9, 10, 11, 12], [0, 0, 0, 0]], dtype=I32, device=device
    )
    accepted = torch.tensor([1, 3, 4, 1], dtype=I32, device=device)
    cu_seqlens = boundaries(lengths, device, I32)
    out = torch.full_like(call["v"], float("nan"), memory_format=torch.contiguous_format)
    decode(
        call["q"], call["k"], call["v"], call["g"], call["beta"], A_log=call["A_log"],
        dt_bias=call["dt_bias"], lower_bound=call["lower_bound"], initial_state=pool,
        cu_seqlens=cu_seqlens, ssm_state_indices=index, num_accepted_tokens=accepted, out=out,
    )  # fmt: skip
    want_o, want_pool = oracle.kda_pool(
        **reference_call(call), pool=before, ssm_state_indices=index,
        num_accepted_tokens=accepted, pad_slot_id=0, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    written = list(range(1, 12))
    check(
        {"o": out, "states": pool[written]}, {"o": want_o, "states": want_pool[written]},
        {"o": LIMIT[0], "states": LIMIT[1]},
    )  # fmt: skip
    check_pool(pool, memory, before, set(written))


# --- SGLang --------------------------------------------------------------------------------------


def check_sglang_extend(
    extend: Callable[..., Tensor],
    device: str | torch.device,
    *,
    tracking: str = "none",
    gate: str = "slow",
    state_dtype: torch.dtype = F32,
) -> None:
    """Prefill in the pool, with states for the prefix cache: ``none``, ``chunk`` or ``plan``."""
    call = make(SGLANG, device, gate)
    before = states(12, SGLANG_HEADS, device, state_dtype)
    pool, memory = padded_pool(before)
    index = torch.tensor([4, 2, 9, -1], dtype=I32, device=device)
    query_start_loc = boundaries(LENGTHS, device, I32)
    more: Call = {}
    if tracking == "chunk":
        more["track_state"] = torch.full(
            (N, SGLANG_HEADS, D, D), SENTINEL, dtype=F32, device=device
        )
        more["track_chunk_idx"] = torch.tensor([1, 0, -1, 0], dtype=I32, device=device)
    if tracking == "plan":  # two entries for sequence 0, none for 1 and 2, one for the pad
        more["state_checkpoint_cu_starts"] = torch.tensor([0, 2, 2, 2, 3], device=device)
        more["state_checkpoint_indices"] = torch.tensor([11, -1, 7], dtype=I32, device=device)
    o = extend(
        **call, ssm_states=pool, cache_indices=index, query_start_loc=query_start_loc,
        extend_seq_lens_cpu=list(LENGTHS), extend_prefix_lens=[0] * N, is_spec_decode=False, **more,
    )  # fmt: skip
    reference = reference_call(call | {"cu_seqlens": query_start_loc})
    want_o, want_pool = oracle.kda_pool(
        **reference, pool=before, ssm_state_indices=index, pad_slot_id=-1
    )
    (inside,) = oracle.states_inside(
        **reference, after=[(0, 64)], initial_state=before[[4, 2, 9, 0]]
    )
    got, want = {"o": o, "states": pool[[2, 4]]}, {"o": want_o, "states": want_pool[[2, 4]]}
    written = {2, 4}
    if tracking == "chunk":
        got["inside"], want["inside"] = more["track_state"][0], inside
        assert bool((more["track_state"][1:] == SENTINEL).all()), "a state that nobody asked for"
    if tracking == "plan":
        got["inside"], want["inside"] = pool[11], inside
        written.add(11)
    limit = state_limit(state_dtype)
    check(got, want, dict.fromkeys(got, limit) | {"o": LIMIT[0]})
    assert bool((o[:, -LENGTHS[3] :] == 0).all()), "outputs of a pad"
    check_pool(pool, memory, before, written)


def check_sglang_verify(
    verify: Callable[..., Tensor], device: str | torch.device, *, state_dtype: torch.dtype = F32
) -> None:
    """Drafts of four tokens: the pool is read, the state after each token kept elsewhere."""
    steps, requests = 4, 3
    call = make(for_tokens(SGLANG, requests * steps), device)
    before = states(8, SGLANG_HEADS, device, F32)
    pool, memory = padded_pool(before)
    index = torch.tensor([6, -1, 2], dtype=I32, device=device)
    buffer = torch.full((5, steps, SGLANG_HEADS, D, D), SENTINEL, dtype=state_dtype, device=device)
    cu_seqlens = boundaries((steps,) * requests, device, I32)
    call["a"], call["b"] = call.pop("g"), call.pop("beta")
    o = verify(
        **call, ssm_states=pool, cache_indices=index, query_start_loc=cu_seqlens,
        intermediate_states_buffer=buffer, cache_steps=steps, retrieve_parent_token=None,
        intermediate_state_indices=torch.tensor([1, 4, 0], dtype=I32, device=device),
    )  # fmt: skip
    call["g"], call["beta"] = call.pop("a"), call.pop("b")
    reference = reference_call(call | {"cu_seqlens": cu_seqlens})
    want_o, _ = oracle.kda_pool(**reference, pool=before, ssm_state_indices=index, pad_slot_id=-1)
    after = [(n, t + 1) for n in (0, 2) for t in range(steps)]
    inside = oracle.states_inside(**reference, after=after, initial_state=before[[6, 0, 2]])
    limit = state_limit(state_dtype)
    o_limit = LIMIT[0] if state_dtype == F32 else 2 * LIMIT[0]
    check(
        {"o": o, "states": torch.cat([buffer[1], buffer[0]])},
        {"o": want_o, "states": torch.stack(inside)},
        {"o": o_limit, "states": limit},
    )
    assert bool((o[:, steps : 2 * steps] == 0).all()), "outputs of a pad"
    assert bool((buffer[2:] == SENTINEL).all()), "a row of nobody's, or of a pad, changed"
    check_pool(pool, memory, before, set())
