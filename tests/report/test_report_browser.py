"""Pages as a browser sees them: headless Chromium, where it is installed."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import subprocess
import threading
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


def dom(url: str, profile: Path, *options: str) -> str:
    """The page after the browser has read it."""
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-background-networking", f"--user-data-dir={profile}",
        *options, "--dump-dom", url,
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return ran.stdout


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
