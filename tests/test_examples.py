"""The examples run as a user would run them, and check themselves."""

from __future__ import annotations

import examples_list
from examples_list import EXAMPLES


@EXAMPLES
def test_example_on_the_cpu(name: str) -> None:
    examples_list.run(name, "cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")


def test_every_example_is_listed() -> None:
    names = {path.stem for path in examples_list.FOLDER.glob("*.py")}
    assert names == set(examples_list.LAST_LINE)
