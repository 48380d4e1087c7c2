"""Folders with a model card, and the Hub: a stand-in for its client records what it is asked."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard
from stripes import loader, stripes, vgg

from stamppruner import (
    Budget,
    PruneResult,
    describe,
    from_pretrained,
    push_to_hub,
    save_pretrained,
)
from stamppruner.baselines import Magnitude
from stamppruner.errors import CheckpointError, ConfigError, MissingExtraError
from stamppruner.export.hub import CARD, CONFIG, REPORT, WEIGHTS
from stamppruner.models import resnet18
from stamppruner.report import Report

FILES = sorted([CARD, CONFIG, REPORT, WEIGHTS])
IMAGES = stripes(2)[0]


@pytest.fixture(scope="module")
def result() -> PruneResult:
    made = Magnitude().prune(vgg(), loader(), Budget(macs=0.5))
    made.evaluate(loader(seed=3))
    return made


@pytest.fixture
def folder(result: PruneResult, tmp_path: Path) -> Path:
    return save_pretrained(result, tmp_path / "net", repo_id="me/net", license="apache-2.0")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def same(model: torch.nn.Module, result: PruneResult) -> bool:
    with torch.no_grad():
        return torch.equal(model(IMAGES), result.model.eval()(IMAGES))


def test_a_folder_gives_the_same_bits_without_the_hub_client(
    folder: Path, result: PruneResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert names(folder) == FILES
    loaded = from_pretrained(folder, vgg)
    assert not loaded.training
    assert same(loaded, result)
    assert same(from_pretrained(str(folder)), result)  # the file names VGG's function
    save_pretrained(result, folder)
    assert names(folder) == FILES


def test_the_card_holds_the_report(folder: Path, result: PruneResult) -> None:
    card = ModelCard.load(folder / CARD)
    assert card.data.library_name == "stamppruner"
    assert card.data.license == "apache-2.0"
    assert "pruning" in card.data.tags
    text = card.text
    assert "| MACs | 50.0% |" in text  # asked
    macs = result.report.reached["macs"]
    assert f"| {100 * macs:.1f}% |" in text
    for cost in ("parameters", "MACs", "size", "latency"):
        assert f"\n| {cost} |" in text
    kept, total = result.report.kept_channels
    assert f"channels: {kept} of {total} kept" in text
    assert "accuracy after cut" in text
    assert 'net = from_pretrained("me/net")' in text
    assert "(3, 8, 8)" in text
    assert Report.from_json(json.loads((folder / REPORT).read_text())) == result.report


def test_the_config_is_short_and_plain(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    assert config["library_name"] == "stamppruner"
    assert config["model_class"].endswith("VGG")
    assert config["budget"] == {"macs": 0.5}
    assert not {"kept", "widths"} & config.keys()


def test_a_file_will_do_and_then_there_is_no_report(result: PruneResult, tmp_path: Path) -> None:
    result.save(tmp_path / "slim.safetensors")
    folder = save_pretrained(tmp_path / "slim.safetensors", tmp_path / "net")
    assert names(folder) == sorted([CARD, CONFIG, WEIGHTS])
    assert (folder / WEIGHTS).read_bytes() == (tmp_path / "slim.safetensors").read_bytes()
    text = (folder / CARD).read_text()
    assert "| MACs | 50.0% |" in text
    assert "## Costs" not in text
    assert same(from_pretrained(folder, vgg), result)


def test_a_card_of_a_network_that_nobody_knows_asks_for_its_function(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stamppruner.export._card import card

    text = card({"model_class": "my.Net\n# x", "budget": None}, None, 'a"b', None)
    assert 'from_pretrained("a\\"b", make_model)' in text
    assert "\n# x" not in text
    assert "license" not in text
    assert "## Budget" not in text


def test_what_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not fit"):
        from_pretrained(folder, lambda: resnet18(6))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="cannot read"):
        from_pretrained(tmp_path / "empty", vgg)
    (folder / WEIGHTS).write_bytes(b"\x80\x04K\x01." * 20)  # a pickle
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        from_pretrained(folder, vgg)
    with pytest.raises(CheckpointError, match="cannot read"):
        save_pretrained(tmp_path / "nothing", tmp_path / "net2")
    assert not (tmp_path / "net2").exists()


# The Hub


class Api:
    """Keeps what is uploaded in a folder."""

    calls: list[tuple[str, dict[str, Any]]]
    store: Path

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def create_repo(self, repo_id: str, **settings: Any) -> None:
        self.calls.append(("create", {"repo_id": repo_id, **self.settings, **settings}))

    def upload_folder(
        self, folder_path: Path, allow_patterns: list[str], **settings: Any
    ) -> SimpleNamespace:
        self.calls.append(("upload", settings))
        sent = [p for p in Path(folder_path).iterdir() if p.name in allow_patterns]
        shutil.rmtree(self.store, ignore_errors=True)
        self.store.mkdir()
        for path in sent:
            shutil.copy(path, self.store)
        return SimpleNamespace(commit_url=f"https://hub/{settings['repo_id']}/commit/1")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Api]:
    Api.calls, Api.store = [], tmp_path / "store"

    def download(repo_id: str, filename: str, **settings: Any) -> str:
        Api.calls.append(("download", {"repo_id": repo_id, **settings}))
        return str(Api.store / filename)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return Api


def test_there_and_back(hub: type[Api], result: PruneResult) -> None:
    url = push_to_hub(result, "me/net", private=True, token="t", branch="b", license="mit")
    assert url == "https://hub/me/net/commit/1"
    assert [name for name, _ in hub.calls] == ["create", "upload"]
    created, uploaded = (settings for _, settings in hub.calls)
    assert created["private"] is True
    assert created["token"] == "t"
    assert created["exist_ok"] is True
    assert uploaded["revision"] == "b"
    assert names(hub.store) == FILES
    assert 'from_pretrained("me/net")' in (hub.store / CARD).read_text()
    assert same(from_pretrained("me/net", vgg, revision="b", local_files_only=True), result)
    assert hub.calls[-1][1]["revision"] == "b"
    assert hub.calls[-1][1]["local_files_only"] is True


def test_folders_and_files_are_pushed(hub: type[Api], folder: Path, tmp_path: Path) -> None:
    (folder / "secret.txt").write_text("not sent")
    push_to_hub(folder, "me/net")
    assert names(hub.store) == FILES
    push_to_hub(folder / WEIGHTS, "me/other", create_pr=True)
    assert hub.calls[-1][1]["create_pr"] is True
    assert describe(hub.store / WEIGHTS)["budget"] == {"macs": 0.5}


def test_nothing_is_sent_of_what_cannot_be_read(hub: type[Api], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        push_to_hub(tmp_path, "me/net")
    with pytest.raises(ConfigError, match="repo_id is 'a/b/c': give 'owner/name'"):
        push_to_hub(tmp_path, "a/b/c")
    assert hub.calls == []


def test_failures_of_the_client_are_named(
    hub: type[Api], result: PruneResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no network\nat all")

    monkeypatch.setattr(Api, "create_repo", fail)
    with pytest.raises(CheckpointError, match=r"push to 'me/net' \(OSError: no network\)"):
        push_to_hub(result, "me/net")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(CheckpointError, match=r"'me/net' is no folder.*no network\)"):
        from_pretrained("me/net", vgg)


def test_names_of_no_repository_are_refused_without_the_network() -> None:
    for name in ("/no/such/folder", "a-typo"):
        with pytest.raises(CheckpointError, match=f"'{name}' is no folder"):
            from_pretrained(name, vgg)


def test_the_client_is_needed_for_the_hub_alone(
    result: PruneResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for call in (lambda: push_to_hub("nowhere", "?"), lambda: from_pretrained("me/net", vgg)):
        with pytest.raises(MissingExtraError, match=r"pip install \"stamppruner\[hub\]\""):
            call()
