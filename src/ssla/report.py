"""What a fit saw and did, as values that print well: `Report` and its notes, `TuningHistory`.

`POLISH`, `TILT` and `AS_IS` say how θ̂ was chosen: see the docstring of `ssla.fitting.fit`. The
residual of a fit is the distance of θ̂ from the mode, in posterior standard deviations. The subject
of a note is the step of the fit, or the later change, that the note is about.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from ssla.priors import EXACT

POLISH, TILT, AS_IS = "polish", "tilt", "as_is"
LAPLACE, VARIATIONAL = "laplace", "variational"
# subjects of notes
FIT, DATA, MOVED, ADDED = "fit", "data", "moved", "added"
PRIOR, CONCAVITY, RANK, TUNING = "prior", "concavity", "rank", "tuning"
NO_VALIDATION = (
    "validation   none: training rows cannot show over-confidence; give rows that the network has "
    "not seen as validation="
)


class Note(str):
    """A line of a report with its subject, by which a later change replaces or keeps the line.

    Notes of old files are plain texts without a subject.
    """

    subject: str

    def __new__(cls, text: str, subject: str = FIT) -> Note:
        """Return a note with this text and subject."""
        note = super().__new__(cls, text)
        note.subject = subject
        return note

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        """Return the arguments from which pickle makes the note again."""
        return str(self), self.subject


def subject_of(note: str) -> str:
    """Return the subject of a note; FIT for a plain text."""
    return note.subject if isinstance(note, Note) else FIT


def without_subjects(notes: Iterable[str], *subjects: str) -> list[str]:
    """Return the notes whose subject is none of these."""
    return [note for note in notes if subject_of(note) not in subjects]


def _choose_plural_ending(count: int, ending: str = "s") -> str:
    """Return the ending of a plural after a count; the empty text after 1."""
    return "" if count == 1 else ending


@dataclass(frozen=True)
class Validation:
    """Figures of rows that the network has not seen, and the setting that they chose.

    Log densities are means over rows, in nats.
    """

    rows: int
    plug_in: float  # negative log density of the network itself
    scaled_plug_in: float  # the same with the dispersion that is best for these rows
    # of the predictive: each half of the rows under the setting that the other half chose
    predictive: float
    gain: float  # plug_in − predictive
    gain_error: float  # its standard error
    # factor on the dispersion (noise, temperature, …) that is best for the network itself
    network_spread: float
    words: str  # `network_spread` in words, such as over-confident; empty without a dispersion
    spread: float  # factor on the dispersion that was chosen beside the doubt
    precision: float  # factor on the prior precisions of the trained weights' scale that was chosen
    settings: int  # how many were compared
    coverage: dict[str, float]  # level -> share of rows inside the intervals or sets of that level
    held_out: bool = False  # whether the rows were a share of the training data
    mode: str = TILT  # the one that was chosen
    # By what the outputs of most rows are divided, for the length of their features; None: no row
    # is scaled by itself.
    row_scales: tuple[float, float] | None = None
    # how many settings were left out because their curvature could not be factorised
    unfactorised: int = 0

    def lines(self) -> list[str]:
        """Return the lines of the report about the validation rows."""
        caveat = ""
        if self.held_out:
            caveat = (
                "; the network may have seen them in its training, then they are too optimistic"
            )

        dispersion = self.words or "the likelihood has no dispersion to choose"
        lines = [
            f"validation   {self.rows:,} rows chose between {self.settings} settings{caveat}",
            f"             negative log density a row: network {self.plug_in:.4g}, rescaled "
            f"{self.scaled_plug_in:.4g}, predictive {self.predictive:.4g} (cross-fitted; gain "
            f"{self.gain:.3g} ± {self.gain_error:.1g})",
            f"             {dispersion}; {self._choice_in_words}",
        ]
        if self.unfactorised:
            lines.append(
                "             settings left out because their curvature cannot be factorised: "
                f"{self.unfactorised}"
            )
        if self.row_scales is not None:
            low, high = self.row_scales
            lines.append(
                "             its logits grow too fast with the length of the features: each "
                f"row's are divided by a number of its own, {low:.2g} to {high:.2g} for most of "
                "these rows"
            )

        if self.coverage:
            shares = ", ".join(
                f"{share:.1%} at {float(level):.0%}" for level, share in self.coverage.items()
            )
            lines.append(f"             coverage: {shares}")

        return lines

    @property
    def _choice_in_words(self) -> str:
        """Return the words for the chosen mode and dispersion."""
        if self.mode == POLISH:
            return (
                "these rows prefer the last layer fitted again on the training rows (polish), "
                f"with a factor of {self.spread:.3g}"
            )
        return f"beside the doubt a factor of {self.spread:.3g} was chosen"


@dataclass(frozen=True)
class Report:
    """What `fit` saw and did. `print(posterior.report)` is meant to be read."""

    n: int  # rows seen
    weight: float  # sum of the row weights
    parameters: int  # how many are free
    names: tuple[str, ...]  # of the free parameters
    outputs: int  # how many the network has
    likelihood: str  # its description
    structure: str  # the name of the curvature's structure
    blocks: dict[str, str]  # layer -> structure
    mode: str  # POLISH, TILT or AS_IS
    residual: float  # √(g₀ᵀH⁻¹g₀) before: distance to the mode in posterior standard deviations
    residual_after: float
    steps: int  # Newton steps of polish
    output_shift: float  # root mean square change of the outputs by polish, in units of the noise
    passes: int  # over the data
    memory: int  # bytes of statistics and factorisation
    notes: tuple[str, ...] = ()
    prior: str = ""
    convention: str = EXACT  # where the prior enters
    output: str = ""  # the part of the network's answer that is f, if it is a part
    gaussian: str = LAPLACE  # which Gaussian over θ
    rounds: int = 0  # of a variational Gaussian: passes over the data or their stored features
    validation: Validation | None = None  # None: no rows that the network has not seen were given
    choice: str = ""  # why the structure was chosen, where none was asked for

    @property
    def residual_per_parameter(self) -> float:
        """Return the residual for each parameter, `residual` / √P.

        It is about how many posterior standard deviations each parameter is off its mode.
        """
        return self.residual / math.sqrt(self.parameters)

    @property
    def _gaussian_in_words(self) -> str:
        """Return the words for the Gaussian of θ."""
        if self.gaussian == VARIATIONAL:
            return (
                f"variational: nearest to the posterior in KL divergence, found in {self.rounds} "
                "passes"
            )
        return "laplace: at the mode, with the curvature there"

    @property
    def _mode_in_words(self) -> str:
        """Return the words for what was done to θ̂."""
        if self.mode == TILT:
            return "tilted: θ̂ is taken as the mode, the point prediction is your network's own"
        if self.mode == AS_IS:
            return "taken as it is"
        return (
            f"polished in {self.steps} Newton step{_choose_plural_ending(self.steps)}: residual "
            f"now {self.residual_after:.2g}, training outputs moved by "
            f"{self.output_shift:.2g} noise units (rms); your module is unchanged"
        )

    def __str__(self) -> str:
        """Return the report as lines of text, each with its label in the first 13 columns."""
        weighted = "" if math.isclose(self.weight, self.n) else f" (total weight {self.weight:g})"

        # The network's own parameters have the empty layer name.
        blocks = ", ".join(f"{name or 'network'}: {block}" for name, block in self.blocks.items())
        lines = [
            f"n seen       {self.n:,} rows{weighted}, {self.passes} "
            f"pass{_choose_plural_ending(self.passes, 'es')} over the data",
            f"parameters   {self.parameters:,} free "
            f"({', '.join(self.names[:4])}{', …' if len(self.names) > 4 else ''})",
            f"likelihood   {self.likelihood} on {self.outputs} "
            f"output{_choose_plural_ending(self.outputs)}",
            f"structure    {self.structure} "
            f"({blocks}{f'; chosen: {self.choice}' if self.choice else ''})",
            f"prior        {self.prior or 'not described'} (convention: {self.convention})",
            f"residual     {self.residual:.3g} posterior sd from the mode "
            f"({self.residual_per_parameter:.2g} per parameter)",
            f"mode         {self._mode_in_words}",
            f"gaussian     {self._gaussian_in_words}",
            f"memory       {self.memory / 2**20:.1f} MiB",
            *([f"output       {self.output} of the network's answer"] if self.output else []),
            *(self.validation.lines() if self.validation is not None else [NO_VALIDATION]),
            *(f"note         {note}" for note in self.notes),
        ]
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class TuningHistory:
    """Every accepted point of an optimisation, first to last.

    Of a choice by validation rows: every setting that was scored, in the order of the search, then
    the chosen one.
    """

    objective: str
    names: tuple[str, ...]  # of the coordinates: "precision of head", "noise"
    points: Tensor  # (rounds + 1, d), in their own units (not logarithms)
    values: Tensor  # (rounds + 1,): log evidence, or minus a score: larger is better
    gradient: Tensor  # (d,) at the end, in the logarithms of the coordinates
    converged: bool
    at_bound: tuple[str, ...]  # coordinates that ended at the edge of their range
    evaluations: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the first and the last point with their values, in a few lines."""
        changes = ", ".join(
            f"{name} {float(first):.4g} → {float(last):.4g}"
            for name, first, last in zip(self.names, self.points[0], self.points[-1], strict=True)
        )
        lines = [
            f"{self.objective}  {float(self.values[0]):.6g} → {float(self.values[-1]):.6g} in "
            f"{len(self.values) - 1} rounds, {self.evaluations} evaluations"
            + ("" if self.converged else "; NOT converged"),
            changes,
        ]
        if self.at_bound:
            lines.append(f"at the edge of their range: {', '.join(self.at_bound)}")
        return "\n".join([*lines, *self.notes])
