"""What is measured: shapes, their short names, and the gates that they run with."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

GROUPS = ("prefill", "decode", "train")
GATES = ("fast", "slow", "none")
DECODE_TOKENS = 16  # sequences of equal length up to this are decoded, longer ones prefilled
SYNTAX = (
    "BxT or L1+L2+..., then xH and a number of heads, then options: 1x8192xH32, "
    "1300+547xH8 (packed), 256x1xH32 (decoding), 256x1xH16:bf16 (dtype of states), "
    "256x1xH32:kv (layout of states), 256x1xH32:ready (state_is_ready), 1x8192xH32:backward"
)
_PATTERN = re.compile(r"(?:(\d+)x(\d+)|(\d+(?:\+\d+)+))(?:xH(\d+))?((?::[a-z0-9]+)*)")


@dataclass(frozen=True)
class Shape:
    """Sequences of equal length, or packed ones.

    Attributes:
        group: "prefill", "decode" or "train".
        lengths: of the sequences.
        packed: one row of the batch holds all of them.
        heads: of queries, keys and values.
        bf16_state: states are bfloat16, not float32 (decode).
        v_first: states are [V, K], not [K, V] (decode).
        is_ready: flashkda is promised that states may be read early (decode).
    """

    group: str
    lengths: tuple[int, ...]
    packed: bool
    heads: int
    bf16_state: bool = False
    v_first: bool = True
    is_ready: bool = False

    @property
    def layout(self) -> str:
        """The sequences, as they are written in a name."""
        if self.packed:
            return "+".join(map(str, self.lengths))
        return f"{len(self.lengths)}x{self.lengths[0]}"

    @property
    def options(self) -> tuple[str, ...]:
        """As they are written in a name."""
        flags = {
            "backward": self.group == "train",
            "bf16": self.bf16_state,
            "kv": not self.v_first,
            "ready": self.is_ready,
        }
        return tuple(name for name, on in flags.items() if on)

    @property
    def name(self) -> str:
        """What :func:`parse` reads."""
        return ":".join((f"{self.layout}xH{self.heads}", *self.options))

    @property
    def tokens(self) -> int:
        """Of all sequences together."""
        return sum(self.lengths)

    @property
    def batch(self) -> tuple[int, int]:
        """B and T of the tensors."""
        return (1, self.tokens) if self.packed else (len(self.lengths), self.lengths[0])


@dataclass(frozen=True)
class Case:
    """A shape with a gate: "fast" (the peers' recipe), "slow" (a fresh layer) or "none" (g = 0)."""

    shape: Shape
    gate: str

    @property
    def name(self) -> str:
        """Of its file too."""
        return f"{self.shape.group}-{self.shape.name}-{self.gate}".replace(":", "-")


def parse(text: str, heads: Iterable[int] = ()) -> list[Shape]:
    """The shape that ``text`` names (:data:`SYNTAX`): without heads, one for each of ``heads``.

    Raises:
        ValueError: it names none.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no shape; expected {SYNTAX}")
    batch, tokens, packed, own_heads, tail = match.groups()
    lengths = tuple(map(int, packed.split("+"))) if packed else (int(tokens),) * int(batch)
    counts = [int(own_heads)] if own_heads else list(heads)
    if not counts:
        raise ValueError(f"{text!r} says no number of heads: append xH32, or give --heads")
    if not lengths or 0 in lengths or 0 in counts:
        raise ValueError(f"{text!r}: expected numbers of at least 1")
    options = tail.split(":")[1:]
    unknown = set(options) - {"backward", "bf16", "kv", "ready"}
    if unknown:
        raise ValueError(f"{text!r}: unknown option {sorted(unknown)[0]!r}; expected {SYNTAX}")
    group = "prefill" if packed or lengths[0] > DECODE_TOKENS else "decode"
    if "backward" in options:
        group = "train"
    if group != "decode" and {"bf16", "kv", "ready"} & set(options):
        raise ValueError(
            f"{text!r}: bf16, kv and ready are options of decoding, that is of up to "
            f"{DECODE_TOKENS} tokens for each sequence"
        )
    return [
        Shape(
            group,
            lengths,
            packed is not None,
            count,
            bf16_state="bf16" in options,
            v_first="kv" not in options,
            is_ready="ready" in options,
        )
        for count in counts
    ]


RAGGED = "1300+547+2048+963+271+3063"
_GPU = (
    *(f"1x8192xH{h}" for h in (8, 12, 16, 32, 64, 96)),
    *(f"{RAGGED}xH{h}" for h in (64, 96)),
    *(f"8x1024xH{h}" for h in (64, 96)),
    *(f"32x256xH{h}" for h in (12, 16, 32)),
    *(f"1x512xH{h}" for h in (12, 32)),
    *(f"1x32768xH{h}" for h in (8, 32)),
    *(f"1x65536xH{h}" for h in (8, 16)),
    "1x2048xH12",
    "128x64xH32",
    "1x131072xH8",
    *(f"{n}x1xH32" for n in (1, 32, 128, 256)),
    *(f"{n}x1xH12" for n in (1, 128, 512)),
    *(f"128x{t}xH32" for t in (4, 16)),
    "256x1xH16:bf16",
    "256x1xH32:kv",
    "128x1xH32:ready",
    "1x8192xH32:backward",
)
_CPU = ("1x1024xH4", "4x256xH4", "300+100+624xH4", "8x1xH4", "1x512xH2:backward")
QUICK_HEADS, QUICK_TOKENS = 32, 8192


def defaults(device_type: str) -> list[Shape]:
    """The shapes that a device is measured with when none are named.

    Those of one number of heads come together: rivals tune their kernels once for each.
    """
    shapes = [parse(text)[0] for text in (_GPU if device_type == "cuda" else _CPU)]
    return sorted(shapes, key=lambda x: (x.heads, GROUPS.index(x.group)))


def quick(device_type: str) -> list[Shape]:
    """Prefill and decode of one number of heads (tuning for a backward pass takes too long)."""
    shapes = [x for x in defaults(device_type) if not x.options and x.tokens <= QUICK_TOKENS]
    return [x for x in shapes if device_type != "cuda" or x.heads == QUICK_HEADS]


def with_heads(shapes: Iterable[Shape], heads: Iterable[int]) -> list[Shape]:
    """Every shape with each number of heads, once."""
    shapes = list(shapes)
    return list(dict.fromkeys(replace(x, heads=h) for h in heads for x in shapes))
