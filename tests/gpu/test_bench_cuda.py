"""`flashkda bench` on a GPU: small shapes of every group, beside rivals if there are any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benching import Rival, make_case
from support import GPU

from flashkda import cli
from flashkda._selftest import recurrence, relative_error
from flashkda.bench._devices import open_device
from flashkda.bench._inputs import Inputs, activated
from flashkda.bench._measure import measure
from flashkda.bench._reference import recurrence_in_graphs
from flashkda.bench._systems import FlashKDA

pytestmark = GPU

SHAPES = ["1x256xH2", "100+56xH2", "4x1xH2", "4x1xH2:bf16:kv", "4x2xH2:ready", "1x64xH2:backward"]


def test_small_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = [f"--shape={shape}" for shape in SHAPES]
    argv = ["bench", "--device=cuda", "--no-rivals", "--repeats=5", f"--output={tmp_path}"]
    assert cli.main([*argv, *shapes, "--json"]) == 0
    records = json.loads(capsys.readouterr().out)["records"]
    assert len(records) == 3 * len(SHAPES)
    for record in records:
        (ours,) = record["rows"]
        assert ours["note"] == ""
        assert ours["seconds"] > 0
        assert ours["host_seconds"] > 0
        assert ours["method"] in ("events", "graph")
        assert record["environment"]["driver"]
        if record["group"] != "train":
            assert ours["path"] == "cuda"
            assert ours["method"] == "graph"
        else:
            assert ours["peak_bytes"] > 0


def test_no_time_for_a_wrong_result() -> None:
    systems = [FlashKDA(), Rival("right"), Rival("wrong", factor=1.02)]
    rows = measure(make_case("1x256xH2"), systems, open_device("cuda"), repeats=3).rows
    assert [row.seconds is None for row in rows] == [False, False, True]
    assert rows[2].note == "wrong: out above 1.0e-02"


@pytest.mark.parametrize("shape", ["2x600xH2", "300+512+20+256xH1", "1x100xH1"])
def test_the_reference_in_graphs_is_the_recurrence(shape: str) -> None:
    x = Inputs.draw(make_case(shape), torch.device("cuda"), torch.bfloat16, 64, seed=0)
    options = {"scale": x.scale, "initial_state": x.state, "cu_seqlens": x.boundaries}
    want = recurrence(*activated(x), **options)
    for result, right in zip(recurrence_in_graphs(*activated(x), **options), want, strict=True):
        assert relative_error(result, right) < 1e-14
