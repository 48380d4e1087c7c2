"""Draws the pictures of the documentation: ``python docs/pictures/draw.py``.

Diagrams show no measurement, except ``digits.svg``, which is drawn from the record of a run.
"""

import json
import random
from html import escape
from pathlib import Path
from statistics import mean

OUT = Path(__file__).parent
RESULTS = OUT.parents[1] / "benchmarks" / "results"
INK, SOFT, LINE, PANEL = "#1d242b", "#5b6772", "#d8dee4", "#f4f6f8"
KEPT, REMOVED, WARM = "#12466f", "#b9c3cd", "#b35900"


class Picture:
    """Elements on a white card, which is readable on dark pages too."""

    def __init__(self, width: int, height: int, label: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{escape(label)}" font-family="system-ui, sans-serif" font-size="13">',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="{SOFT}"/></marker>'
            "</defs>",
            f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>',
        ]

    def box(self, x, y, w, h, fill=PANEL, stroke=LINE, rx=7, dash=""):
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="{rx}" fill="{fill}" '
            f'stroke="{stroke}"{dashes}/>'
        )

    def text(self, x, y, text, size=13, fill=INK, anchor="middle", weight=400, mono=False):
        family = ' font-family="ui-monospace, monospace"' if mono else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
            f'font-weight="{weight}"{family}>{escape(text)}</text>'
        )

    def arrow(self, *points, colour=SOFT, tip=True, dash=""):
        path = "M" + "L".join(f"{x} {y}" for x, y in points)
        end = ' marker-end="url(#tip)"' if tip else ""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{end}{dashes}/>'
        )

    def ticks(self, x, y, kept, pitch=5, height=16):
        """A row of channels: kept ones tall and dark, removed ones low and light."""
        for i, keep in enumerate(kept):
            h = height if keep else height * 0.36
            self.parts.append(
                f'<rect x="{x + i * pitch}" y="{y + (height - h) / 2:.1f}" '
                f'width="{pitch * 0.72:.1f}" height="{h:.1f}" fill="{KEPT if keep else REMOVED}"/>'
            )

    def grid(self, x, y, rows, columns, side, gone_rows=(), gone_columns=()):
        """A weight matrix; what is cut is light and dashed."""
        for r in range(rows):
            for c in range(columns):
                gone = r in gone_rows or c in gone_columns
                self.parts.append(
                    f'<rect x="{x + c * side}" y="{y + r * side}" width="{side - 2}" '
                    f'height="{side - 2}" fill="{"#ffffff" if gone else KEPT}" '
                    f'stroke="{REMOVED if gone else KEPT}"'
                    + (' stroke-dasharray="2 2"/>' if gone else "/>")
                )

    def write(self, name: str) -> None:
        (OUT / name).write_text("\n".join([*self.parts, "</svg>"]) + "\n")


def idea() -> None:
    p = Picture(820, 336, "One backbone is meta-fitted once; every data set then gets its own net")
    p.text(24, 32, "Once", 15, weight=600, anchor="start")
    p.text(24, 50, "minutes to hours", 12, SOFT, "start")
    for i in range(3):
        p.box(30 + 6 * i, 84 + 6 * i, 118, 74, "#ffffff")
    p.text(101, 128, "reference data", 13)
    p.text(101, 146, "many classes", 12, SOFT)
    p.arrow((164, 133), (193, 133))
    p.box(196, 84, 164, 98)
    p.text(278, 108, "meta_fit", 14, mono=True, weight=600)
    p.text(278, 130, "weights, and a gate", 12, SOFT)
    p.text(278, 147, "on every channel that", 12, SOFT)
    p.text(278, 164, "listens to a set of images", 12, SOFT)
    p.arrow((278, 184), (278, 218))
    p.box(190, 222, 176, 56, "#ffffff", KEPT)
    p.text(278, 246, "one file", 13, weight=600)
    p.text(278, 264, "backbone.stamp.safetensors", 10, SOFT, mono=True)
    p.text(424, 32, "For every data set", 15, weight=600, anchor="start")
    p.text(424, 50, "seconds, in closed form; then fine-tuning, if you like", 12, SOFT, "start")
    rng = random.Random(3)
    rows = (("handwritten digits", 0.22), ("birds", 0.34), ("parts on a belt", 0.15))
    for i, (name, share) in enumerate(rows):
        y = 76 + 84 * i
        p.arrow((368, 250), (392, 250), (392, y + 30), (420, y + 30))
        p.box(424, y, 132, 60, "#ffffff")
        p.text(490, y + 28, name, 13)
        p.text(490, y + 46, "images + labels", 11, SOFT)
        p.arrow((558, y + 30), (594, y + 30))
        p.text(575, y + 21, "prune", 10, SOFT, mono=True)
        p.box(598, y, 198, 60, "#ffffff")
        for line in range(2):
            p.ticks(608, y + 10 + 23 * line, [rng.random() < share for _ in range(36)])
    p.text(796, 326, "its own small network: dark channels are kept", 12, SOFT, "end")
    p.write("idea.svg")


