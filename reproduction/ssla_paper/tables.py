"""Tables as CSV (full precision), Markdown and LaTeX (formatted)."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssla.files.replacing import replace_file
from ssla_paper.runner import write_whole

Cell = str | float | int | None
ESCAPED = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "–": "--", "…": r"\dots{}"}
MATHS = {
    "±": r"\pm", "−": "-", "×": r"\times", "≤": r"\le", "≥": r"\ge", "½": r"\frac{1}{2}", "∇": r"\nabla", "‖": r"\|", "″": "''",
    "ℓ": r"\ell", "α": r"\alpha", "θ": r"\theta", "λ": r"\lambda", "μ": r"\mu", "π": r"\pi", "σ": r"\sigma", "τ": r"\tau",
    "Σ": r"\sum", "Λ": r"\Lambda", "ᵢ": "_i",
}  # fmt: skip
RAISED, ON_THE_LINE = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻ᵀ", "0123456789-T"
ACCENTS = {"\u0303": r"\tilde", "\u0302": r"\hat"}


@dataclass(frozen=True)
class Table:
    """Rows of cells under named columns. formats: by column, as in f"{value:.3f}"."""

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    formats: dict[str, str]

    def shown(self, column: str, value: Cell) -> str:
        if value is None:
            return "–"
        return str(value) if isinstance(value, str) else format(value, self.formats.get(column, ""))

    def _lines(self) -> list[list[str]]:
        return [
            [self.shown(c, v) for c, v in zip(self.columns, row, strict=True)] for row in self.rows
        ]

    def _on_the_left(self) -> list[bool]:
        """By column: the first and those of words are on the left, those of numbers on the
        right.
        """
        lines = self._lines()
        return [i == 0 or of_words([line[i] for line in lines]) for i in range(len(self.columns))]

    def markdown(self) -> str:
        rule = "|".join("---" if left else "---:" for left in self._on_the_left())
        lines = [f"| {' | '.join(line)} |" for line in [list(self.columns), *self._lines()]]
        return "\n".join([lines[0], f"|{rule}|", *lines[1:]])

    def latex(self) -> str:
        lines = [
            " & ".join(_escaped(cell) for cell in line) + r" \\"
            for line in [list(self.columns), *self._lines()]
        ]
        body = "\n".join([r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"])
        spec = "".join("l" if left else "r" for left in self._on_the_left())
        caption = f"\\caption{{{_escaped(self.caption)}}}"
        tabular = f"\\begin{{tabular}}{{{spec}}}\n{body}\n\\end{{tabular}}"
        head = "% needs \\usepackage{booktabs}\n\\begin{table}\n\\centering"
        return f"{head}\n{tabular}\n{caption}\n\\label{{tab:{self.name}}}\n\\end{{table}}\n"

    def csv(self) -> str:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([["" if v is None else v for v in row] for row in self.rows])
        return out.getvalue()

    def write(self, folder: Path) -> None:
        write_whole(folder / f"{self.name}.csv", self.csv())
        write_whole(folder / f"{self.name}.md", f"{self.caption}\n\n{self.markdown()}\n")
        write_whole(folder / f"{self.name}.tex", self.latex())


def of_words(cells: Sequence[str]) -> bool:
    """Whether more cells begin with a letter than with anything but a dash."""
    words = sum(cell[:1].isalpha() for cell in cells)
    return 2 * words > sum(cell != "–" for cell in cells)


def _escaped(text: str) -> str:
    """For any TeX: letters beyond ASCII as formulas, an accent around the letter before it."""
    found: list[str] = []
    for letter in re.findall(f"[{RAISED}]+|.", unicodedata.normalize("NFD", text), re.DOTALL):
        if letter in ACCENTS and found:
            found[-1] = f"${ACCENTS[letter]}{{{found[-1].strip('$')}}}$"
        elif letter[0] in RAISED:
            found.append(f"$^{{{letter.translate(str.maketrans(RAISED, ON_THE_LINE))}}}$")
        else:
            found.append(f"${MATHS[letter]}$" if letter in MATHS else ESCAPED.get(letter, letter))
    return "".join(found).replace("$$", "")  # merge adjacent formulas


def draw(figure: Any, folder: Path, name: str) -> None:
    """A figure as PNG and PDF, without dates, so that two runs give the same files."""
    with replace_file(folder / f"{name}.png") as draft:
        figure.savefig(draft, dpi=120, bbox_inches="tight", metadata={"Software": None})
    with replace_file(folder / f"{name}.pdf") as draft:
        figure.savefig(draft, bbox_inches="tight", metadata={"CreationDate": None})
    import matplotlib.pyplot as plt

    plt.close(figure)
