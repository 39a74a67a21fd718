"""Plots as SVG text, without a plotting library: points and bars on linear or logarithmic axes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

WIDTH = 760
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 40, 48
ROW = 18
INK, FAINT = "#222222", "#d8d8d8"
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#bf3989", "#57606a", "#0a7ea4")


@dataclass(frozen=True)
class Axis:
    """From data to a position between 0 and 1."""

    low: float
    high: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        if self.logarithmic:
            value, low, high = (math.log(max(v, 1e-12)) for v in (value, self.low, self.high))
        else:
            low, high = self.low, self.high
        return min(max((value - low) / (high - low), 0.0), 1.0)

    def ticks(self) -> list[float]:
        if not self.logarithmic:
            step = 10 ** math.floor(math.log10((self.high - self.low) / 2))
            while (self.high - self.low) / step > 8:
                step *= 2 if str(step)[0] != "2" else 2.5
            first = math.ceil(self.low / step)
            return [step * i for i in range(first, math.floor(self.high / step) + 1)]
        first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
        decades = [10.0**i for i in range(first, last + 1)]
        return decades if len(decades) > 1 else [v for v in (0.25, 0.5, 1, 2, 4) if self.has(v)]

    def has(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass
class Plot:
    """A frame with axes that shapes are added to."""

    title: str
    x: Axis
    y: Axis
    height: int
    left: int = LEFT
    shapes: list[str] = field(default_factory=list)

    def px(self, value: float) -> float:
        return self.left + self.x.at(value) * (WIDTH - self.left - RIGHT)

    def py(self, value: float) -> float:
        return self.height - BOTTOM - self.y.at(value) * (self.height - TOP - BOTTOM)

    def line(
        self, points: Sequence[tuple[float, float]], colour: str = INK, dashed: bool = False
    ) -> None:
        path = " ".join(f"{self.px(x):.1f},{self.py(y):.1f}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.shapes.append(f'<polyline points="{path}" fill="none" stroke="{colour}"{dash}/>')

    def point(self, x: float, y: float, colour: str, tip: str) -> None:
        self.shapes.append(
            f'<circle cx="{self.px(x):.1f}" cy="{self.py(y):.1f}" r="3.2" fill="{colour}" '
            f'fill-opacity="0.75"><title>{escape(tip)}</title></circle>'
        )

    def bar(self, start: float, end: float, y: float, colour: str, tip: str) -> None:
        """Along x, centred on y."""
        first, last = sorted((self.px(start), self.px(end)))
        self.shapes.append(
            f'<rect x="{first:.1f}" y="{self.py(y) - 5:.1f}" width="{max(last - first, 1):.1f}" '
            f'height="10" fill="{colour}" fill-opacity="0.6"><title>{escape(tip)}</title></rect>'
        )

    def text(
        self, x: float, y: float, words: str, anchor: str = "start", colour: str = INK
    ) -> None:
        """At pixels."""
        self.shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">'
            f"{escape(words)}</text>"
        )

    def label_rows(self, names: Sequence[str]) -> None:
        """Names at y = 0, 1, 2, ... left of the frame."""
        for index, name in enumerate(names):
            self.text(self.left - 6, self.py(index) + 4, name, "end")

    def axes(self, x_name: str, y_name: str = "") -> None:
        bottom = self.height - BOTTOM
        for tick in self.x.ticks():
            at = self.px(tick)
            self._grid(f"M{at:.1f} {TOP}V{bottom}")
            self.text(at, bottom + 16, _short(tick), "middle")
        if y_name:
            for tick in self.y.ticks():
                at = self.py(tick)
                self._grid(f"M{self.left} {at:.1f}H{WIDTH - RIGHT}")
                self.text(self.left - 6, at + 4, _short(tick), "end")
            self.text(self.left, TOP - 8, y_name)
        self.text(WIDTH - RIGHT, self.height - 12, x_name, "end")

    def _grid(self, path: str) -> None:
        """Below everything else."""
        self.shapes.insert(0, f'<path d="{path}" stroke="{FAINT}" fill="none"/>')

    def legend(self, entries: Sequence[tuple[str, str]]) -> None:
        """(name, colour) pairs in one line above the frame."""
        at = float(WIDTH - RIGHT)
        for name, colour in reversed(entries):
            self.text(at, TOP - 8, name, "end", colour)
            at -= 7.0 * len(name) + 12

    def render(self) -> str:
        shapes = "\n".join(self.shapes)
        title = f'<text x="{self.left}" y="18" font-size="14">{escape(self.title)}</text>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
            f'font-family="sans-serif" font-size="12">\n'
            f'<rect width="{WIDTH}" height="{self.height}" fill="white"/>\n'
            f"{title}\n{shapes}\n</svg>\n"
        )


def _short(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}"