def channels() -> None:
    p = Picture(820, 300, "What goes when a channel goes: a filter, its norm, and its readers")
    p.text(24, 32, "A channel is cut wherever it lives", 15, weight=600, anchor="start")
    p.text(120, 72, "writer: conv1", 13)
    p.grid(66, 84, 6, 6, 18, gone_rows=(1, 4))
    p.text(120, 214, "a filter (row) goes", 12, SOFT)
    p.arrow((184, 138), (214, 138))
    p.text(246, 72, "batch norm", 13)
    p.grid(238, 84, 6, 1, 18, gone_rows=(1, 4))
    p.text(246, 214, "scale, bias,", 12, SOFT)
    p.text(246, 230, "mean, variance", 12, SOFT)
    p.arrow((266, 138), (300, 138))
    p.text(362, 72, "reader: conv2", 13)
    p.grid(308, 84, 6, 6, 18, gone_columns=(1, 4))
    p.text(362, 214, "an input slice", 12, SOFT)
    p.text(362, 230, "(column) goes", 12, SOFT)
    p.arrow((420, 138), (450, 138), tip=False, dash="3 3")
    p.box(470, 58, 326, 190, "#ffffff")
    p.text(486, 82, "What meets is one channel", 13, weight=600, anchor="start")
    p.box(492, 128, 62, 34)
    p.text(523, 150, "conv a")
    p.box(586, 128, 62, 34)
    p.text(617, 150, "conv b")
    p.arrow((478, 145), (490, 145))
    p.arrow((555, 145), (584, 145))
    p.arrow((649, 145), (676, 145))
    p.parts.append(
        f'<circle cx="690" cy="145" r="11" fill="#ffffff" stroke="{SOFT}" stroke-width="1.6"/>'
    )
    p.text(690, 150, "+", 15)
    p.arrow((570, 145), (570, 106), (690, 106), (690, 132))
    p.arrow((702, 145), (722, 145))
    p.box(724, 128, 60, 34)
    p.text(754, 150, "conv c")
    p.text(486, 192, "a and b are summed: a channel goes from both, or", 12, SOFT, "start")
    p.text(486, 209, "stays in both. Concatenations, splits, flattening", 12, SOFT, "start")
    p.text(486, 226, "too are found by probing, not by reading code.", 12, SOFT, "start")
    note = "Where a rule cannot be proved, the layer is left whole and named in the report."
    p.text(24, 280, note, 12, SOFT, "start")
    p.write("channels.svg")


