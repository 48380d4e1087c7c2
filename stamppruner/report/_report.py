"""The record of one pruning, its text form and its JSON form. The page is made in ``html``."""

from __future__ import annotations

import json
import math
import os
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from stamppruner.errors import CheckpointError, ConfigError
from stamppruner.files import atomic_write
from stamppruner.report import format as fmt
from stamppruner.report.html import fragment, page
from stamppruner.report.reproduce import reproduce

_FORMAT = 1
_NUMBERS = ("before", "after", "budget", "reached", "metrics", "timings")
_WIDTH = 100  # of the text form, in characters
_NAMED_REASONS = 3  # protected layers that the text form names


@dataclass(frozen=True)
class LayerRow:
    """Widths and costs of one layer, before and after; multiply-adds are per sample."""

    name: str
    kind: str
    in_before: int
    in_after: int
    out_before: int
    out_after: int
    macs_before: int
    macs_after: int
    params_before: int
    params_after: int

    def __post_init__(self) -> None:
        for item in fields(self)[2:]:
            object.__setattr__(self, item.name, int(getattr(self, item.name)))


@dataclass(frozen=True)
class GroupRow:
    """A group of channels and the indices, within it, of those that are kept."""

    name: str
    size: int
    kept: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", int(self.size))
        object.__setattr__(self, "kept", tuple(int(channel) for channel in self.kept))


