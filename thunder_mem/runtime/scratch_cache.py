"""Measured scratch of single operations, kept between processes.

``$XDG_CACHE_HOME/thunder_mem`` (by default ``~/.cache/thunder_mem``) has one file for each version of torch and
Thunder, kind of CPU and number of threads. Another file is for Inductor's code for GPUs, which depends only on
versions. A file is read strictly: a file that `Table.save` would not write, or whose figures are impossible on this
machine, is ignored. If the folder cannot be read or written, measurements last for the process. Processes may write at
once: each adds its entries to the present file and replaces the file as a whole. At worst an operation is measured
again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import thunder
import torch

from thunder_mem.memory.outside_input import read_json, replace_file
from thunder_mem.runtime.device_memory import device_memory_bytes
from thunder_mem.runtime.memory_spans import extent
from thunder_mem.runtime.output_layout import Output

__all__ = ["Codec", "Probe", "Table", "kernel_table", "save_tables", "table"]

_FORMAT = 1
_MOST = 50_000  # about 10 MB; beyond it a file begins anew
_MOST_BYTES = 2**26  # a larger file is not ours


@dataclass(frozen=True)
class Probe:
    """A real run: the bytes above the start at its peak and at its end, and its outputs."""

    peak_bytes: int
    end_bytes: int
    outputs: tuple[Output | None, ...] = ()


Codec = tuple[Callable[[Any], Any], Callable[[Any], Any]]


class Table:
    """Probes by a text of all their inputs; the file is read when the table is made.

    Args:
        path: of the file; None keeps nothing.
        machine: the common conditions of all measurements.
        codec: strict conversion of entries other than `Probe` to JSON and back.

    Example:
        >>> kept = Table(None, "this machine")
        >>> kept.add("torch.add(...)", Probe(1024, 1024)); kept.find("torch.add(...)").peak_bytes
        1024
    """

    def __init__(self, path: pathlib.Path | None, machine: str, codec: Codec | None = None) -> None:
        self.path, self.machine = path, machine
        standard: Codec = (_to_json, _from_json)
        self._encode, self._decode = codec or standard
        self._known = self._read()
        self._new: dict[str, Any] = {}

    def find(self, text: str) -> Any:
        """The probe of that text; None if there is none."""
        return self._known.get(_digest(text))

    def add(self, text: str, probe: Any) -> None:
        """Add a probe; `save` writes it."""
        self._known[_digest(text)] = self._new[_digest(text)] = probe

    def save(self) -> None:
        """Add the new probes to the file's present content; do nothing if that is impossible."""
        if self.path is None or not self._new:
            return
        probes = {**self._read(), **self._new}
        probes = probes if len(probes) <= _MOST else dict(self._new)
        self._new.clear()
        data = {
            "format": _FORMAT,
            "machine": self.machine,
            "probes": {digest: self._encode(probe) for digest, probe in probes.items()},
        }
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, json.dumps(data))

    def _read(self) -> dict[str, Any]:
        if self.path is None:
            return {}
        try:
            data = read_json(self.path, _MOST_BYTES)
            if data["format"] != _FORMAT or data["machine"] != self.machine:
                return {}
            return {_checked(digest, str): self._decode(entry) for digest, entry in data["probes"].items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return {}


def table() -> Table:
    """The table of this machine at the present number of threads."""
    return _table(os.environ.get("XDG_CACHE_HOME", ""), torch.get_num_threads())


def kernel_table(software: str, codec: Codec) -> Table:
    """The table of this software's code for GPUs, independent of the machine."""
    return _kernel_table(os.environ.get("XDG_CACHE_HOME", ""), f"{_versions()}, {software}", codec)


def save_tables() -> None:
    """Write the measurements since the last call."""
    for one in _TABLES:
        one.save()


_TABLES: list[Table] = []


@functools.cache
def _table(cache_home: str, threads: int) -> Table:
    machine = f"{_machine()}, {threads} threads"
    _TABLES.append(Table(_path(cache_home, "scratch", machine), machine))
    return _TABLES[-1]


@functools.cache
def _kernel_table(cache_home: str, machine: str, codec: Codec) -> Table:
    _TABLES.append(Table(_path(cache_home, "kernels", machine), machine, codec))
    return _TABLES[-1]


def _path(cache_home: str, name: str, machine: str) -> pathlib.Path | None:
    try:
        # A path that is not absolute is to be ignored, says the XDG specification.
        home = pathlib.Path(cache_home) if os.path.isabs(cache_home) else pathlib.Path.home() / ".cache"
        return home / "thunder_mem" / f"{name}-{_digest(machine)[:16]}.json"
    except RuntimeError:  # no home folder
        return None


@functools.cache
def _machine() -> str:
    cpu = platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{_versions()}, {platform.system()} {platform.machine()}, {cpu}, {torch.backends.cpu.get_cpu_capability()}"


def _versions() -> str:
    return f"torch {torch.__version__} ({torch.version.git_version}), thunder {thunder.__version__}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _to_json(probe: Probe) -> list[Any]:
    outputs = [
        None if o is None else [*o.where, o.storage_bytes, o.shape, o.stride, o.offset, str(o.dtype)]
        for o in probe.outputs
    ]
    return [probe.peak_bytes, probe.end_bytes, outputs]


def _from_json(entry: Any) -> Probe:
    peak_bytes, end_bytes, outputs = _checked(entry, list)
    found: list[Output | None] = []
    for o in _checked(outputs, list):
        if o is None:
            found.append(None)
            continue
        kind, index, storage_bytes, shape, stride, offset, name = _checked(o, list)
        if kind not in ("input", "new"):
            raise ValueError(kind)
        dtype = _checked(getattr(torch, _checked(name, str).removeprefix("torch.")), torch.dtype)
        layout = tuple(_count(n) for n in _checked(shape, list)), tuple(_count(n) for n in _checked(stride, list))
        output = Output((kind, _count(index)), _count(storage_bytes), *layout, _count(offset), dtype)
        if _shown_bytes(output) > output.storage_bytes:
            raise ValueError(f"an output shows {_shown_bytes(output)} bytes of {storage_bytes}")
        found.append(output)
    if not _count(end_bytes) <= _count(peak_bytes) <= device_memory_bytes(torch.device("cpu")):
        raise ValueError(f"{end_bytes} bytes of at most {peak_bytes} are no run of this machine")
    return Probe(peak_bytes, end_bytes, tuple(found))


def _shown_bytes(output: Output) -> int:
    """The bytes of its storage up to an output's end."""
    shown = extent(output.shape, output.stride)
    return (output.offset + shown) * output.dtype.itemsize if shown else 0


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no number from 0 up")
    return value