def gates() -> None:
    p = Picture(820, 346, "How channels are chosen: two kinds of evidence, one ranking, a budget")
    p.text(24, 32, "How channels are chosen for a data set", 15, weight=600, anchor="start")
    for i in range(3):
        p.box(30 + 5 * i, 66 + 5 * i, 96, 58, "#ffffff")
    p.text(88, 100, "its images")
    p.text(88, 117, "a set", 11, SOFT)
    p.arrow((140, 100), (166, 100))
    p.box(170, 74, 106, 52)
    p.text(223, 97, "set encoder")
    p.text(223, 114, "→ pseudo image", 11, SOFT)
    p.arrow((278, 100), (304, 100))
    p.box(308, 74, 116, 52)
    p.text(366, 97, "the network")
    p.text(366, 114, "→ o, per channel", 11, SOFT)
    p.arrow((426, 100), (449, 100))
    p.box(452, 66, 172, 68, "#ffffff", KEPT)
    p.text(538, 92, "E[m] = E[π] · ψ(γo + β)", 12.5, weight=600)
    p.text(538, 112, "π: what the reference", 11, SOFT)
    p.text(538, 126, "taught about a channel", 11, SOFT)
    p.box(30, 176, 106, 58, "#ffffff")
    p.text(83, 202, "its labels")
    p.text(83, 219, "with the images", 11, SOFT)
    p.arrow((138, 205), (304, 205))
    p.box(308, 179, 116, 52)
    p.text(366, 202, "Taylor scores")
    p.text(366, 219, "on the target", 11, SOFT)
    p.arrow((426, 205), (534, 205), (534, 172))
    p.text(534, 162, "averaged", 12, SOFT)
    p.arrow((534, 136), (534, 148), tip=False)
    p.arrow((578, 158), (634, 158))
    rng = random.Random(0)
    scores = sorted((rng.random() ** 1.4 for _ in range(28)), reverse=True)
    for i, score in enumerate(scores):
        h = 6 + 92 * score
        p.parts.append(
            f'<rect x="{642 + 5.6 * i:.1f}" y="{182 - h:.1f}" width="4" height="{h:.1f}" '
            f'fill="{KEPT if i < 11 else REMOVED}"/>'
        )
    p.arrow((702.6, 62), (702.6, 188), colour=WARM, tip=False, dash="5 4")
    p.text(708, 74, "budget spent", 12, WARM, "start")
    p.text(736, 204, "channels, best first", 12, SOFT, "middle")
    p.box(24, 262, 772, 64, "#ffffff")
    steps = ("cut", "prove", "re-solve", "fit the head", "fine-tune")
    notes = ("shapes shrink", "equal to the masked net", "weights, by least squares",
             "ridge regression", "as long as you like")  # fmt: skip
    for i, (step, note) in enumerate(zip(steps, notes, strict=True)):
        x = 98 + 154 * i
        p.text(x, 288, f"{i + 1}  {step}", 13, weight=600)
        p.text(x, 308, note, 11, SOFT)
        if i:
            p.arrow((x - 88, 284), (x - 66, 284))
    p.arrow((720, 212), (720, 236), (90, 236), (90, 258))
    p.write("gates.svg")


def digits() -> None:
    """Accuracy of every method on the digits, before and after training; mean of the seeds."""
    record = json.loads((RESULTS / "digits-resnet.json").read_text())
    runs = [{row["method"]: row for row in run["rows"]} for run in record["runs"]]
    methods = list(runs[0])
    p = Picture(820, 80 + 46 * len(methods), "Accuracy on the digits before and after training")
    low, high, left, right = 0.75, 1.0, 210, 780

    def at(value: float) -> float:
        return round(left + (right - left) * (value - low) / (high - low), 1)

    full = runs[0]["full network"]
    for tick in (0.75, 0.80, 0.85, 0.90, 0.95, 1.0):
        p.arrow((at(tick), 30), (at(tick), 40 + 46 * len(methods)), colour=LINE, tip=False)
        p.text(at(tick), 60 + 46 * len(methods), f"{tick:.0%}", 12, SOFT)
    for i, method in enumerate(methods):
        y = 56 + 46 * i
        before = mean(run[method]["accuracy_before"] for run in runs)
        after = mean(run[method]["accuracy"] for run in runs)
        share = mean(run[method]["macs"] for run in runs) / full["macs"]
        p.text(196, y, method, 14, anchor="end", weight=600 if method == "STAMP" else 400)
        p.text(196, y + 16, f"{share:.0%} of the multiply-adds", 11, SOFT, "end")
        p.arrow((at(before), y), (at(after), y), colour=REMOVED, tip=False)
        p.parts.append(
            f'<circle cx="{at(before)}" cy="{y}" r="6" fill="#ffffff" stroke="{WARM}" '
            f'stroke-width="2.5"/><circle cx="{at(after)}" cy="{y}" r="6.5" fill="{KEPT}"/>'
        )
        p.text(at(before), y - 12, f"{100 * before:.1f}", 12, WARM)
        p.text(at(after), y - 12, f"{100 * after:.1f}", 12, KEPT)
    p.parts.append(
        f'<circle cx="24" cy="18" r="5.5" fill="#ffffff" stroke="{WARM}" stroke-width="2.5"/>'
        f'<circle cx="150" cy="18" r="6" fill="{KEPT}"/>'
    )
    p.text(36, 23, "before training", 12, INK, "start")
    p.text(162, 23, "after the same fine-tuning", 12, INK, "start")
    p.write("digits.svg")


PICTURES = (idea, channels, gates, digits)

if __name__ == "__main__":
    for draw in PICTURES:
        draw()
