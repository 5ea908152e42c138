"""Checks of files of ``torch.save``, for all formats that have them."""

from __future__ import annotations

from actshard.base.containers import TorchFile
from actshard.formats.report import Report

_TIMES = 2
"""A file may be this many times as large as its tensors before it is reported."""
_LEAST = 1024
"""Files up to this size in bytes are not reported as too large."""
_SHOWN = 4


def check_torch(file: TorchFile, report: Report) -> None:
    """Checks the size of a file against its tensors, and names objects that are not built; if deep, also checks the checksums."""
    refused = file.refused
    file_bytes, tensors = file.sizes
    # Tensors that are not read, such as sparse ones, have storages, too.
    if file_bytes > max(_TIMES * tensors, _LEAST) and not refused:
        times = f", {file_bytes // tensors} times as many" if tensors else ""
        report.add("oversized-file", file.path, f"{file_bytes} bytes for tensors of {tensors} bytes{times}")
    if refused:
        names = [f"{steps} ({entry.name})" for steps, entry in list(refused.items())[:_SHOWN]]
        rest = f" and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
        report.add("unread-object", file.path, f"entries that are not read: {', '.join(names)}{rest}")
    if report.deep:
        for offset in file.damaged():
            report.add("record-checksum", file.path, "other bytes", "the content of the CRC-32", f"byte {offset}")
