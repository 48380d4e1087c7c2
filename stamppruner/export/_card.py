"""The model card of a slim network: Markdown with a YAML head.

Source: https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from stamppruner.report import Report
from stamppruner.report import format as fmt

_TAGS = ("pruning", "structured-pruning", "pytorch")


def card(
    record: Mapping[str, Any], report: Report | None, repo_id: str, license: str | None
) -> str:
    """The text of a ``README.md``.

    Args:
        record: of the slim file.
        report: of the pruning, if there is one; else the card has the budget alone.
        repo_id: where the network will be found.
        license: of the weights, or None.
    """
    name = fmt.one_line(str(record.get("model_class", "network")).rpartition(".")[2])
    parts = [
        _head(license),
        f"# {name}, pruned",
        f"A {name} whose channels were chosen for one data set and physically removed by "
        "stamppruner. It is an ordinary PyTorch module of its class, with fewer channels.",
        _budget(record.get("budget"), record.get("reached")),
        *(_costs(report) if report is not None else []),
        _loading(record, name, repo_id),
        *(_warnings(report) if report is not None else []),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(license: str | None) -> str:
    """JSON values are YAML values, too."""
    lines = ["---", "library_name: stamppruner"]
    if license is not None:
        lines.append(f"license: {json.dumps(license)}")
    return "\n".join([*lines, "tags:", *(f"- {tag}" for tag in _TAGS), "---"])


def _budget(asked: Any, reached: Any) -> str:
    asked, reached = asked or {}, reached or {}
    rows = [
        [
            fmt.label(name),
            fmt.target(name, asked.get(name)),
            fmt.target(name, reached.get(name), asked.get(name)),
        ]
        for name in dict.fromkeys([*asked, *reached])
    ]
    if not rows:
        return ""
    note = "Percentages are of the full network."
    return f"## Budget\n\n{fmt.markdown_table(['budget', 'asked', 'reached'], rows)}\n\n{note}"


def _costs(report: Report) -> list[str]:
    rows = []
    for name in report.costs:
        before, after = report.before.get(name), report.after.get(name)
        left = fmt.ratio(before, after)
        share = fmt.MISSING if left is None else fmt.share(left)
        rows.append([fmt.label(name), fmt.cost(name, before), fmt.cost(name, after), share])
    table = fmt.markdown_table(["cost", "full", "slim", "left"], rows)
    kept, total = report.kept_channels
    facts = [f"- method: {fmt.one_line(report.title)}"]
    facts += [f"- channels: {kept} of {total} kept in {len(report.groups)} groups"]
    facts += [f"- {fmt.label(name)}: {fmt.number(v)}" for name, v in report.metrics.items()]
    for what, found in (("left whole", report.protected), ("rewired", report.rewired)):
        if found:
            facts.append(f"- {what}: {', '.join(f'`{fmt.one_line(layer)}`' for layer in found)}")
    return [f"## Costs\n\n{table}\n\nA multiply-add counts as one MAC.", "\n".join(facts)]


def _loading(record: Mapping[str, Any], name: str, repo_id: str) -> str:
    shape = record.get("input_shape")
    takes = f" It takes images of shape {tuple(shape)}." if shape else ""
    where = json.dumps(repo_id)
    if record.get("factory"):
        code = f"net = from_pretrained({where})"
    else:
        code = f"net = from_pretrained({where}, make_model)  # makes the full {name}"
    return (
        f"## Use\n\n```python\nfrom stamppruner import from_pretrained\n\n{code}\n```\n\n"
        f"The network comes in evaluation mode, from safetensors: nothing is unpickled.{takes}"
    )


def _warnings(report: Report) -> list[str]:
    if not report.warnings:
        return []
    return ["## Warnings\n\n" + "\n".join(f"- {fmt.one_line(text)}" for text in report.warnings)]
