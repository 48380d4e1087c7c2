"""Safetensors files that are checked, and the JSON records that they carry.

A file written here carries a SHA-256 digest of its header and data among its
metadata, so a damaged file is refused rather than loaded as a silently different network. Files
without one (written by other programs) are read as they are.

Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import load as _load
from safetensors.torch import save as _save
from torch import Tensor

from stamppruner.errors import CheckpointError, reason, shown
from stamppruner.files import PathLike, atomic_write, writable

MAX_HEADER_BYTES = 2**24
"""Longest header that is written and read; other safetensors readers accept 100 MB."""

_MAX_VALUES, _MAX_TENSORS, _MAX_TEXTS = 2**19, 2**16, 2**10
"""Most values in one piece of JSON (each takes up to 30 times the memory of its text), tensors in a
file, and entries of its metadata: what can be read in a second."""

_DIGEST = "stamppruner.sha256"
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_AXES, _MAX_SIZE = 64, 2**62  # what torch can hold
_LENGTH_BYTES = 8  # a safetensors file starts with the length of its header, little-endian


def parse_record(
    metadata: Mapping[str, str], kind: str, version: int, path: PathLike, *, noun: str
) -> dict[str, Any]:
    """The JSON record that a file of ours, a ``noun``, keeps in its metadata under its kind.

    Raises:
        CheckpointError: there is none that can be read, or it is of another version.
    """
    try:
        record = parse_json(metadata[kind])
        found = record["version"]
    except (KeyError, ValueError, TypeError) as error:
        others = [name for name in metadata if name.startswith("stamppruner.") and name != kind]
        why = f"it has no readable {kind!r} metadata"
        if others:
            why = f"it is one of kind {shown(others[0])}, give one of kind {kind!r}"
        raise CheckpointError(f"{path} is not a {noun} of this package: {why}") from error
    if type(found) is not int or found != version:
        short = kind.rpartition(".")[2]
        raise CheckpointError(
            f"{path} has {short} format version {shown(found)}, this package reads {version}: use "
            "the release that wrote it"
        )
    return record


def parse_json(text: str) -> dict[str, Any]:
    """A JSON object that somebody else wrote.

    Raises:
        ValueError: it is none, is nested too deeply, names a key twice, or has too many values.
    """
    values = sum(map(text.count, ",[{"))  # at most, as some are within texts
    if values > _MAX_VALUES:
        raise ValueError(f"it has {values} values, at most {_MAX_VALUES} are read")
    try:
        parsed = json.loads(text, object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"it is {type(parsed).__name__}, not an object")
    return parsed


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Readers disagree about keys that come twice, so a file could be two."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


def write_safetensors(
    path: PathLike, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors and text to one safetensors file, atomically.

    Tensors are moved to the CPU and made contiguous; those that share memory are written in full
    each. The same content gives the same bytes.

    Raises:
        CheckpointError: the file cannot be written, or a value cannot be stored in this format.
    """
    target = writable(path)
    texts = dict(metadata or {})
    _check_content(path, tensors, texts)
    try:
        blob = memoryview(_save(_independent(tensors), texts))
    except (ValueError, TypeError, KeyError, RuntimeError, NotImplementedError) as error:
        raise CheckpointError(
            f"cannot store the tensors in {str(path)!r}: {reason(error)}; give dense tensors of a "
            f"standard dtype and metadata of plain text"
        ) from error
    start = _LENGTH_BYTES + int.from_bytes(blob[:_LENGTH_BYTES], "little")
    header, data = json.loads(bytes(blob[_LENGTH_BYTES:start])), blob[start:]
    header["__metadata__"] = {**texts, _DIGEST: _digest(header, data)}
    encoded = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    if len(encoded) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"cannot write {str(path)!r}: its header would take {len(encoded)} bytes, readers "
            f"accept {MAX_HEADER_BYTES}; store fewer tensors or less metadata"
        )
    try:
        _checked_header(encoded)
    except ValueError as error:
        raise CheckpointError(
            f"cannot write {str(path)!r}, for it could not be read again: {error}; convert the "
            "tensors to a standard dtype, store fewer, or less metadata"
        ) from error

    def write(file: BinaryIO) -> None:
        file.write(len(encoded).to_bytes(_LENGTH_BYTES, "little"))
        file.write(encoded)
        file.write(data)

    atomic_write(target, write)


def read_safetensors(path: PathLike) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors, on the CPU, and metadata of a safetensors file.

    Raises:
        CheckpointError: the file cannot be read, is cut short or damaged, or is of another kind.
    """
    try:
        blob = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise _cannot_read(path, error) from error
    length = _header_length(path, blob[:_LENGTH_BYTES], len(blob))
    start = _LENGTH_BYTES + length
    header = _parse_header(path, blob[_LENGTH_BYTES:start], len(blob) - start)
    metadata = dict(header.get("__metadata__", {}))
    digest = metadata.pop(_DIGEST, None)
    if digest is not None and digest != _digest(header, memoryview(blob)[start:]):
        raise CheckpointError(
            f"{str(path)!r} is damaged: its content does not match its digest; "
            f"copy or write it anew"
        )
    try:
        tensors = _load(blob)
    except Exception as error:  # the library raises many kinds on damaged files
        raise _not_safetensors(path, reason(error)) from error
    return dict(sorted(tensors.items())), metadata


def read_metadata(path: PathLike) -> dict[str, str]:
    """Metadata of a safetensors file; reads its header only, so the digest is not checked.

    Raises:
        CheckpointError: the file cannot be read, is cut short, or is of another kind.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = _header_length(path, file.read(_LENGTH_BYTES), size)
            encoded = file.read(length)
    except (OSError, ValueError) as error:
        raise _cannot_read(path, error) from error
    header = _parse_header(path, encoded, size - _LENGTH_BYTES - length)
    metadata = dict(header.get("__metadata__", {}))
    metadata.pop(_DIGEST, None)
    return metadata


