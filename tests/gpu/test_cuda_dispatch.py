"""Calls that reach the CUDA kernels through the public functions: choice, layouts, streams, graphs.

The reference is the PyTorch path in float64; how exact the kernels are is tested elsewhere.
"""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import double
from cases import KdaCase
from torch import Tensor

import flashkda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

BF16 = KdaCase(T=100, H=2, K=128, V=128, dtype=torch.bfloat16)
ROUGH = 2e-2


@pytest.fixture(autouse=True)
def _kernels() -> None:
    served = flashkda.backend("cuda")
    if served.name != "cuda":
        pytest.skip(served.reason)


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def reference(call: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    inputs = double(call) | {"backend": "torch"}
    inputs.pop("out", None)
    return flashkda.chunk_kda(**inputs)


def near(got: Tensor | None, want: Tensor | None) -> bool:
    assert got is not None
    assert want is not None
    return bool((got.double() - want.double()).norm() <= ROUGH * want.double().norm())


def served(call: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """The kernels' results, twice: the first call is checked, the second is known."""
    o, state = flashkda.chunk_kda(**call, backend="cuda")
    again, state_again = flashkda.chunk_kda(**call, backend="cuda")
    assert torch.equal(o, again)
    assert (state is None) == (state_again is None)
    if state is not None and state_again is not None:
        assert torch.equal(state, state_again)
    return o, state


def test_the_kernels_are_chosen() -> None:
    call = BF16.make("cuda")
    assert flashkda.explain(**call) == flashkda.backend("cuda:0")
    o, state = flashkda.chunk_kda(**call)
    forced, forced_state = flashkda.chunk_kda(**call, backend="cuda")
    assert torch.equal(o, forced)
    assert state is not None
    assert forced_state is not None
    assert torch.equal(state, forced_state)
    want, want_state = reference(call)
    assert near(o, want)
    assert near(state, want_state)


def wide(x: Tensor) -> Tensor:
    """The same values as columns of wider rows."""
    return torch.cat([x, x], 2)[:, :, : x.shape[2]]


def misplaced(x: Tensor) -> Tensor:
    """The same values at an address that is no multiple of 16."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("change", [wide, misplaced, heads_first])
def test_layouts_do_not_change_results(change: Any) -> None:
    call = BF16.make("cuda")
    want = served(call)
    moved = call | {x: change(call[x]) for x in ("q", "k", "v", "g", "beta")}
    out = change(torch.zeros_like(call["v"]))
    got = served(moved)
    assert torch.equal(got[0], want[0])
    assert got[1] is not None
    assert want[1] is not None
    assert torch.equal(got[1], want[1])
    assert flashkda.chunk_kda(**moved, out=out, backend="cuda")[0] is out
    assert torch.equal(out, want[0])


def test_rows_past_the_end() -> None:
    call = BF16.but(lengths=(30, 0, 17), tail=9).make("cuda")
    o, _ = served(call)
    assert not o[:, 47:].any()
    out = torch.full_like(o, 3.0)
    flashkda.chunk_kda(**call, out=out, backend="cuda")
    assert torch.equal(out[:, :47], o[:, :47])
    assert bool((out[:, 47:] == 3).all())


def test_fwd_in_place() -> None:
    call = BF16.but(state_v_first=True).make("cuda")
    want, want_state = reference(call)
    order = [call[x] for x in ("q", "k", "v", "g", "beta")]
    out, state = torch.empty_like(call["v"]), call["initial_state"].clone()
    scale = 128**-0.5
    flashkda.fwd(*order, scale, out, call["A_log"], call["dt_bias"], -5.0, state, state)
    assert near(out, want)
    assert near(state, want_state)


def test_gradients_still_work() -> None:
    call = BF16.make("cuda")
    leaf = call["q"].clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        o, _ = flashkda.chunk_kda(**(call | {"q": leaf}))
    o.float().sum().backward()
    assert leaf.grad is not None
    assert bool(leaf.grad.isfinite().all())


def test_compiled() -> None:
    call = BF16.make("cuda")
    compiled = torch.compile(flashkda.chunk_kda, fullgraph=True, backend="aot_eager")
    want, want_state = served(call)
    got, state = compiled(**call)
    assert want_state is not None
    assert torch.equal(got, want)
    assert torch.equal(state, want_state)


def test_a_busy_side_stream() -> None:
    """The call waits for the stream that it is made on, and for no other."""
    call = BF16.make("cuda")
    want, _ = served(call)
    late = call | {"v": torch.zeros_like(call["v"])}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late["v"].copy_(call["v"])
        start = time.perf_counter()
        o, _ = flashkda.chunk_kda(**late, backend="cuda")
        assert time.perf_counter() - start < 0.05  # it does not wait on the host
    stream.synchronize()
    assert torch.equal(o, want)


@pytest.mark.parametrize("lengths", [None, (30, 0, 70)], ids=["dense", "packed"])
def test_a_graph_is_replayed_with_other_inputs(lengths: tuple[int, ...] | None) -> None:
    call = BF16.but(lengths=lengths).make("cuda")
    other = BF16.but(lengths=lengths, seed=1).make("cuda")
    want = served(other)
    served(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = flashkda.chunk_kda(**call, backend="cuda")
    for name, x in call.items():
        if isinstance(x, Tensor):
            x.copy_(other[name])
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(o, want[0])
    assert state is not None
    assert want[1] is not None
    assert torch.equal(state, want[1])


def test_a_spawned_process(tmp_path: Path) -> None:
    served(BF16.make("cuda"))
    code = f"""
import sys, torch
import torch.multiprocessing as mp
sys.path.insert(0, {str(Path(__file__).parents[1])!r})

def work(queue):
    import flashkda
    from cases import KdaCase
    case = KdaCase(T=100, H=2, K=128, V=128, dtype=torch.bfloat16)
    o, _ = flashkda.chunk_kda(**case.make("cuda"), backend="cuda")
    queue.put(o.float().sum().item())

if __name__ == "__main__":
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    torch.cuda.init()
    process = context.Process(target=work, args=(queue,))
    process.start()
    process.join(120)
    assert process.exitcode == 0, process.exitcode
    print(queue.get())
"""
    script = tmp_path / "spawn.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    o, _ = flashkda.chunk_kda(**BF16.make("cuda"), backend="cuda")
    assert float(done.stdout) == o.float().sum().item()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="about several devices")
def test_another_device_than_the_current_one() -> None:
    call = BF16.make("cuda:1")
    with torch.cuda.device(0):
        o, _ = served(call)
        assert torch.cuda.current_device() == 0
    assert o.device == torch.device("cuda:1")
    assert near(o, reference(call)[0])


def test_a_call_without_tokens() -> None:
    call = BF16.but(T=0).make("cuda")
    o, state = flashkda.chunk_kda(**call)
    assert o.shape[1] == 0
    assert state is not None
    assert torch.equal(state, call["initial_state"])
