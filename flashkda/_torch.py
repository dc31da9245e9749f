"""KDA over whole sequences in plain PyTorch: the chunk form, forward and backward, for any device.

Notation of one chunk of C tokens of one head (csrc/README.md has the derivation)::

    A = stril(diag(beta) A_kk)      T = (I + A)^-1        P = tril(A_qk)
    R = V - K_in S                  U = T (beta R)
    O = Q_in S + P U                S' = diag(whole) S + K_out^T U

S ``[K, V]`` is the state before the chunk; ``K_in`` and ``Q_in`` are rows decayed from the chunk's
start, ``K_out`` rows decayed to its end; ``A_kk`` and ``A_qk`` come from :mod:`._torch_pairs`. All
but the two lines with S is computed for every chunk of a segment at once; the loop over chunks
carries S alone. The backward pass keeps nothing but the inputs: it runs the states once more, holds
one per segment, and recomputes each segment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import _torch_activations as act
from ._torch_pairs import Decays, decayed_products, decayed_products_backward, decays_of
from ._torch_plan import Group, Segment, Sequences, plan_groups


@dataclass(frozen=True)
class Options:
    """What the tensors mean; see :func:`flashkda.chunk_kda`."""

    scale: float
    lower_bound: float | None
    gate_in_kernel: bool
    l2norm: bool
    beta_sigmoid: bool
    neg_eigval: bool
    state_v_first: bool

    @property
    def beta_maximum(self) -> float:
        return 2.0 if self.neg_eigval else 1.0


@dataclass(frozen=True)
class Inputs:
    """The tensors of a call, tokens flattened: ``[B * T, heads, ...]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    gate: act.GateParams
    options: Options

    @property
    def num_heads(self) -> int:
        return self.v.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The working precision."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32


def make_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    options: Options,
) -> Inputs:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    num_heads, key_dim = g.shape[2:]
    gate = act.GateParams(
        amplitude=None if A_log is None else A_log.to(dtype).exp().view(num_heads, 1, 1),
        bias=None if dt_bias is None else dt_bias.to(dtype).reshape(num_heads, 1, key_dim),
        lower_bound=options.lower_bound,
    )
    q, k, v, g, beta = (x.flatten(0, 1) for x in (q, k, v, g, beta))
    return Inputs(q, k, v, g, beta, gate, options)


# --- one segment ---------------------------------------------------------------------------------


def _gather(x: Tensor, segment: Segment, chunk_size: int, dtype: torch.dtype) -> Tensor:
    """Rows of ``x [B * T, heads, ...]`` as ``[chunks, heads, C, ...]``; zero past a sequence's end.

    Rows past the end are replaced, not multiplied by 0: a NaN that follows must not spread.
    """
    if segment.span is None:
        rows: Tensor = x.index_select(0, segment.rows).unflatten(0, (-1, chunk_size))
        if segment.valid is not None:
            past_end = ~segment.valid.view(*segment.valid.shape, *(1,) * (rows.dim() - 2))
            rows = rows.masked_fill(past_end, 0)
    else:
        first, stop = segment.span
        rows = x[first:stop]
        if segment.valid is not None:
            missing = segment.rows.shape[0] - rows.shape[0]
            rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
        rows = rows.unflatten(0, (-1, chunk_size))
    rows = rows.transpose(1, 2)
    return rows.new_empty(rows.shape, dtype=dtype).copy_(rows)


def _scatter(target: Tensor, segment: Segment, rows: Tensor) -> None:
    """Inverse of :func:`_gather`: writes the rows of real tokens into ``[B * T, heads, ...]``."""
    rows = rows.transpose(1, 2).flatten(0, 1)
    if segment.span is not None:
        first, stop = segment.span
        target[first:stop] = rows[: stop - first]
        return
    index = segment.rows
    if segment.valid is not None:
        keep = segment.valid.flatten().nonzero().squeeze(1)
        rows, index = rows.index_select(0, keep), index.index_select(0, keep)
    target.index_copy_(0, index, rows.to(target.dtype))


@dataclass(frozen=True)
class Activated:
    """Inputs of a segment as the equations have them, ``[chunks, HV, C, ...]``."""

    q: Tensor | None  # scaled; None where only the state is wanted
    unscaled_q: Tensor | None
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    q_inverse_norm: Tensor | None
    k_inverse_norm: Tensor | None
    gate_logits: Tensor
    beta_logits: Tensor


