"""Pages as a browser sees them: headless Chromium, where it is installed."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import subprocess
import threading
from dataclasses import replace
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from stamppruner.report import GroupRow, LayerRow, Report, compare

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

REPORT = Report(
    title="STAMP: a & b",
    model="ResNet",
    before={"params": 11_173_962, "macs": 555_422_720, "latency_ms": 8.3},
    after={"params": 2_309_114, "macs": 138_600_111, "latency_ms": 3.9001},
    budget={"macs": 0.25},
    reached={"macs": 0.24953984},
    layers=(LayerRow("conv1", "Conv2d", 3, 3, 64, 21, 1_769_472, 580_608, 1728, 567),),
    groups=(GroupRow("conv1", 64, tuple(range(0, 63, 3))), GroupRow("layer1.conv2", 8, (0, 7))),
    protected={"fc": "writes the model's output"},
    warnings=("the <b>latency</b> did not fall",),
    metrics={"accuracy_after_cut": 0.1 + 0.2},
    timings={"prune": 3.217},
    settings={"seed": 0, "versions": {"torch": "2.6"}},
)


class Numbers(HTMLParser):
    """Exact values by key, the text shown for them, and the record in the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.exact: dict[str, float] = {}
        self.shown: dict[str, str] = {}
        self.record, self._in_script, self._key = "", False, ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self._in_script = tag == "script"
        self._key = found.get("data-key", "") if tag == "data" else ""
        if self._key:
            self.exact[self._key] = float(found["data-value"])

    def handle_data(self, data):
        if self._in_script:
            self.record += data
        elif self._key:
            self.shown[self._key] = data
            self._key = ""

    def handle_endtag(self, tag):
        self._in_script = False


def chromium(url: str, profile: Path, *options: str) -> str:
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-background-networking", f"--user-data-dir={profile}",
        *options, url,
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return ran.stdout


def dom(url: str, profile: Path) -> str:
    """The page after the browser has read it."""
    return chromium(url, profile, "--dump-dom")


LARGE = replace(
    REPORT,
    before={**REPORT.before, "size_bytes": 44_695_848, "activation_bytes": 91_234_567},
    after={**REPORT.after, "size_bytes": 9_236_456, "activation_bytes": 31_234_567},
    layers=tuple(
        LayerRow(f"features.denseblock4.denselayer{i}.conv2", "Conv2d", 1024, 512, 1024, 512,
                 147_456_000, 52_345_678, 36_864, 9216)
        for i in range(8, 16)
    ),
    groups=tuple(
        GroupRow(f"features.denseblock4.denselayer{i}.conv2", 2048, tuple(range(0, 2048, 3)))
        for i in range(8, 16)
    ),
    protected={"features.transition3.conv": "it is read by features.denseblock4.denselayer1.norm1"},
    metrics={
        "target_accuracy_after": 0.91,
        "accuracy_after_cut": 0.8123,
        "accuracy_after_finetune": 0.9321,
    },
)  # fmt: skip
"""Long names and many costs."""

MEASURE = """
const page = document.querySelector("iframe").contentDocument, found = [];
const cut = (box, frame) => box.left < frame.left - 1 || box.right > frame.right + 1;
for (const e of page.querySelectorAll("h1, h2, h3, p, li, th, td, data, code, svg text")) {
  const box = e.getBoundingClientRect(), shown = e.textContent;
  const frame = e.closest("svg")?.getBoundingClientRect() ?? {left: 0, right: innerWidth};
  frame.right = Math.min(frame.right, innerWidth);
  if (box.width && (cut(box, frame) || cut(box, {left: 0, right: WIDTH}))) found.push(shown);
}
document.body.textContent = JSON.stringify(found);
"""
"""What reaches over the sides of the page, or of the picture that it is in."""


