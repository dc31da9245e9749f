"""The examples on a GPU, with the asserts that they have on a CPU."""

from __future__ import annotations

import examples_list
from examples_list import EXAMPLES
from support import GPU

pytestmark = GPU


@EXAMPLES
def test_example_on_the_gpu(name: str) -> None:
    examples_list.run(name, "cuda")
