"""``include-report`` and ``include-run``: recorded runs, as parts of a page."""

import json
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from stamppruner.report import Comparison, Report
from stamppruner.report.html import channels, element, fragment

RECORDS = Path(__file__).parents[1] / "records"


class IncludeReport(Directive):
    """The whole page of a recorded pruning."""

    def run(self) -> list[nodes.Node]:
        path = RECORDS / "start.json"
        self.state.document.settings.env.note_dependency(str(path))
        report = Report.from_json(json.loads(path.read_text("utf-8")))
        return [nodes.raw("", fragment(report).replace("<h1>", "<h2>", 1), format="html")]


class IncludeRun(Directive):
    """What an example printed, and the picture of its report page; the argument is its name."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        path = RECORDS / "examples" / f"{self.arguments[0]}.json"
        self.state.document.settings.env.note_dependency(str(path))
        if not path.is_file():
            raise self.error(f"no record: run python docs/records/record.py {self.arguments[0]}")
        record = json.loads(path.read_text("utf-8"))
        machine = record["machine"]
        caption = nodes.paragraph("", "", nodes.literal("", record["command"]))
        caption += nodes.Text(
            f" printed this, in {record['seconds']:.0f} seconds on {machine['device']} with "
            f"{machine['threads']} thread{'s' * (machine['threads'] > 1)} and torch "
            f"{machine['torch']}:"
        )
        output = nodes.literal_block("", record["output"].rstrip(), language="text")
        return [caption, output, *picture(record)]


def picture(record: dict) -> list[nodes.Node]:
    if record["kind"] == "report":
        markup = element(channels(Report.from_json(record["page"])))
    elif record["kind"] == "comparison":
        markup = Comparison.from_json(record["page"])._repr_html_()
    else:
        return []
    for level in (2, 1):  # below the headings of the page
        for tag in (f"<h{level}>", f"</h{level}>"):
            markup = markup.replace(tag, tag.replace(str(level), str(level + 2)))
    return [nodes.raw("", markup, format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("include-report", IncludeReport)
    app.add_directive("include-run", IncludeRun)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
