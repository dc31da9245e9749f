"""The layer in a small language model: it learns a text by heart, then writes it from its state."""

import warnings

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flashkda.nn import KDACache, KimiDeltaAttention

warnings.filterwarnings("ignore", message=".*PyTorch path")  # gradients on a GPU take it, for now

TEXT = "the delta rule corrects what a state recalls for a key; a gate lets it forget. "
HIDDEN, LAYERS, STEPS = 64, 2, 60
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Model(nn.Module):
    def __init__(self, letters):
        super().__init__()
        self.embedding = nn.Embedding(letters, HIDDEN)
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(LAYERS))
        self.layers = nn.ModuleList(
            KimiDeltaAttention(hidden_size=HIDDEN, num_heads=2, head_dim=32, layer_idx=n)
            for n in range(LAYERS)
        )
        self.head = nn.Linear(HIDDEN, letters)

    def forward(self, tokens, cache=None):
        x = self.embedding(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            y, _, cache = layer(norm(x), past_key_values=cache, use_cache=cache is not None)
            x = x + y
        return self.head(x), cache


torch.manual_seed(0)
letters = sorted(set(TEXT))
tokens = torch.tensor([[letters.index(x) for x in TEXT * 2]], device=DEVICE)
model = Model(len(letters)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for _ in range(STEPS):
    logits, _ = model(tokens[:, :-1])
    loss = cross_entropy(logits.flatten(0, 1), tokens[0, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < 0.1 < 1 < losses[0], losses

model.eval()
with torch.no_grad():  # a prompt, then letter by letter: only the state is kept
    prompt, written = tokens[:, :20], []
    logits, cache = model(prompt, KDACache())
    while len(written) < 40:
        written.append(logits[:, -1:].argmax(-1))
        logits, cache = model(written[-1], cache)
    again, _ = model(torch.cat([prompt, *written], dim=1))  # the same without a state
assert (logits[:, -1] - again[:, -1]).abs().max() < 1e-2
text = "".join(letters[n] for n in torch.cat(written, dim=1)[0].tolist())
assert text == TEXT[20:60], text
print(f"learnt in {STEPS} steps on {DEVICE}: ...{text}...")
