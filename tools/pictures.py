"""Draws the pictures of docs/pictures.md: each by the block of code above it.

Run: python tools/pictures.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PAGE = Path(__file__).parents[1] / "docs" / "pictures.md"
DPI = 110


def main() -> None:
    names: dict[str, Any] = {}
    for code, picture in re.findall(
        r"```python\n(.*?)```|!\[.*?\]\((.*?)\)", PAGE.read_text(), re.S
    ):
        if code:
            exec(code, names)
            continue
        path = PAGE.parent / picture
        path.parent.mkdir(exist_ok=True)
        plt.gcf().savefig(path, dpi=DPI, metadata={"Software": None})
        plt.close("all")
        print(path)


if __name__ == "__main__":
    main()
