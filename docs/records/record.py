"""Records what the examples print, for docs/examples.md: ``python docs/records/record.py``.

Each runs as a user would run it, in an empty folder, with the settings that stand here; names after
the command choose some of them. The paper's networks need ``--data`` and ``--reference``, trees of
image folders. A record carries a digest of the example's code, so that one of older code is known.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from stamppruner.files import atomic_write
from stamppruner.summary import versions

OUT = Path(__file__).parent / "examples"
EXAMPLES = OUT.parents[2] / "examples"
PAPER = (
    "--data DIR --reference DIR --width 0.125 --subset 200 --reference-subset 1000 --epochs 2 "
    "--iterations 2 --tasks 1 --shots 8 --finetune-epochs 10"
)
RUNS = {
    "quickstart": "",
    "timm_folder": "--size 64 --epochs 5",
    "mobilenet_latency": "--size 96",
    "many_targets": "--epochs 10",
    "segmentation": "",
    "detection": "",
    "lightning_finetune": "",
    "accelerate_finetune": "",
    "onnx_serving": "",
    "resnet18_cifar": PAPER,
    "vgg19_cifar": PAPER,
}
"""Names of examples, and their options: what one slow core does in a few minutes."""
PAGE = re.compile(r'<script type="application/json" id="stamppruner-(\w+)">(.*?)</script>', re.S)


def digest(name: str) -> str:
    """Of an example's code, with that of the helpers which it imports."""
    text = (EXAMPLES / f"{name}.py").read_text("utf-8")
    helpers = re.findall(r"^from (\w+) import", text, re.M)
    files = [EXAMPLES / f"{helper}.py" for helper in helpers]
    parts = [text, *(file.read_text("utf-8") for file in files if file.is_file())]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def on_screen(printed: str) -> str:
    """Text as a terminal shows it: of a progress bar, its last state."""
    return "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in printed.split("\n"))


def run(name: str, given: str, folders: dict[str, Path | None]) -> dict[str, Any]:
    """Run an example and return what it printed and the first report page that it wrote."""
    options = given.split()
    for option, folder in folders.items():
        if option in options:
            if folder is None:
                raise SystemExit(f"{name} needs {option}, a tree of image folders")
            options[options.index(option) + 1] = str(folder.resolve())
    paths = [str(OUT.parents[2]), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as place:
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, EXAMPLES / f"{name}.py", *options],
            cwd=place,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdout=subprocess.PIPE,
            check=True,
        )
        seconds = time.perf_counter() - start
        pages = [page.read_text("utf-8") for page in sorted(Path(place).rglob("*.html"))]
    kind, page = PAGE.search(pages[0]).groups() if pages else ("", "null")
    return {
        "command": f"python examples/{name}.py {given}".strip(),
        "code": digest(name),
        "seconds": round(seconds, 1),
        "machine": {
            "device": "cuda" if torch.cuda.is_available() else f"cpu ({platform.machine()})",
            "threads": torch.get_num_threads(),
            **versions(),
        },
        "output": on_screen(done.stdout.decode()),
        "kind": kind,
        "page": json.loads(page),
    }


def write(name: str, record: dict[str, Any]) -> None:
    """A line for each entry, and one for the whole page."""
    page = json.dumps(record["page"], ensure_ascii=False, separators=(",", ":"))
    rest = {key: value for key, value in record.items() if key != "page"}
    text = json.dumps(rest, ensure_ascii=False, indent=1).removesuffix("\n}")
    OUT.mkdir(exist_ok=True)
    atomic_write(OUT / f"{name}.json", f'{text},\n "page": {page}\n}}\n'.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(RUNS)} (default: all)")
    parser.add_argument("--tiny", action="store_true", help="their tests' size, in seconds")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--reference", type=Path)
    args = parser.parse_args()
    for name in args.names or RUNS:
        record = run(
            name,
            "--tiny" if args.tiny else RUNS[name],
            {"--data": args.data, "--reference": args.reference},
        )
        write(name, record)
        print(f"{name}: {record['seconds']} s")


if __name__ == "__main__":
    main()