@dataclass(frozen=True)
class Report:
    """What was asked, what was done, and what it cost.

    Print it for a table; a notebook shows it as a page; :meth:`to_json` and :meth:`from_json` are
    exact inverses.

    Attributes:
        title: heading of the report.
        model: class name of the model.
        before: costs of the dense network, by names such as ``params``, ``macs``, ``size_bytes``,
            ``latency_ms``. A multiply-add counts as one MAC.
        after: the same costs of the slim network.
        budget: what was asked. A name that ends with ``_share``, or a bound of at most 1, is a
            share of the dense network; everything else is in the unit of its name.
        reached: what was reached, under the names and in the units of ``budget``.
        layers: the layers in call order.
        groups: the prunable groups.
        protected: layers that were left whole, with the reason.
        rewired: layers that were cut though their surroundings keep their width, with the reason.
        warnings: what the reader should know before trusting the result.
        metrics: numbers such as ``accuracy_before``, ``accuracy_after_cut``.
        timings: seconds by step.
        settings: seed, versions, configuration; anything that JSON can hold.

    Raises:
        ConfigError: a number is not a number, or the settings do not fit into JSON.
    """

    title: str
    model: str
    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)
    budget: Mapping[str, float] | None = None
    reached: Mapping[str, float] | None = None
    layers: tuple[LayerRow, ...] = ()
    groups: tuple[GroupRow, ...] = ()
    protected: Mapping[str, str] = field(default_factory=dict)
    rewired: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            values = getattr(self, name)
            if values is not None:
                plain = {str(key): _plain(f"{name}.{key}", v) for key, v in values.items()}
                object.__setattr__(self, name, plain)
        for name in ("layers", "groups", "warnings"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "protected", dict(self.protected))
        object.__setattr__(self, "rewired", dict(self.rewired))
        try:
            settings = json.loads(json.dumps(dict(self.settings), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the settings of a report do not fit into JSON ({error}): give text, numbers, "
                f"lists and dicts"
            ) from error
        object.__setattr__(self, "settings", settings)

    @property
    def costs(self) -> list[str]:
        """Names of all costs, before's first."""
        return list(dict.fromkeys([*self.before, *self.after]))

    @property
    def targets(self) -> list[str]:
        """Names of all budgets, asked ones first."""
        return list(dict.fromkeys([*(self.budget or {}), *(self.reached or {})]))

    @property
    def kept_channels(self) -> tuple[int, int]:
        """Channels kept and channels in all, over the prunable groups."""
        kept = sum(len(group.kept) for group in self.groups)
        return kept, sum(group.size for group in self.groups)

    def over_budget(self, name: str) -> bool:
        """Whether more than the asked budget ``name`` was used."""
        asked, reached = (self.budget or {}).get(name), (self.reached or {}).get(name)
        return asked is not None and reached is not None and reached > asked * (1 + 1e-9)

    @property
    def latency_setting(self) -> tuple[Any, ...]:
        """How latencies were measured: batch size, device, autocast; equal where comparable."""
        names = ("batch_size", "device", "amp")
        return tuple(self.settings.get(f"latency_{name}") for name in names)

    @property
    def latency_note(self) -> str:
        """The same in words; empty if no latency was measured."""
        samples, device, amp = self.latency_setting
        if samples is None:
            return ""
        how = ", bfloat16 autocast" * bool(amp)
        return f"lower quartile of forward passes of {samples} samples on {device or '?'}{how}"

    def __str__(self) -> str:
        title = fmt.one_line(self.title)
        parts = [f"{title}\n{'=' * len(title)}", self._cost_table(), self._budget_table()]
        parts.append("\n".join(self._facts()))
        parts.append("\n".join(_wrapped("warning: ", text) for text in self.warnings))
        return "\n\n".join(part for part in parts if part)

    def _cost_table(self) -> str:
        rows = []
        for name in self.costs:
            before, after = self.before.get(name), self.after.get(name)
            left = fmt.ratio(before, after)
            rows.append(
                [
                    fmt.label(name),
                    fmt.cost(name, before),
                    "->",
                    fmt.cost(name, after),
                    fmt.MISSING if left is None else fmt.share(left),
                    fmt.reduction(left),
                ]
            )
        return fmt.text_table(["", "before", "", "after", "left", ""], rows) if rows else ""

    def _budget_table(self) -> str:
        rows = [
            [
                fmt.label(name),
                fmt.target(name, (self.budget or {}).get(name)),
                fmt.target(name, (self.reached or {}).get(name), (self.budget or {}).get(name)),
                "over budget" if self.over_budget(name) else "",
            ]
            for name in self.targets
        ]
        return fmt.text_table(["budget", "asked", "reached", ""], rows) if rows else ""

    def _facts(self) -> list[str]:
        kept, total = self.kept_channels
        facts = [("model", self.model)]
        if self.groups:
            facts.append(("channels", f"{kept} of {total} kept in {len(self.groups)} groups"))
        for kind, what, found in (
            ("protected", "left whole", self.protected),
            ("rewired", "cut in surroundings that stay wide", self.rewired),
        ):
            if found:
                named = list(found.items())[:_NAMED_REASONS]
                more = ", ..." if len(found) > _NAMED_REASONS else ""
                listed = ", ".join(f"{name} ({reason})" for name, reason in named)
                facts.append((kind, f"{len(found)} {what}: {listed}{more}"))
        if self.latency_note:
            facts.append(("latency", self.latency_note))
        facts += [(fmt.label(name), fmt.number(v)) for name, v in self.metrics.items()]
        if self.timings:
            steps = (f"{fmt.label(name)} {fmt.seconds(v)}" for name, v in self.timings.items())
            facts.append(("time", ", ".join(steps)))
        facts = [(fmt.one_line(name), value) for name, value in facts]
        width = max(len(name) for name, _ in facts)
        return [_wrapped(f"{name.ljust(width)}  ", value) for name, value in facts]

    def _repr_html_(self) -> str:
        return fragment(self)

    def reproduce(self) -> str:
        """Lines of Python that give the same network again; empty if the settings say too little.

        What only the user knows stands in capitals: ``MODEL``, ``TARGET``, ``PRUNER_FILE``.
        """
        return reproduce(self)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that needs nothing else, neither files nor network.

        Raises:
            CheckpointError: ``path`` cannot be written.
        """
        atomic_write(path, page(self).encode("utf-8", errors="replace"))

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values; ``nan``, ``inf`` and ``-inf`` stand as texts."""
        data: dict[str, Any] = {"format": _FORMAT, **asdict(self)}
        for name in _NUMBERS:
            if data[name] is not None:
                data[name] = {key: _encode(value) for key, value in data[name].items()}
        data["layers"] = [dict(row) for row in data["layers"]]
        data["groups"] = [{**row, "kept": list(row["kept"])} for row in data["groups"]]
        data["warnings"] = list(data["warnings"])
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        """Inverse of :meth:`to_json`.

        Raises:
            CheckpointError: the record is of another format, or lacks or adds fields.
        """
        if data.get("format") != _FORMAT:
            raise CheckpointError(
                f"the report has format {data.get('format')!r}, this version reads {_FORMAT}: "
                f"read it with the version that wrote it"
            )
        values = {key: value for key, value in data.items() if key != "format"}
        _check_fields("report", cls, values)
        try:
            return cls._of(values)
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"the report is damaged ({error!r}): give what Report.to_json returned"
            ) from error

    @classmethod
    def _of(cls, values: dict[str, Any]) -> Report:
        for name in _NUMBERS:
            if values[name] is not None:
                values[name] = {key: _decode(value) for key, value in values[name].items()}
        for name, row_type in (("layers", LayerRow), ("groups", GroupRow)):
            for row in values[name]:
                _check_fields(f"entry of {name}", row_type, row)
            values[name] = tuple(row_type(**row) for row in values[name])
        return cls(**values)


def _wrapped(label: str, text: str) -> str:
    """Text behind its label, further lines below the first."""
    return textwrap.fill(
        fmt.one_line(text),
        width=_WIDTH,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _check_fields(what: str, kind: Any, values: Mapping[str, Any]) -> None:
    expected = {item.name for item in fields(kind)}
    wrong = sorted(expected.symmetric_difference(values))
    if wrong:
        raise CheckpointError(
            f"the {what} lacks, or should not have, {', '.join(wrong)}: "
            f"give what Report.to_json returned"
        )


def _plain(name: str, value: Any) -> float:
    """A Python int or float, also of numpy scalars and of tensors with one element."""
    try:
        item = value.item() if hasattr(value, "item") else value
        return item if isinstance(item, int) else float(item)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{name} of a report is {value!r}, not a number: give an int or a float"
        ) from error


def _encode(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _decode(value: float | str) -> float:
    return float(value) if isinstance(value, str) else value