def same_kind(a: torch.dtype, b: torch.dtype) -> bool:
    """Whether numbers of one dtype may stand for those of another: real ones of any precision."""
    return a == b or (a in _REAL and b in _REAL)


def _check_content(path: PathLike, tensors: Mapping[str, Any], metadata: Mapping[Any, Any]) -> None:
    for key, value in metadata.items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise CheckpointError(
                f"cannot write {str(path)!r}: metadata {shown(key)} is {type(value).__name__}; "
                f"keys and values must be text, so encode the value as JSON"
            )
    if _DIGEST in metadata or "__metadata__" in tensors:
        raise CheckpointError(
            f"cannot write {str(path)!r}: the metadata key {_DIGEST!r} and the tensor name "
            f"'__metadata__' are reserved; choose other names"
        )
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.is_meta or tensor.layout != torch.strided:
            kind = type(tensor).__name__ if not isinstance(tensor, Tensor) else "has no dense data"
            raise CheckpointError(
                f"cannot write {str(path)!r}: {name!r} is not a dense tensor ({kind}); "
                f"materialise it first"
            )


def _independent(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors, no two of which share memory."""
    result: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        storage = plain.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != plain.numel() * plain.element_size():
            plain = plain.clone(memory_format=torch.contiguous_format)
        seen.add(plain.untyped_storage().data_ptr())
        result[name] = plain
    return result


def _digest(header: Mapping[str, Any], data: memoryview) -> str:
    """SHA-256 of everything in the file but the digest itself, whatever the order of the header."""
    metadata = {k: v for k, v in (header.get("__metadata__") or {}).items() if k != _DIGEST}
    canonical = json.dumps({**header, "__metadata__": metadata}, sort_keys=True)
    digest = hashlib.sha256(canonical.encode())
    digest.update(data)
    return digest.hexdigest()


def _header_length(path: PathLike, first: bytes, size: int) -> int:
    if size < _LENGTH_BYTES or len(first) < _LENGTH_BYTES:
        raise _truncated(path, f"{size} bytes")
    length = int.from_bytes(first, "little")
    if length > MAX_HEADER_BYTES:
        raise _not_safetensors(
            path, f"its header would take {length} bytes, at most {MAX_HEADER_BYTES} are allowed"
        )
    if length > size - _LENGTH_BYTES:
        raise _truncated(path, f"{size} bytes, the header ends at {length + _LENGTH_BYTES}")
    return length


def _parse_header(path: PathLike, encoded: bytes, data_bytes: int) -> dict[str, Any]:
    """The header, if it has the right form and describes exactly ``data_bytes`` bytes."""
    try:
        header, expected = _checked_header(encoded)
    except ValueError as error:
        raise _not_safetensors(path, reason(error)) from error
    if expected > data_bytes:
        raise _truncated(path, f"{data_bytes} of {expected} bytes of data")
    if expected < data_bytes:
        raise _not_safetensors(path, f"{data_bytes - expected} bytes follow its data")
    return header


def _checked_header(encoded: bytes) -> tuple[dict[str, Any], int]:
    """A header, and how many bytes of data it describes, one tensor behind the other.

    Raises:
        ValueError: it has another form.
    """
    try:
        header = parse_json(encoded.decode())
    except ValueError as error:
        raise ValueError(f"its header cannot be read ({reason(error)[:200]})") from error
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its metadata is not text")
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    if len(tensors) > _MAX_TENSORS or len(metadata) > _MAX_TEXTS:
        raise ValueError(
            f"it has {len(tensors)} tensors and {len(metadata)} entries of metadata, at most "
            f"{_MAX_TENSORS} and {_MAX_TEXTS} are read"
        )
    for name, entry in tensors.items():
        if not _is_entry(entry):
            raise ValueError(f"its header cannot be read ({shown(name)} is {shown(entry)})")
    end = 0
    for first, last in sorted(tuple(entry["data_offsets"]) for entry in tensors.values()):
        if first != end:
            raise ValueError(f"a tensor starts at {first}, where {end} is expected")
        end = last
    return header, end


def _is_entry(entry: Any) -> bool:
    """Whether this describes a tensor, and nothing else, in as many bytes as it takes."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return False
    shape, offsets = entry["shape"], entry["data_offsets"]
    numbers = isinstance(shape, list) and isinstance(offsets, list)
    if not numbers or len(shape) > _MAX_AXES or len(offsets) != 2:
        return False
    if not all(type(n) is int and 0 <= n <= _MAX_SIZE for n in (*shape, *offsets)):
        return False
    bits = _BITS.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    return bits is not None and math.prod(shape) * bits == 8 * (offsets[1] - offsets[0])


def _cannot_read(path: PathLike, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"cannot read {str(path)!r}: {reason(error)}; check the name and the permissions"
    )


def _truncated(path: PathLike, found: str) -> CheckpointError:
    return CheckpointError(
        f"{str(path)!r} is cut short ({found}), or is not a safetensors file; copy or write it anew"
    )


def _not_safetensors(path: PathLike, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{str(path)!r} is not a safetensors file, or is damaged: {reason}; copy or write it anew"
    )
