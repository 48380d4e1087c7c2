"""``include-report``: the report of a recorded run, as a part of a page."""

import json
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from stamppruner.report import Report
from stamppruner.report.html import fragment

RECORD = Path(__file__).parents[1] / "records" / "start.json"


class IncludeReport(Directive):
    def run(self) -> list[nodes.Node]:
        self.state.document.settings.env.note_dependency(str(RECORD))
        report = Report.from_json(json.loads(RECORD.read_text("utf-8")))
        return [nodes.raw("", fragment(report).replace("<h1>", "<h2>", 1), format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("include-report", IncludeReport)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
