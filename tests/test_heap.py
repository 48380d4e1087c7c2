"""While times are measured or weights learn, memory stays with the process; not afterwards."""

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from nets import noise
from torch import nn
from torch.utils.data import TensorDataset

from stamppruner import STAMPConfig, STAMPPruner, TaskSampler, finetune, heap, latency
from stamppruner.heap import memory_kept
from stamppruner.inputs import Inputs
from stamppruner.models import VGG

PAGE = resource.getpagesize()
glibc = pytest.mark.skipif(heap._glibc() is None, reason="needs glibc")


@pytest.fixture(autouse=True)
def defaults(monkeypatch):
    configured = [n for n in os.environ if n.startswith("MALLOC_") and n.endswith("_")]
    for name in (*configured, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


class Large(nn.Module):
    """Activations of 36 MiB, and the pages that each pass brought into memory."""

    PAGES = 36 * (1 << 20) // PAGE

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 9, 1), nn.ReLU(), nn.Conv2d(9, 9, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        )
        self.brought = []

    def forward(self, x):
        before = faults()
        x = self.layers(x)
        self.brought.append(faults() - before)
        return x

    def __deepcopy__(self, memo):  # training steps are measured on copies
        return self


def brought_by(measure):
    """Pages that each measured pass brought."""
    model = Large()
    images = noise(1, 3, 512, 512, dtype=torch.float32)
    getattr(latency, measure)([model], Inputs.of(images, model), samples=4)
    return model.brought


@glibc
@pytest.mark.parametrize("measure", ["latencies_ms", "train_steps_ms"])
def test_measured_passes_reuse_pages(measure):
    """In a new process: whether freed blocks fit the next ones hangs on all earlier ones."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"import test_heap; print(*test_heap.brought_by({measure!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    brought = [int(count) for count in done.stdout.split()]
    assert len(brought) >= 3
    assert max(brought) > 2 * Large.PAGES  # the first pass; by default every one
    assert min(brought) < Large.PAGES


@glibc
def test_memory_is_given_back():
    with memory_kept():
        with torch.no_grad():
            Large()(noise(4, 3, 512, 512, dtype=torch.float32))
        during = resident()
    assert resident() < during - Large.PAGES * PAGE / 2


class Recorder:
    """Stands in for glibc and notes what it is told."""

    def __init__(self):
        self.told = []

    def mallopt(self, option, value):
        self.told.append((option, value))

    def malloc_trim(self, pad):
        self.told.append(pad)


@pytest.fixture
def told(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(heap, "_glibc", lambda: recorder)
    return recorder.told


KEEPS = [(-4, 0), (-1, -1)]
RETURNS = [(-4, 65536), (-3, 32 << 20), (-1, 64 << 20), 0]


def test_the_outermost_and_last_use_decides(told):
    def other():
        with memory_kept():
            entered.set()
            left.wait(60)

    entered, left = threading.Event(), threading.Event()
    thread = threading.Thread(target=other)
    with memory_kept():
        thread.start()
        assert entered.wait(60)
        with memory_kept():
            pass
        assert told == KEEPS
    assert told == KEEPS
    left.set()
    thread.join(60)
    assert told == KEEPS + RETURNS
    with memory_kept():
        assert told == KEEPS + RETURNS + KEEPS


def test_it_is_for_the_cpu(told):
    with memory_kept(torch.device("cuda")):
        pass
    assert told == []


def test_meta_fitting_keeps_memory(told):
    images, labels = torch.randn(16, 3, 8, 8), torch.arange(16) % 4
    net = VGG([[8], [8]], 4)
    config = STAMPConfig(iterations=1, tasks_per_iteration=1, ways=2, shots=2, weight_steps=0)
    seen = []
    STAMPPruner(net, config=config).meta_fit(
        TaskSampler(TensorDataset(images, labels), 2, 2),
        progress=False,
        callback=lambda *_: seen.append(list(told)),
    )
    assert seen == [KEEPS]
    assert told == KEEPS + RETURNS


def test_fine_tuning_keeps_memory(told):
    seen = []
    batches = [(torch.randn(4, 3, 8, 8), torch.arange(4))]
    finetune(VGG([[8], [8]], 4), batches, epochs=1, callback=lambda *_: seen.append(list(told)))
    assert seen == [KEEPS]
    assert told == KEEPS + RETURNS


def test_it_ends_after_an_error(told):
    with pytest.raises(RuntimeError, match="within"), memory_kept():
        raise RuntimeError("within")
    assert told == KEEPS + RETURNS


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_MMAP_MAX_", "7"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_max=7")],
)
def test_a_configured_heap_is_left_alone(told, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with memory_kept():
        pass
    assert told == []


def test_other_systems_have_nothing_to_set(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert heap._glibc() is None
    with memory_kept():
        pass


@glibc
def test_blocks_below_32_mib_come_from_the_heap_afterwards():
    """In a new process, where glibc's threshold is still low."""
    code = (
        "import ctypes; from stamppruner.heap import memory_kept\n"
        "with memory_kept(): pass\n"
        "glibc = ctypes.CDLL(None); glibc.malloc.restype = ctypes.c_void_p\n"
        "def where(mib):\n"
        "    glibc.sbrk.restype = ctypes.c_void_p\n"
        "    return glibc.malloc(ctypes.c_size_t(mib << 20)) < glibc.sbrk(0)\n"
        "print(where(31), where(33))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
