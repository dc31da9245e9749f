"""The operators as PyTorch sees them: schema, fake tensors, autograd, compile, export."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from calls import DIFFERENTIABLE, double, gradients, record
from cases import VARLEN, KdaCase, ids
from errors import BF16_GRADIENTS, FLOAT64, check, check_pair
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import flashkda
from flashkda.nn import KimiDeltaAttention


def _pool(case: KdaCase) -> dict[str, Any]:
    call = case.but(state=False).make()
    del call["output_final_state"]
    return call | {
        "initial_state": torch.randn(9, 2, 16, 16, dtype=torch.float64),
        "ssm_state_indices": torch.tensor([4, -1, 7], dtype=torch.int32),
        "pad_slot_id": -1,
        "inplace_final_state": True,
    }


def _serving(case: KdaCase) -> dict[str, Any]:
    """Everything that `chunk_kda` can be asked to read and write in place."""
    return _pool(case) | {
        "final_state_indices": torch.tensor([5, 2, -1]),
        "checkpoint_states": torch.zeros(6, 2, 16, 16, dtype=torch.float64),
        "checkpoint_offsets": torch.tensor([[16, 0], [0, 16], [16, 32]], dtype=torch.int32),
        "checkpoint_indices": torch.tensor([[3, 0], [-1, 2], [1, 4]]),
        "workspace": torch.zeros(flashkda.get_workspace_size(100, 2, 3) + 8, dtype=torch.uint8),
        "max_seqlen": 100,
    }


def _with_out(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"out": torch.zeros_like(call["v"])}


def _fwd(**change: Tensor) -> None:
    call = KdaCase(T=20, state_v_first=True).make() | change
    order = [call[x] for x in ("q", "k", "v", "g", "beta")]
    out, final = torch.zeros_like(call["v"]), torch.zeros_like(call["initial_state"])
    fwd: Any = flashkda.fwd
    fwd(*order, 0.3, out, call["A_log"], call["dt_bias"], -5.0, call["initial_state"], final)


def _tracked(case: KdaCase) -> Any:
    """A call that autograd follows."""
    call = case.make()
    return flashkda.chunk_kda(**(call | {"q": call["q"].requires_grad_()}))


ROUTES: dict[str, Callable[[], Any]] = {
    "tracked": lambda: _tracked(KdaCase(T=20)),
    "tracked_nothing_optional": lambda: _tracked(KdaCase(T=20, gate="log", state=False)),
    "tracked_varlen": lambda: _tracked(KdaCase(lengths=(5, 0, 18), tail=2)),
    "tracked_bf16": lambda: _tracked(KdaCase(T=20, dtype=torch.bfloat16)),
    "chunk": lambda: flashkda.chunk_kda(**KdaCase(T=20).make()),
    "chunk_softplus": lambda: flashkda.chunk_kda(**KdaCase(T=20, gate="softplus").make()),
    "chunk_nothing_optional": lambda: flashkda.chunk_kda(
        **KdaCase(T=20, gate="log", state=False).make() | {"output_final_state": False}
    ),
    "chunk_varlen": lambda: flashkda.chunk_kda(**KdaCase(lengths=(5, 0, 18), tail=2).make()),
    "chunk_bf16": lambda: flashkda.chunk_kda(**KdaCase(T=20, dtype=torch.bfloat16).make()),
    "chunk_out": lambda: flashkda.chunk_kda(**_with_out(KdaCase(T=20).make())),
    "chunk_backward": lambda: gradients(flashkda.chunk_kda, KdaCase(T=20).make()),
    "chunk_backward_varlen": lambda: gradients(
        flashkda.chunk_kda, KdaCase(lengths=(5, 0, 18), tail=2).make()
    ),
    "chunk_pool": lambda: flashkda.chunk_kda(**_pool(KdaCase(T=20, B=3))),
    "chunk_pool_serving": lambda: flashkda.chunk_kda(**_serving(KdaCase(lengths=(20, 0, 40)))),
    "chunk_checkpoints": lambda: flashkda.chunk_kda(
        **KdaCase(T=40).make(),
        checkpoint_states=torch.zeros(2, 2, 16, 16, dtype=torch.float64),
        checkpoint_offsets=16,
        checkpoint_indices=torch.tensor([[1, 0]]),
    ),
    "fwd": _fwd,
    "recurrent": lambda: flashkda.fused_recurrent_kda(**KdaCase(T=3, B=2).make()),
    "recurrent_pool": lambda: flashkda.fused_recurrent_kda(**_pool(KdaCase(T=1, B=3))),
    "recurrent_pool_varlen": lambda: flashkda.fused_recurrent_kda(
        **_pool(KdaCase(lengths=(2, 0, 1)))
    ),
}


@pytest.mark.parametrize("route", list(ROUTES))
def test_each_public_call_is_one_operator(route: str) -> None:
    """One opaque operator each way, so nothing of the algorithm is ever traced."""
    expected = 2 if "backward" in route else 1
    assert len(record(ROUTES[route])) == expected


# opcheck in torch 2.14 looks at .grad of a tensor that is no leaf, and so warns about itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("route", list(ROUTES))
def test_opcheck(route: str) -> None:
    for operator, args, kwargs in record(ROUTES[route]):
        if operator.name() == "flashkda::chunk":  # the one that autograd follows
            for argument, value in zip(operator._schema.arguments, args, strict=False):
                if argument.name in DIFFERENTIABLE and value is not None:
                    value.requires_grad_()
        torch.library.opcheck(operator, args, kwargs)


@pytest.mark.parametrize(
    "case", [KdaCase(T=20), VARLEN, KdaCase(T=20, state_v_first=True, K=8, V=24)], ids=ids
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_fake_tensors_have_the_real_shapes(case: KdaCase, dtype: torch.dtype) -> None:
    call = case.but(dtype=dtype).make()
    real = flashkda.chunk_kda(**call)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake_call: dict[str, Any] = {
            x: mode.from_tensor(y) if isinstance(y, Tensor) else y for x, y in call.items()
        }
        fake = flashkda.chunk_kda(**fake_call)
    for a, b in zip(real, fake, strict=True):
        assert a is not None
        assert b is not None
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize("fake", ["both", "cu_seqlens", "cu_seqlens_cpu"])
def test_a_host_copy_without_values_is_not_read(fake: str) -> None:
    call = VARLEN.make()
    call["cu_seqlens_cpu"] = call["cu_seqlens"].clone()
    want = flashkda.chunk_kda(**call)[0].shape
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for name in call:
            is_faked = fake in (name, "both") or not name.startswith("cu_seqlens")
            if is_faked and isinstance(call[name], Tensor):
                call[name] = mode.from_tensor(call[name])
        assert flashkda.chunk_kda(**call)[0].shape == want


def test_the_layer_on_fake_tensors() -> None:
    with FakeTensorMode():
        layer = KimiDeltaAttention(hidden_size=32, head_dim=16, num_heads=2, layer_idx=0)
        x, mask = torch.randn(2, 20, 32), torch.ones(2, 20)
        assert layer(x)[0].shape == x.shape
        assert layer(x[:1], cu_seqlens=torch.tensor([0, 4, 20]))[0].shape == x[:1].shape
        o, _, cache = layer(x, attention_mask=mask, use_cache=True)
        assert o.shape == x.shape
        assert layer(x[:, :1], past_key_values=cache, use_cache=True)[0].shape == (2, 1, 32)


@pytest.mark.parametrize(
    "function", [flashkda.chunk_kda, flashkda.fused_recurrent_kda], ids=["chunk", "recurrent"]
)
@pytest.mark.parametrize("case", [KdaCase(T=20), VARLEN], ids=ids)
def test_meta_tensors(function: Any, case: KdaCase) -> None:
    call = case.make()
    real = function(**call)
    moved = {x: y.to("meta") if isinstance(y, Tensor) else y for x, y in call.items()}
    for a, b in zip(real, function(**moved), strict=True):
        assert b.device.type == "meta"
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_meta_tensors_in_a_pool() -> None:
    call = _serving(KdaCase(lengths=(20, 0, 40)))
    moved = {x: y.to("meta") if isinstance(y, Tensor) else y for x, y in call.items()}
    o, pool = flashkda.chunk_kda(**moved)
    assert pool is moved["initial_state"]
    assert (o.device.type, o.shape) == ("meta", call["v"].shape)


@pytest.fixture
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


COMPILED = [
    KdaCase(T=40),
    KdaCase(T=40, gate="softplus", state=False),
    KdaCase(lengths=(17, 0, 23)),
    KdaCase(T=40, gate="log", beta="activated", l2norm=False, H=2, HV=4, state_v_first=True),
]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("case", COMPILED, ids=ids)
def test_compile_without_graph_breaks(case: KdaCase) -> None:
    call = case.make()
    compiled = torch.compile(flashkda.chunk_kda, fullgraph=True, backend="aot_eager")
    got, want = compiled(**call), flashkda.chunk_kda(**call)
    assert want[1] is not None
    check_pair(got, (want[0], want[1]), FLOAT64)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("case", COMPILED, ids=ids)
def test_compiled_gradients(case: KdaCase) -> None:
    call = case.make()
    compiled = torch.compile(flashkda.chunk_kda, fullgraph=True, backend="aot_eager")
    check(gradients(compiled, call), gradients(flashkda.chunk_kda, call), FLOAT64)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own imports
@pytest.mark.skipif(shutil.which("c++") is None, reason="Inductor needs a C++ compiler")
def test_compile_with_inductor() -> None:
    call = KdaCase(T=40).make()
    compiled = torch.compile(flashkda.chunk_kda, fullgraph=True)
    want = flashkda.chunk_kda(**call)
    assert want[1] is not None
    check_pair(compiled(**call), (want[0], want[1]), FLOAT64)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compile_with_dynamic_shapes() -> None:
    compiled = torch.compile(flashkda.chunk_kda, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (40, 41, 100):
        call = KdaCase(T=length).make()
        want = flashkda.chunk_kda(**call)
        assert want[1] is not None
        check_pair(compiled(**call), (want[0], want[1]), FLOAT64)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("pool", [False, True], ids=["plain", "pool"])
def test_compiled_decode(pool: bool) -> None:
    make = (lambda: _pool(KdaCase(T=1, B=3))) if pool else KdaCase(T=1, B=3).make
    call = make()
    other: dict[str, Any] = {x: y.clone() if isinstance(y, Tensor) else y for x, y in call.items()}
    compiled = torch.compile(flashkda.fused_recurrent_kda, fullgraph=True, backend="aot_eager")
    got, want = compiled(**call), flashkda.fused_recurrent_kda(**other)
    check({"o": got[0]}, {"o": want[0]}, FLOAT64)
    check({"state": call["initial_state"]}, {"state": other["initial_state"]}, FLOAT64)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("make", [_pool, _serving], ids=["pool", "serving"])
def test_compiled_pool(make: Callable[[KdaCase], dict[str, Any]]) -> None:
    case = KdaCase(lengths=(20, 0, 40))
    call = make(case)
    other: dict[str, Any] = {x: y.clone() if isinstance(y, Tensor) else y for x, y in call.items()}
    compiled = torch.compile(flashkda.chunk_kda, fullgraph=True, backend="aot_eager")
    got, want = compiled(**call), flashkda.chunk_kda(**other)
    check({"o": got[0]}, {"o": want[0]}, FLOAT64)
    written = [x for x in ("initial_state", "checkpoint_states") if x in call]
    check({x: call[x] for x in written}, {x: other[x] for x in written}, FLOAT64)
    assert bool((call[written[-1]] != make(case)[written[-1]]).any())


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_checkpoints_in_the_pool_itself() -> None:
    """One tensor twice among what the operator writes."""
    call = _pool(KdaCase(T=20, B=3)) | {
        "checkpoint_offsets": torch.tensor([16, 0, 16]),
        "checkpoint_indices": torch.tensor([0, 1, 2]),
    }
    other: dict[str, Any] = {x: y.clone() if isinstance(y, Tensor) else y for x, y in call.items()}
    compiled = torch.compile(flashkda.chunk_kda, fullgraph=True, backend="aot_eager")
    for function, arguments in ((compiled, call), (flashkda.chunk_kda, other)):
        function(**arguments, checkpoint_states=arguments["initial_state"])
    check({"pool": call["initial_state"]}, {"pool": other["initial_state"]}, FLOAT64)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_out_is_written() -> None:
    call = KdaCase(T=20).make()
    want, _ = flashkda.chunk_kda(**call)
    out = torch.full_like(call["v"], 7.0)
    torch.compile(flashkda.chunk_kda, fullgraph=True, backend="aot_eager")(**call, out=out)
    check({"out": out}, {"out": want}, FLOAT64)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compile_with_numbers_that_change() -> None:
    call = _pool(KdaCase(T=2, B=3)) | {"inplace_final_state": False}
    compiled = torch.compile(flashkda.chunk_kda, fullgraph=True, backend="aot_eager")
    for scale, length, pad in ((0.5, 2, -1), (0.75, 3, 0), (1.25, 4, 1), (2.0, 2**40, 2**40)):
        numbers = {"scale": scale, "max_seqlen": length, "pad_slot_id": pad}
        got, want = compiled(**call | numbers), flashkda.chunk_kda(**call | numbers)
        check({"o": got[0]}, {"o": want[0]}, FLOAT64)


class Layer(torch.nn.Module):
    def __init__(self, call: dict[str, Any]) -> None:
        super().__init__()
        self.options = {x: y for x, y in call.items() if not isinstance(y, Tensor)}
        self.A_log = torch.nn.Parameter(call["A_log"])
        self.dt_bias = torch.nn.Parameter(call["dt_bias"])

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        result: tuple[Tensor, Tensor | None] = flashkda.chunk_kda(
            q,
            k,
            v,
            g,
            beta,
            initial_state=state,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            **self.options,
        )
        return result


def _arguments(call: dict[str, Any]) -> tuple[Tensor, ...]:
    return tuple(call[x] for x in ("q", "k", "v", "g", "beta", "initial_state"))


def test_export() -> None:
    call = KdaCase(T=40, K=8, V=24).make()
    layer = Layer(call)
    program = torch.export.export(layer, _arguments(call))
    targets = {str(x.target) for x in program.graph.nodes if x.op == "call_function"}
    assert any(x.startswith("flashkda.") for x in targets), targets
    want = flashkda.chunk_kda(**call)
    assert want[1] is not None
    check_pair(program.module()(*_arguments(call)), (want[0], want[1]), FLOAT64)


def test_export_with_a_dynamic_length() -> None:
    call = KdaCase(T=40).make()
    length = torch.export.Dim("tokens", min=2, max=4096)
    dims: tuple[Any, ...] = (*({1: length} for _ in range(5)), None)
    program = torch.export.export(Layer(call), _arguments(call), dynamic_shapes=dims)
    longer = KdaCase(T=77, seed=0).make() | {x: call[x] for x in ("A_log", "dt_bias")}
    want = flashkda.chunk_kda(**longer)
    assert want[1] is not None
    check_pair(program.module()(*_arguments(longer)), (want[0], want[1]), FLOAT64)


def _dual(f: Callable[[Tensor], Tensor], q: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(q, torch.ones_like(q)))


# Forward mode imports decompositions that torch scripts.
in_forward_mode = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda f, q: torch.func.grad(f)(q),
    "vjp": lambda f, q: torch.func.vjp(f, q)[1](q.new_ones(())),
    "jacrev": lambda f, q: torch.func.jacrev(f)(q),
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (q,)),
    "jacfwd": lambda f, q: torch.func.jacfwd(f)(q),
    "vmap": lambda f, q: torch.vmap(f)(torch.stack([q, 2 * q])),
    "forward mode": _dual,
}
SUMS: dict[str, Callable[[dict[str, Any]], Tensor]] = {
    "chunk_kda": lambda call: flashkda.chunk_kda(**call)[0].sum(),
    "fused_recurrent_kda": lambda call: flashkda.fused_recurrent_kda(**call)[0].sum(),
}


@in_forward_mode
@pytest.mark.parametrize("name", list(SUMS))
@pytest.mark.parametrize("transform", list(TRANSFORMS))
def test_transforms_are_refused(transform: str, name: str) -> None:
    """None has a rule: an error, not a derivative of zero."""
    call = KdaCase(T=8, B=1).make()
    with pytest.raises(NotImplementedError, match=rf"^{name}: a call under torch\.func"):
        TRANSFORMS[transform](lambda q: SUMS[name](call | {"q": q}), call["q"])


@in_forward_mode
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "vmap"])
def test_compiled_transforms_are_refused(transform: str) -> None:
    call = KdaCase(T=8, B=1).make()

    def run(q: Tensor) -> Any:
        return TRANSFORMS[transform](lambda q: SUMS["chunk_kda"](call | {"q": q}), q)

    with pytest.raises(Exception, match=r"a call under torch\.func"):
        torch.compile(run, backend="aot_eager")(call["q"])


@in_forward_mode
def test_fwd_refuses_forward_mode() -> None:
    with pytest.raises(NotImplementedError, match=r"^fwd: a call under torch\.func"):
        _dual(lambda A_log: _fwd(A_log=A_log), torch.zeros(2, dtype=torch.float64))


@in_forward_mode
def test_transforms_of_something_else_are_no_matter() -> None:
    call = KdaCase(T=8, B=1).make()
    want = flashkda.chunk_kda(**call)[0]
    doubled = torch.vmap(lambda x: x * flashkda.chunk_kda(**call)[0])(torch.tensor([1.0, 2.0]))
    assert torch.equal(doubled[1], 2 * want)
    assert torch.equal(_dual(lambda x: x * flashkda.chunk_kda(**call)[0], torch.tensor(1.0)), want)


def test_double_backward_is_refused() -> None:
    call = KdaCase(T=8).make()
    q = call["q"].requires_grad_()
    o, _ = flashkda.chunk_kda(**call)
    (gradient,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.autograd.grad(gradient.sum(), q)


@pytest.mark.parametrize(
    "function", [flashkda.chunk_kda, flashkda.fused_recurrent_kda], ids=["chunk", "recurrent"]
)
def test_autocast_casts_float32_inputs(function: Any) -> None:
    """Under autocast float32 q, k, v become its dtype, as they would for a matmul."""
    call = KdaCase(T=40, dtype=torch.float32).make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, state = function(**call)
    assert o.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    cast = function(**(call | {x: call[x].bfloat16() for x in ("q", "k", "v")}))
    assert torch.equal(o, cast[0])
    assert torch.equal(state, cast[1])
    for name in ("q", "k", "v"):  # norms are often float32, projections in the dtype of autocast
        mixed = call | {name: call[name].bfloat16()}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(function(**mixed)[0], o)
        with pytest.raises(TypeError, match="expected"):
            function(**mixed)


def test_autocast_gradients_are_float32() -> None:
    call = KdaCase(T=40, dtype=torch.float32).make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = gradients(flashkda.chunk_kda, call)

    def reference(**arguments: Any) -> tuple[Tensor, Tensor]:
        return oracle.kda(**(arguments | {x: arguments[x].bfloat16() for x in ("q", "k", "v")}))

    check(got, gradients(reference, double(call)), BF16_GRADIENTS)


def test_autocast_leaves_other_dtypes_alone() -> None:
    call = KdaCase(T=40, dtype=torch.float16).make()
    plain, _ = flashkda.chunk_kda(**call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, _ = flashkda.chunk_kda(**call)
    assert o.dtype == torch.float16
    assert torch.equal(o, plain)