def activate(inputs: Inputs, segment: Segment, chunk_size: int, *, with_q: bool) -> Activated:
    options = inputs.options

    def load(x: Tensor) -> Tensor:
        return _gather(x, segment, chunk_size, inputs.dtype)

    def load_rows(x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Keys or queries, normalised; each head repeated for the value heads that share it."""
        rows, inverse_norm = load(x), None
        if options.l2norm:
            rows, inverse_norm = act.l2norm(rows)
        repeats = inputs.num_heads // rows.shape[1]
        if repeats > 1:
            rows = rows.repeat_interleave(repeats, dim=1)
        return rows, inverse_norm

    past_end = None if segment.valid is None else ~segment.valid[:, None, :]
    q, q_inverse_norm = load_rows(inputs.q) if with_q else (None, None)
    k, k_inverse_norm = load_rows(inputs.k)
    gate_logits = log_decay = load(inputs.g)
    if options.gate_in_kernel:
        log_decay = act.gate(gate_logits, inputs.gate)
        if past_end is not None:
            log_decay.masked_fill_(past_end.unsqueeze(-1), 0)
    beta_logits = beta = load(inputs.beta)
    if options.beta_sigmoid:
        beta = act.step_size(beta_logits, options.beta_maximum)
        if past_end is not None:
            beta.masked_fill_(past_end, 0)
    return Activated(
        q=None if q is None else q * options.scale,
        unscaled_q=q,
        k=k,
        v=load(inputs.v),
        log_decay=log_decay,
        beta=beta,
        q_inverse_norm=q_inverse_norm,
        k_inverse_norm=k_inverse_norm,
        gate_logits=gate_logits,
        beta_logits=beta_logits,
    )


@dataclass(frozen=True)
class Factors:
    """What the loop over chunks needs, ``[M, ...]`` with M = chunks * HV."""

    decays: Decays
    left: Tensor  # [M, C, X, K] keys, and queries where outputs are wanted
    a_kk: Tensor  # [M, C, C] below the diagonal
    a_qk: Tensor | None  # [M, C, C] up to the diagonal
    inverse: Tensor  # [M, C, C] T
    beta: Tensor  # [M, C, 1]
    k_in: Tensor  # [M, C, K]
    q_in: Tensor | None  # [M, C, K]
    k_out: Tensor  # [M, C, K]
    v: Tensor  # [M, C, V]


def factor(activated: Activated) -> Factors:
    k = activated.k.flatten(0, 1)
    q = None if activated.q is None else activated.q.flatten(0, 1)
    beta = activated.beta.flatten(0, 1).unsqueeze(-1)
    decays = decays_of(activated.log_decay.flatten(0, 1))
    left = torch.stack([k] if q is None else [k, q], dim=2)
    scores = decayed_products(left, k, decays)
    a_kk, a_qk, q_in = scores[0], None, None
    if q is not None:
        a_qk, q_in = scores[1], q * decays.from_start
        a_qk.diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1))
    identity = torch.eye(k.shape[1], dtype=k.dtype, device=k.device).expand_as(a_kk)
    inverse = torch.linalg.solve_triangular(beta * a_kk, identity, upper=False, unitriangular=True)
    return Factors(
        decays=decays,
        left=left,
        a_kk=a_kk,
        a_qk=a_qk,
        inverse=inverse,
        beta=beta,
        k_in=k * decays.from_start,
        q_in=q_in,
        k_out=k * decays.to_end,
        v=activated.v.flatten(0, 1),
    )


def _steps(segment: Segment, num_heads: int) -> list[slice]:
    """The rows of ``[M, ...]`` that belong to each step."""
    slices, first = [], 0
    for active in segment.active:
        slices.append(slice(first, first + active * num_heads))
        first += active * num_heads
    return slices


def advance(state: Tensor, f: Factors, step: slice) -> tuple[Tensor, Tensor]:
    """One step: overwrites the state ``[n, K, V]``, returns R and U, both ``[n, C, V]``."""
    residual = torch.baddbmm(f.v[step], f.k_in[step], state, alpha=-1)
    update = torch.bmm(f.inverse[step], f.beta[step] * residual)
    state.mul_(f.decays.whole[step].unsqueeze(-1))
    state.baddbmm_(f.k_out[step].transpose(1, 2), update)
    return residual, update


# --- forward -------------------------------------------------------------------------------------


def _load_state(
    initial_state: Tensor | None, group: Group, inputs: Inputs, num_values: int
) -> Tensor:
    """State of a group, ``[n * HV, K, V]`` in the working precision, a fresh tensor."""
    num_keys = inputs.k.shape[-1]
    if initial_state is None:
        rows = group.sequences.shape[0] * inputs.num_heads
        return inputs.k.new_zeros(rows, num_keys, num_values, dtype=inputs.dtype)
    state = initial_state.index_select(0, group.sequences).to(inputs.dtype).flatten(0, 1)
    return state.transpose(1, 2).contiguous() if inputs.options.state_v_first else state


def _store_state(target: Tensor, group: Group, inputs: Inputs, state: Tensor) -> None:
    if inputs.options.state_v_first:
        state = state.transpose(1, 2)
    state = state.unflatten(0, (-1, inputs.num_heads))
    target.index_copy_(0, group.sequences, state.to(target.dtype))


def forward(
    inputs: Inputs,
    sequences: Sequences,
    initial_state: Tensor | None,
    out: Tensor,
    final_state: Tensor | None,
    observe: Callable[[Group, int, Tensor], None] | None = None,
) -> None:
    """Writes ``out [B * T, HV, V]`` (rows of tokens inside a sequence) and ``final_state``.

    ``final_state`` may be ``initial_state`` itself. ``observe`` is called with the number of steps
    done and the states of a group ``[n * HV, K, V]``, before each step and after the last.
    """
    num_heads = inputs.num_heads
    for group in plan_groups(sequences, num_heads, out.device):
        state = _load_state(initial_state, group, inputs, out.shape[-1])
        steps_done = 0
        for segment in group.segments:
            f = factor(activate(inputs, segment, group.chunk_size, with_q=True))
            assert f.q_in is not None
            assert f.a_qk is not None
            outputs = torch.empty_like(f.v)
            for step in _steps(segment, num_heads):
                if observe is not None:
                    observe(group, steps_done, state)
                running = state[: step.stop - step.start]
                torch.bmm(f.q_in[step], running, out=outputs[step])
                _, update = advance(running, f, step)
                outputs[step].baddbmm_(f.a_qk[step], update)
                steps_done += 1
            _scatter(out, segment, outputs.unflatten(0, (-1, num_heads)))
        if observe is not None:
            observe(group, steps_done, state)
        if final_state is not None:
            _store_state(final_state, group, inputs, state)


# --- backward ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gradients:
    """Filled in place; the token gradients ``[B * T, heads, ...]`` must start as zeros."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None  # [HV] in the working precision, accumulated
    dt_bias: Tensor | None  # [HV, K] in the working precision, accumulated
    initial_state: Tensor | None


def _states_at_segments(inputs: Inputs, group: Group, state: Tensor) -> list[Tensor]:
    """The state before each segment (of its running sequences only); overwrites ``state``."""
    states = []
    for index, segment in enumerate(group.segments):
        states.append(state[: segment.active[0] * inputs.num_heads].clone())
        if index + 1 < len(group.segments):
            f = factor(activate(inputs, segment, group.chunk_size, with_q=False))
            for step in _steps(segment, inputs.num_heads):
                advance(state[: step.stop - step.start], f, step)
    return states


def backward(
    inputs: Inputs,
    sequences: Sequences,
    initial_state: Tensor | None,
    grad_out: Tensor,
    grad_final_state: Tensor | None,
    grads: Gradients,
) -> None:
    """Gradients of everything :func:`forward` reads, for ``grad_out [B * T, HV, V]``."""
    num_values = inputs.v.shape[-1]
    for group in plan_groups(sequences, inputs.num_heads, grad_out.device):
        states = _states_at_segments(
            inputs, group, _load_state(initial_state, group, inputs, num_values)
        )
        grad_state = _load_state(grad_final_state, group, inputs, num_values)
        for segment in reversed(group.segments):
            _segment_backward(inputs, group, segment, states.pop(), grad_out, grad_state, grads)
        if grads.initial_state is not None:
            _store_state(grads.initial_state, group, inputs, grad_state)


def _segment_backward(
    inputs: Inputs,
    group: Group,
    segment: Segment,
    state: Tensor,
    grad_out: Tensor,
    grad_state: Tensor,
    grads: Gradients,
) -> None:
    """Backward of one segment; ``grad_state`` goes from its end to its start, in place."""
    activated = activate(inputs, segment, group.chunk_size, with_q=True)
    f = factor(activated)
    assert f.q_in is not None
    assert f.a_qk is not None
    steps = _steps(segment, inputs.num_heads)
    grad_o = _gather(grad_out, segment, group.chunk_size, inputs.dtype).flatten(0, 1)

    # Forward once more: the state before each chunk, R and U.
    num_chunks, _, num_keys = f.k_in.shape
    states = state.new_empty(num_chunks, num_keys, f.v.shape[-1])
    residuals, updates = torch.empty_like(f.v), torch.empty_like(f.v)
    for step in steps:
        running = state[: step.stop - step.start]
        states[step] = running
        residuals[step], updates[step] = advance(running, f, step)

    # Then back: the gradient of the state after each chunk, and X = T^T dU.
    grad_states = torch.empty_like(states)
    x = torch.empty_like(f.v)
    grad_values = torch.empty_like(f.v)
    for step in reversed(steps):
        running = grad_state[: step.stop - step.start]
        grad_states[step] = running
        grad_update = torch.bmm(f.a_qk[step].transpose(1, 2), grad_o[step])
        grad_update.baddbmm_(f.k_out[step], running)
        x[step] = torch.bmm(f.inverse[step].transpose(1, 2), grad_update)
        grad_values[step] = f.beta[step] * x[step]
        running.mul_(f.decays.whole[step].unsqueeze(-1))
        running.baddbmm_(f.q_in[step].transpose(1, 2), grad_o[step])
        running.baddbmm_(f.k_in[step].transpose(1, 2), grad_values[step], alpha=-1)

    # The rest has no serial dependence.
    grad_a_kk = torch.bmm(x, updates.transpose(1, 2)).tril_(-1).neg_()  # of A, then of A_kk
    grad_beta = (x * residuals).sum(-1) + (grad_a_kk * f.a_kk).sum(-1)
    grad_a_kk.mul_(f.beta)
    grad_a_qk = torch.bmm(grad_o, updates.transpose(1, 2)).tril_()
    grad_q_in = torch.bmm(grad_o, states.transpose(1, 2))
    grad_k_in = torch.bmm(grad_values, states.transpose(1, 2)).neg_()
    grad_k_out = torch.bmm(updates, grad_states.transpose(1, 2))
    grad_whole = (states * grad_states).sum(-1)
    del states, grad_states

    grad_log_from_start = grad_q_in * f.q_in + grad_k_in * f.k_in
    grad_log_from_start[:, -1] += grad_whole * f.decays.whole
    grad_left, grad_k, grad_log_decay = decayed_products_backward(
        f.left,
        f.left[:, :, 0],
        f.decays,
        torch.stack([grad_a_kk, grad_a_qk]),
        grad_log_from_start,
        grad_k_out * f.k_out,
    )
    diagonal = grad_a_qk.diagonal(dim1=1, dim2=2).unsqueeze(-1)
    grad_k += grad_left[:, :, 0]
    grad_k.addcmul_(grad_k_in, f.decays.from_start).addcmul_(grad_k_out, f.decays.to_end)
    grad_k.addcmul_(diagonal, f.left[:, :, 1])
    grad_q = grad_left[:, :, 1]
    grad_q.addcmul_(grad_q_in, f.decays.from_start).addcmul_(diagonal, f.left[:, :, 0])

    _activations_backward(
        inputs,
        segment,
        activated,
        grads,
        *(
            grad.unflatten(0, (-1, inputs.num_heads))
            for grad in (grad_q, grad_k, grad_values, grad_log_decay, grad_beta)
        ),
    )


def _activations_backward(
    inputs: Inputs,
    segment: Segment,
    activated: Activated,
    grads: Gradients,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    grad_log_decay: Tensor,
    grad_beta: Tensor,
) -> None:
    """From gradients of the activated inputs ``[chunks, HV, C, ...]`` to those of the arguments."""
    options = inputs.options
    assert activated.unscaled_q is not None
    grad_q = grad_q * options.scale

    def rows_backward(grad: Tensor, rows: Tensor, inverse_norm: Tensor | None) -> Tensor:
        repeats = inputs.num_heads // inputs.k.shape[1]
        if repeats > 1:
            grad = grad.unflatten(1, (-1, repeats)).sum(2)
            rows = rows[:, ::repeats]
        return grad if inverse_norm is None else act.l2norm_backward(rows, inverse_norm, grad)

    q_backward = rows_backward(grad_q, activated.unscaled_q, activated.q_inverse_norm)
    _scatter(grads.q, segment, q_backward)
    _scatter(grads.k, segment, rows_backward(grad_k, activated.k, activated.k_inverse_norm))
    _scatter(grads.v, segment, grad_v)
    if options.gate_in_kernel:
        if segment.valid is not None:
            grad_log_decay = grad_log_decay.masked_fill(~segment.valid[:, None, :, None], 0)
        grad_log_decay, grad_A_log = act.gate_backward(
            activated.gate_logits, inputs.gate, activated.log_decay, grad_log_decay
        )
        if grads.A_log is not None:
            grads.A_log.add_(grad_A_log.sum((0, 2, 3)))
        if grads.dt_bias is not None:
            grads.dt_bias.add_(grad_log_decay.sum((0, 2)))
    _scatter(grads.g, segment, grad_log_decay)
    if options.beta_sigmoid:
        grad_beta = act.step_size_backward(activated.beta_logits, options.beta_maximum, grad_beta)
    _scatter(grads.beta, segment, grad_beta)
