"""A model written for flash-linear-attention runs on flashkda: one line, and proof of who ran."""

import logging
import warnings

import torch
from torch import nn

from flashkda.integrations import fla as flashkda_for_fla

warnings.filterwarnings("ignore", message="Triton is not supported")  # fla without a GPU says so

flashkda_for_fla.enable()  # the one line: before or after the model's imports

from fla.ops.kda import chunk_kda, fused_recurrent_kda  # noqa: E402 (as a model has them)

HIDDEN, H, D, PROMPT, NEW = 64, 2, 128, 100, 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Attention(nn.Module):
    """What fla's layer does around its kernels: nothing here knows flashkda."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.g = (nn.Linear(HIDDEN, H * D) for _ in range(4))
        self.b, self.o = nn.Linear(HIDDEN, H), nn.Linear(H * D, HIDDEN)
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(H)), nn.Parameter(torch.zeros(H * D))

    def forward(self, x, state=None):
        call = {name: getattr(self, name)(x).unflatten(-1, (H, D)) for name in "qkvg"}
        call |= {f"use_{y}_in_kernel": True for y in ("gate", "qk_l2norm", "beta_sigmoid")}
        call |= {"beta": self.b(x), "A_log": self.A_log, "dt_bias": self.dt_bias}
        call |= {"lower_bound": -5.0, "initial_state": state, "output_final_state": True}
        if x.shape[1] > 1:
            o, state = chunk_kda(**call, safe_gate=True, state_v_first=True)
        else:
            o, state = fused_recurrent_kda(**call, state_v_first=True)
        return self.o(o.flatten(-2)), state


logging.basicConfig()  # calls that flashkda declines would be named here, with a reason
logging.getLogger("flashkda").setLevel(logging.INFO)
torch.manual_seed(0)
layer = Attention().to(DEVICE)
with torch.no_grad():
    layer.bfloat16()  # parameters of the gate too
    x = torch.randn(1, PROMPT + NEW, HIDDEN).to(DEVICE, torch.bfloat16)
    whole, _ = layer(x)
    y, state = layer(x[:, :PROMPT])
    outputs = [y]
    for t in range(PROMPT, PROMPT + NEW):
        y, state = layer(x[:, t : t + 1], state)
        outputs.append(y)
got = torch.cat(outputs, dim=1)
assert (got - whole).float().norm() < 2e-2 * whole.float().norm()
status = flashkda_for_fla.status()
assert status["chunk_kda"].served == 2
assert status["fused_recurrent_kda_fwd"].served == NEW
assert not any(x.declined for x in status.values())
if DEVICE == "cpu":  # on a GPU gradients are Triton's, which takes a minute to tune itself
    layer.float()
    layer(x.float())[0].square().mean().backward()
    assert layer.A_log.grad is not None
    assert flashkda_for_fla.status()["chunk_kda"].served == 3
print(f"a prompt and {NEW} tokens of fla's functions on flashkda, {DEVICE}")
