from __future__ import annotations

import io

import pytest

from stamppruner.history import History
from stamppruner.progress import bar


def test_rows_columns_and_gaps() -> None:
    history = History()
    assert history.add(loss=1.0, accuracy=0.5) == {"loss": 1.0, "accuracy": 0.5}
    history.add(loss=0.5)
    assert history["loss"] == [1.0, 0.5]
    assert history["accuracy"] == [0.5]
    assert history["nothing"] == []
    assert len(history) == 2
    assert list(history) == history.rows
    assert History() != history == History(list(history.rows))
    assert len(History()) == 0  # rows are not shared


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("shown", "terminal"), [(True, True), (True, False), (False, True)])
def test_bars_are_drawn_on_terminals_where_wanted(
    shown: bool, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    seen = []
    steps = bar(range(3), description="prune", shown=shown)
    for i in steps:
        steps.set_postfix({"loss": "1"})
        seen.append(i)
    assert seen == [0, 1, 2]
    assert ("prune" in stream.getvalue()) == (shown and terminal)
