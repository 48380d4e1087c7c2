"""The code in docs/deploying.md runs, block after block."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "deploying.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_all_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        for block in BLOCKS:
            if "_inductor" in block and shutil.which("g++") is None:
                continue
            exec(compile(block, str(PAGE), "exec"), scope)
    assert {"slim.onnx", "slim-int8.onnx", "slim.pt2", "weights.safetensors"} <= {
        path.name for path in tmp_path.iterdir()
    }


def test_every_block_is_found_and_is_python() -> None:
    assert len(BLOCKS) == PAGE.read_text().count("```python") >= 8
    for block in BLOCKS:
        compile(block, str(PAGE), "exec")
