"""The CUDA kernels seen without a GPU: their library, what they refuse, their layouts."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import KdaCase
from torch import Tensor

import flashkda
from flashkda import _backend, _diagnosis, _known, _native, _selftest, cli

HAS_LIBRARY = _native.build_info() is not None
needs_library = pytest.mark.skipif(not HAS_LIBRARY, reason="this build holds no kernels")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
BF16 = KdaCase(T=20, K=128, V=128, dtype=torch.bfloat16)


# --- the library ---------------------------------------------------------------------------------


def test_a_build_says_whether_it_holds_kernels() -> None:
    folder = Path(flashkda.__file__).parent
    assert (folder / "libflashkda_torch.so").exists() == HAS_LIBRARY


@needs_library
def test_build_info() -> None:
    info = _native.build_info()
    assert info is not None
    assert info["version"] == flashkda.__version__
    assert info["architectures"].split()
    assert int(info["cudart"].split(".")[0]) >= 12


@needs_library
def test_loads_beside_a_torch_without_cuda() -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key("flashkda::chunk_native_out", "CUDA")


@needs_library
def test_the_kernels_need_no_torch() -> None:
    """Their library is a plain C one: it loads and answers in a process without torch."""
    path = Path(flashkda.__file__).parent / "libflashkda_cuda.so"
    code = f"""
import ctypes, sys
library = ctypes.CDLL({str(path)!r})
message = ctypes.create_string_buffer(512)
library.flashkda_probe.restype = ctypes.c_char_p
print(library.flashkda_abi(), library.flashkda_probe(99, message, 512), message.value.decode())
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    abi, variant, *reason = done.stdout.split()
    assert (abi, variant) == ("3", "None"), done
    assert len(reason) >= 3


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "_variants", {})
    monkeypatch.setattr(_backend, "_served", {})


@no_gpu
@pytest.mark.usefixtures("no_cache")
def test_reasons_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = []

    def note() -> None:
        backend = flashkda.backend("cuda")
        assert backend.name == "torch"
        reasons.append(backend.reason)

    if HAS_LIBRARY:
        note()
        assert "no CUDA device" in reasons[-1]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        note()
        assert "driver" in reasons[-1]
    monkeypatch.setattr(_native, "_library", None)
    for reason in (_diagnosis.no_library(), _diagnosis.failure("why")):
        monkeypatch.setattr(_native, "_reason", reason)
        note()
        assert reasons[-1] == reason
    assert len(set(reasons)) == len(reasons)


@needs_library
def test_another_abi_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "_ABI", 0)
    library, reason = _native._load()
    assert library is None
    assert "another version" in reason


class FakeLibrary:
    """Answers a probe as the C library would."""

    def __init__(self, variant: bytes | None, text: bytes) -> None:
        self.variant, self.text, self.calls = variant, text, 0

    def flashkda_probe(self, device: int, message: Any, size: Any) -> bytes | None:
        self.calls += 1
        message.value = self.text
        return self.variant


@pytest.mark.usefixtures("no_cache")
def test_a_served_device_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    library = FakeLibrary(b"hopper", b"")
    monkeypatch.setattr(_native, "_library", library)
    for _ in range(3):
        backend = flashkda.backend("cuda:3")
        assert backend.name == "cuda"
        assert "hopper" in backend.reason
        assert "cuda:3" in backend.reason
    assert library.calls == 1


@pytest.mark.usefixtures("no_cache")
def test_a_device_that_is_not_served_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    library = FakeLibrary(None, b"compute capability 8.0 is not among those of this build (9.0)")
    monkeypatch.setattr(_native, "_library", library)
    for _ in range(2):
        assert "compute capability 8.0" in flashkda.backend("cuda:0").reason
    assert library.calls == 2


# --- what the kernels refuse ---------------------------------------------------------------------


def refusal(call: dict[str, Any], needs_grad: bool = False) -> str | None:
    return _native.refusal(
        *(call[x] for x in ("q", "v", "g", "beta")),
        call.get("cu_seqlens"),
        (call.get("initial_state"), call.get("final_state")),
        needs_grad,
    )


SERVED = {
    "bf16": BF16,
    "softplus": BF16.but(gate="softplus"),
    "log": BF16.but(gate="log", l2norm=False),
    "no state": BF16.but(state=False),
    "more value heads": BF16.but(HV=6),
    "varlen": BF16.but(T=None, lengths=(5, 0, 18), tail=2),
}


@pytest.mark.parametrize("name", SERVED)
def test_served_calls(name: str) -> None:
    assert refusal(SERVED[name].make()) is None