def beyond_the_sides(page: str, width: int, folder: Path) -> list[str]:
    """Texts of a page that are cut, in a window of so many pixels."""
    frame = f'<iframe width="{width}" height="900" style="border:0" srcdoc="{escape(page)}">'
    script = MEASURE.replace("WIDTH", str(width))
    (folder / "frame.html").write_text(
        f'<meta charset="utf-8"><body style="margin:0">{frame}</iframe>'
        f"<script>onload = () => {{{script}}}</script>"
    )
    seen = dom((folder / "frame.html").as_uri(), folder / "profile")
    return json.loads(unescape(re.search(r"<body[^>]*>(.*)</body>", seen, re.DOTALL)[1]))


def test_a_phone_shows_a_report_without_scrolling_sideways(tmp_path):
    LARGE.to_html(tmp_path / "report.html")
    assert beyond_the_sides((tmp_path / "report.html").read_text(), 360, tmp_path) == []
    assert "MACs left" in beyond_the_sides(
        (tmp_path / "report.html").read_text().replace("max-width: 34rem", "max-width: 1rem"),
        360,
        tmp_path,
    )


def test_a_phone_cuts_no_label_of_a_plot_and_keeps_the_names_of_networks(tmp_path):
    small = replace(LARGE, after={**LARGE.after, "macs": 13_860_011})
    named = {"random channels of equal widths": small, "magnitude of the first norm": LARGE}
    compare(named).to_html(tmp_path / "comparison.html")
    cut = beyond_the_sides((tmp_path / "comparison.html").read_text(), 360, tmp_path)
    assert not set(named) & set(cut)
    assert "fine-tuned" in cut  # a table of nine columns is scrolled


def test_print_cuts_nothing(tmp_path):
    """The print layout, in a window as wide as a sheet of paper without its margins."""
    LARGE.to_html(tmp_path / "report.html")
    compare({"random channels of equal widths": LARGE}).to_html(tmp_path / "comparison.html")
    for name in ("report", "comparison"):
        page = (tmp_path / f"{name}.html").read_text()
        page = page.replace("@media print", "@media all").replace("@media screen", "@media speech")
        assert beyond_the_sides(page, 700, tmp_path) == [], name


def test_a_report_is_printed_on_few_pages(tmp_path):
    record = Path(__file__).parents[2] / "docs" / "records" / "start.json"
    report = Report.from_json(json.loads(record.read_text()))
    assert len(report.layers) == 41
    report.to_html(tmp_path / "report.html")
    url, pdf = (tmp_path / "report.html").as_uri(), tmp_path / "report.pdf"
    chromium(url, tmp_path / "profile", "--no-pdf-header-footer", f"--print-to-pdf={pdf}")
    assert len(re.findall(rb"/Type\s*/Page\b", pdf.read_bytes())) <= 3


def test_numbers_on_the_page_are_those_of_the_record(tmp_path):
    REPORT.to_html(tmp_path / "report.html")
    seen = Numbers(dom((tmp_path / "report.html").as_uri(), tmp_path / "profile"))
    assert Report.from_json(json.loads(seen.record)) == REPORT
    record = REPORT.to_json()
    for group in ("before", "after", "budget", "reached", "metrics", "timings"):
        for name, value in record[group].items():
            assert seen.exact[f"{group}.{name}"] == value
    assert seen.shown["after.params"] == "2.31M"
    assert seen.shown["reached.macs"] == "25.0%"
    assert seen.shown["metrics.accuracy_after_cut"] == "0.3"


def test_the_page_asks_for_nothing_else(tmp_path):
    """Served from here, only the pages are asked for; and no address is in them."""
    REPORT.to_html(tmp_path / "report.html")
    compare([REPORT]).to_html(tmp_path / "comparison.html")
    asked: list[str] = []

    class Serve(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def do_GET(self):
            asked.append(self.path)
            super().do_GET()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("report", "comparison"):
            url = f"http://127.0.0.1:{server.server_port}/{name}.html"
            page = dom(url, tmp_path / f"profile-{name}")
            assert "STAMP: a &amp; b" in page
            assert not re.search(r"""(src|href|action|data)=["']|url\(|//""", page)
        server.shutdown()
    assert set(asked) - {"/favicon.ico"} == {"/report.html", "/comparison.html"}
