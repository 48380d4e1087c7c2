"""Fill the tables of README.md from the JSON that benchmarks wrote.

python benchmarks/tables.py
"""

import json
import re
from pathlib import Path

from digits import table

from stamppruner.io import atomic_write

ROOT = Path(__file__).parent.parent
MARK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(text: str) -> str:
    """The text with every marked table made anew."""

    def made(match: re.Match[str]) -> str:
        record = json.loads((ROOT / match[2]).read_text())
        return f"{match[1]}{table(record['runs'])}\n{match[3]}"

    return MARK.sub(made, text)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    atomic_write(readme, fill(readme.read_text()).encode())