def test_gates_in_float32_are_served() -> None:
    call = BF16.make()
    assert refusal(call | {"g": call["g"].float(), "beta": call["beta"].float()}) is None
    assert refusal(call | {"initial_state": call["initial_state"].bfloat16()}) is None


REFUSED: dict[str, tuple[str, Any]] = {
    "dtype": ("bfloat16 q, k and v, not float32", lambda call: {"q": call["q"].float()}),
    "g": ("g in bfloat16 or float32, not float16", lambda call: {"g": call["g"].half()}),
    "beta": ("beta in bfloat16 or float32", lambda call: {"beta": call["beta"].half()}),
    "K": ("K = 64, V = 128", lambda call: {"q": call["q"][..., :64]}),
    "V": ("K = 128, V = 96", lambda call: {"v": call["v"][..., :96]}),
    "heads": (
        "65535 value heads",
        lambda call: {"v": call["v"][:, :, :1].expand(1, 20, 65536, 128)},
    ),
    "state": ("states in", lambda call: {"initial_state": call["initial_state"].double()}),
    "final": ("states in", lambda call: {"final_state": call["initial_state"].double()}),
    "tokens": ("nothing to compute", lambda call: {x: call[x][:, :0] for x in ("q", "v")}),
    "sequences": (
        "nothing to compute",
        lambda call: {"cu_seqlens": torch.zeros(1, dtype=torch.int32)},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_calls(name: str) -> None:
    expected, change = REFUSED[name]
    call = BF16.make()
    reason = refusal(call | change(call))
    assert reason is not None
    assert expected in reason


def test_gradients_are_refused() -> None:
    assert "backward" in (refusal(BF16.make(), needs_grad=True) or "")


@pytest.fixture
def served_everywhere(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The CPU plays a device that the kernels serve; returns the calls that they would get."""
    calls: list[tuple[Any, ...]] = []
    served = _backend.Backend("cuda", "the kernels of this test serve every device")
    monkeypatch.setattr(_backend, "_served", {torch.device("cpu"): served})
    monkeypatch.setattr(_native, "chunk_out", lambda *args: calls.append(args))
    monkeypatch.setattr(_known, "_options", {})
    return calls


def test_a_served_call_reaches_the_kernels(served_everywhere: list[tuple[Any, ...]]) -> None:
    call = BF16.make()
    out, state = flashkda.chunk_kda(**call, backend="cuda")
    (arguments,) = served_everywhere
    assert arguments[0] is call["q"]
    assert arguments[9] is out
    assert arguments[10] is state
    assert flashkda.explain(**call).name == "cuda"


@pytest.mark.parametrize(
    ("case", "safe_gate", "bounded"),
    [
        (BF16, False, True),
        (BF16, True, True),
        (BF16.but(gate="softplus"), False, False),
        (BF16.but(gate="log"), False, False),
        (BF16.but(gate="log"), True, True),
    ],
    ids=["bounded", "bounded-safe", "softplus", "given", "given-safe"],
)
def test_the_kernels_know_a_bounded_gate(
    served_everywhere: list[tuple[Any, ...]], case: KdaCase, safe_gate: bool, bounded: bool
) -> None:
    flashkda.chunk_kda(**case.make(), safe_gate=safe_gate)
    assert served_everywhere[0][-2:] == (bounded, None)  # gate_is_bounded, max_seqlen


def test_a_refused_call_takes_the_other_path(served_everywhere: list[tuple[Any, ...]]) -> None:
    call = BF16.make() | {"q": BF16.make()["q"].requires_grad_()}
    assert "backward" in flashkda.explain(**call).reason
    with pytest.raises(RuntimeError, match="backward"):
        flashkda.chunk_kda(**call, backend="cuda")
    flashkda.chunk_kda(**call)
    float32 = KdaCase(T=20, dtype=torch.float32).make()
    with pytest.raises(RuntimeError, match="bfloat16"):
        flashkda.chunk_kda(**float32, backend="cuda")
    flashkda.chunk_kda(**float32)
    decode = KdaCase(T=2, dtype=torch.bfloat16).make()
    with pytest.raises(RuntimeError, match="head dimensions"):
        flashkda.fused_recurrent_kda(**decode, backend="cuda")
    assert served_everywhere == []


def test_nothing_to_compute_is_nobodys_failure(
    served_everywhere: list[tuple[Any, ...]],
) -> None:
    call = BF16.but(T=0).make()
    assert "nothing to compute" in flashkda.explain(**call).reason
    o, state = flashkda.chunk_kda(**call, backend="cuda")
    assert o.shape[1] == 0
    assert state is not None
    assert torch.equal(state, call["initial_state"])
    assert served_everywhere == []


# --- layouts -------------------------------------------------------------------------------------


def rows(batch: int, tokens: int, heads: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(batch, tokens, heads, 128).to(dtype)


LAYOUTS: dict[str, tuple[Tensor, bool]] = {
    "dense": (rows(2, 8, 3), True),
    "columns of a wider row": (rows(2, 8, 9)[:, :, 3:6], True),
    "float32": (rows(1, 8, 3, torch.float32), True),
    "every second token": (rows(1, 8, 3)[:, ::2], True),
    "every second head": (rows(1, 8, 6)[:, :, ::2], False),
    "one head of many": (rows(1, 8, 6)[:, :, 2:3], True),
    "half a sequence of two": (rows(2, 8, 3)[:, :4], False),
    "half a sequence of one": (rows(1, 8, 3)[:, :4], True),
    "one token of two sequences": (rows(2, 8, 3)[:, :1], True),
    "heads before tokens": (rows(1, 3, 8).transpose(1, 2), False),
    "K before heads": (torch.randn(1, 8, 128, 3).bfloat16().transpose(2, 3), False),
    "one row for all": (rows(1, 1, 3).expand(1, 8, 3, 128), False),
    "odd address": (torch.randn(8 * 3 * 128 + 1).bfloat16()[1:].view(1, 8, 3, 128), False),
    "odd row": (torch.randn(1, 8, 3 * 128 + 4).bfloat16()[..., :384].unflatten(2, (3, 128)), False),
    "row of 16 bytes more": (
        torch.randn(1, 8, 3 * 128 + 8).bfloat16()[..., :384].unflatten(2, (3, 128)),
        True,
    ),
    "windows that overlap": (
        torch.randn(4096).bfloat16().as_strided((1, 8, 3, 128), (0, 128, 128, 1)),
        False,
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str) -> None:
    x, expected = LAYOUTS[name]
    assert _native.fits(x) is expected
    fitted = _native._fit(x)
    assert (fitted is x) is expected
    assert _native.fits(fitted)
    assert torch.equal(fitted, x)


def native(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[Any, ...]:
    """What the operator gets from a call of ``_native.chunk_out``; it writes ones."""
    given: list[tuple[Any, ...]] = []

    class Operator:
        @staticmethod
        def default(*args: Any) -> bool:
            given.append(args)
            args[9][:, :5] = 1
            if args[10] is not None:
                args[10].fill_(1)
            return True

    monkeypatch.setattr(torch.ops.flashkda, "chunk_native_out", Operator)
    call = BF16.make()
    arguments: dict[str, Any] = {
        x: call[x] for x in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
    }
    arguments |= {
        "initial_state": call["initial_state"],
        "cu_seqlens": None,
        "out": torch.zeros_like(call["v"]),
        "final_state": torch.zeros_like(call["initial_state"]),
    }
    _native.chunk_out(*(arguments | changes).values(), 0.1)
    return given[0]


def test_parameters_become_dense_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = BF16.make()["v"].shape[2]
    got = native(monkeypatch, A_log=torch.randn(2 * heads).bfloat16()[::2], dt_bias=None)
    assert got[5].dtype == torch.float32
    assert got[5].is_contiguous()
    assert got[6] is None
    assert got[-1] == 0.1


def test_out_of_another_layout_is_written_back(monkeypatch: pytest.MonkeyPatch) -> None:
    out = torch.zeros(1, 2, 20, 128).bfloat16().transpose(1, 2)
    state = torch.zeros(1, 2, 128, 128).transpose(2, 3)
    got = native(
        monkeypatch,
        out=out,
        final_state=state,
        initial_state=state,
        cu_seqlens=torch.tensor([0, 5], dtype=torch.int32),
    )
    assert got[9] is not out
    assert got[10] is not state
    assert got[7] is got[10]  # in place stays in place
    assert bool((out[:, :5] == 1).all())
    assert bool((out[:, 5:] == 0).all())
    assert bool((state == 1).all())


@pytest.mark.parametrize(
    ("beta", "kept"),
    [
        (torch.randn(2, 8, 3), True),
        (torch.randn(2, 8, 6)[:, :, ::2], True),
        (torch.randn(2, 16, 3)[:, :8], False),
        (torch.randn(2, 16, 3)[:, :1], True),
        (torch.randn(1, 3, 8).transpose(1, 2), True),
    ],
    ids=["dense", "heads", "part", "one-token", "transposed"],
)
def test_beta_keeps_its_strides(beta: Tensor, kept: bool) -> None:
    fitted = _native._fit_beta(beta)
    assert (fitted is beta) is kept
    assert torch.equal(fitted, beta)


# --- the operator --------------------------------------------------------------------------------


def test_the_operator_has_a_fake() -> None:
    call = BF16.make("meta")
    out = torch.empty_like(call["v"])
    torch.ops.flashkda.chunk_native_out(
        *(call[x] for x in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")),
        None, out, None, 0.1, -5.0, True, True, True, False, False, True,
    )  # fmt: skip


@needs_library
def test_ctypes_types_of_the_c_functions() -> None:
    assert _native._library is not None
    assert _native._library.flashkda_probe.restype is ctypes.c_char_p


# --- known calls ---------------------------------------------------------------------------------


class KnownCalls(list[tuple[Any, ...]]):
    """What the operators got from known calls; ``declines`` makes them decline."""

    declines: type[Exception] | bool = False
    last: tuple[Tensor, Tensor]

    def results(self, *args: Any) -> tuple[Tensor | None, Tensor | None]:
        if self.declines is True:
            return None, None
        if self.declines:
            raise self.declines("no")
        self.append(args)
        self.last = torch.empty_like(args[2]), torch.empty(1)
        return self.last

    def into(self, *args: Any) -> bool:
        if self.declines:
            return False
        self.append(args)
        return True


@pytest.fixture
def known(
    served_everywhere: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[Any, ...]], KnownCalls]:
    """Calls that took the checked way, and known calls."""
    calls = KnownCalls()

    class Operator:
        default = calls.results

    monkeypatch.setattr(_known, "_is_on_gpu", lambda q: type(q) is Tensor)
    monkeypatch.setattr(torch.ops.flashkda, "chunk_native", Operator)
    monkeypatch.setattr(_native, "operator", calls.into)
    return served_everywhere, calls


FORMS: dict[str, KdaCase] = SERVED | {
    "K first, bfloat16 state": BF16.but(state_dtype=torch.bfloat16, T=33),
    "V first": BF16.but(state_v_first=True),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_known_call_gives_the_kernels_the_same(
    known: tuple[list[tuple[Any, ...]], KnownCalls], name: str
) -> None:
    checked, calls = known
    call = FORMS[name].make()
    flashkda.chunk_kda(**call)
    second = flashkda.chunk_kda(**call)
    (slow,), (fast,) = checked, calls
    assert all(x is y for x, y in zip(slow[:9], fast[:9], strict=True))  # the inputs
    flags = _native.CallFlag(fast[9])
    on = [flag in flags for flag in _native.CallFlag]
    *options, has_bound, outputs, is_bounded = on[:8]
    scale, lower_bound, *switches, bounded = slow[11:-1]  # less max_seqlen
    assert (options, is_bounded, fast[10]) == (switches, bounded, scale)
    assert (fast[11] if has_bound else None) == lower_bound
    assert list(map(type, fast[9:])) == [int, float, float]
    assert outputs is call["output_final_state"]
    assert not any(on[8:])
    assert all(x is y for x, y in zip(second, calls.last, strict=True))


def test_a_known_fwd(known: tuple[list[tuple[Any, ...]], KnownCalls]) -> None:
    checked, calls = known
    call = BF16.but(state_v_first=True).make()
    order = [call[x] for x in ("q", "k", "v", "g", "beta")]
    out, state = torch.zeros_like(call["v"]), call["initial_state"]
    for _ in range(2):
        flashkda.fwd(*order, 0.3, out, call["A_log"], call["dt_bias"], -5.0, state, state)
    (slow,), (fast,) = checked, calls
    assert all(x is y for x, y in zip(slow[:11], fast[:11], strict=True))
    assert slow[11:-1] == fast[11:]


@pytest.mark.parametrize("error", [True, RuntimeError, TypeError])
def test_a_declined_call_takes_the_checked_way(
    known: tuple[list[tuple[Any, ...]], KnownCalls], error: type[Exception] | bool
) -> None:
    checked, calls = known
    call = BF16.but(state_v_first=True).make()
    order = [call[x] for x in ("q", "k", "v", "g", "beta")]
    into = (0.3, torch.zeros_like(call["v"]), call["A_log"], call["dt_bias"], -5.0)
    flashkda.chunk_kda(**call)
    flashkda.fwd(*order, *into)
    calls.declines = error
    flashkda.chunk_kda(**call)
    flashkda.fwd(*order, *into)
    assert len(checked) == 4
    assert calls == []


def test_what_flags_do_not_settle_goes_the_checked_way(
    known: tuple[list[tuple[Any, ...]], KnownCalls],
) -> None:
    call = BF16.but(lengths=(5, 15)).make()
    host = call["cu_seqlens"].cpu()
    flashkda.chunk_kda(**call, cu_seqlens_cpu=host)
    with pytest.raises(ValueError, match="cu_seqlens_cpu"):
        flashkda.chunk_kda(**call, cu_seqlens_cpu=host[:-1])
    flashkda.chunk_kda(**call, use_graph=True, max_num_seqs=2)
    with pytest.raises(ValueError, match="max_num_seqs"):
        flashkda.chunk_kda(**call | {"cu_seqlens": host[:-1]}, use_graph=True, max_num_seqs=2)
    assert known[1] == []


@pytest.mark.parametrize("which", ["out", "state"])
def test_a_known_fwd_never_overwrites_what_requires_grad(
    known: tuple[list[tuple[Any, ...]], KnownCalls], which: str
) -> None:
    call = BF16.but(state_v_first=True).make()
    order = [call[x] for x in ("q", "k", "v", "g", "beta")]
    written = {"out": torch.zeros_like(call["v"]), "state": torch.zeros(1, 2, 128, 128)}

    def fwd() -> None:
        flashkda.fwd(
            *order, 0.3, written["out"], call["A_log"], call["dt_bias"], -5.0, None,
            written["state"],
        )  # fmt: skip

    with torch.no_grad():
        fwd()
        written[which].requires_grad_()
        with pytest.raises(ValueError, match="does not require grad"):
            fwd()
    assert known[1] == []


def test_an_operator_that_raises_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*args: Any) -> bool:
        raise RuntimeError("no")

    monkeypatch.setattr(_native, "operator", raises)
    assert not _known.run_into(None, None, ())


DIFFERENT: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "a flag that is no bool": lambda call: {"use_qk_l2norm_in_kernel": 1},
    "no tensor": lambda call: {"q": None},
    "a list": lambda call: {"chunk_size": [16]},
    "a bound out of range": lambda call: {"lower_bound": -6.0},
    "a refused feature": lambda call: {"cp_context": object()},
    "an output that requires grad": lambda call: {
        "out": torch.zeros_like(call["v"]).requires_grad_()
    },
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_checks_are_not_skipped_for_other_flags(
    known: tuple[list[tuple[Any, ...]], KnownCalls], name: str
) -> None:
    call = BF16.make()
    flashkda.chunk_kda(**call)
    with torch.no_grad(), pytest.raises((TypeError, ValueError, NotImplementedError)):
        flashkda.chunk_kda(**(call | DIFFERENT[name](call)))
    assert known[1] == []


def test_gradients_are_not_lost_in_a_known_call(
    known: tuple[list[tuple[Any, ...]], KnownCalls],
) -> None:
    call = BF16.make()
    flashkda.chunk_kda(**call)
    with pytest.raises(RuntimeError, match="backward"):
        flashkda.chunk_kda(**(call | {"v": call["v"].requires_grad_()}), backend="cuda")
    with torch.no_grad():
        flashkda.chunk_kda(**call)
    assert len(known[1]) == 1


def test_known_flags_are_bounded(
    known: tuple[list[tuple[Any, ...]], KnownCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_known, "_MAX_REMEMBERED", 3)
    for step in range(1, 9):
        flashkda.chunk_kda(**(BF16.make() | {"scale": float(step)}))
        assert len(_known._options) <= 3


def test_the_other_path_is_never_kept() -> None:
    before = len(_known._options)
    flashkda.chunk_kda(**BF16.make())
    flashkda.chunk_kda(**KdaCase(T=20).make())
    assert len(_known._options) == before


# --- what the commands say -----------------------------------------------------------------------


def test_doctor_says_how_the_kernels_were_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = {"version": "1.2", "architectures": "90a 100a", "cudart": "13.0", "nvcc": "13.0.88"}
    monkeypatch.setattr(_native, "build_info", lambda: info)
    assert cli.main(["doctor"]) == 0
    assert "1.2 for 90a 100a, cudart 13.0, nvcc 13.0.88" in capsys.readouterr().out
    monkeypatch.setattr(_native, "build_info", lambda: None)
    assert cli.main(["doctor"]) == 0
    assert "kernels   none" in capsys.readouterr().out


def test_selftest_covers_the_kernels_where_they_serve(
    served_everywhere: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = list(_selftest.kernel_cases())
    assert len({case.name for case in kernels}) == len(kernels)
    monkeypatch.setattr(_selftest, "cases", lambda float64: [])
    # The kernels of this test compute nothing, and the self-test must see it.
    assert cli.main(["selftest", "--device", "cpu"]) == 1
    assert len(served_everywhere) == len(kernels)
