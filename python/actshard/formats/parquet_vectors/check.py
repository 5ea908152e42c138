"""Checks of parquet files with vectors; see docs/formats/parquet_vectors.md."""

from __future__ import annotations

from actshard.base.location import Location
from actshard.formats.format import Tell
from actshard.formats.parquet_vectors.files import sidecar
from actshard.formats.parquet_vectors.read import ParquetDataset
from actshard.formats.report import Report


def check(root: Location, report: Report, tell: Tell) -> None:
    """Decodes every row group, and compares NLA's description with the file."""
    dataset = report.faults.parse(root, lambda: ParquetDataset(root, report.faults, report.layout))
    if dataset is None:
        return
    report.count("files", len(dataset.files))
    if dataset.layers_each > 1:
        names = ", ".join(column.name for column in dataset.columns_found)
        report.add("layout", root, f"columns {names} of three axes are taken as (layer, token, dim)")
    for number, ((file, group), first) in enumerate(zip(dataset.groups, dataset.firsts.tolist(), strict=False)):
        tell("row groups", number, len(dataset.groups))
        lengths = dataset.lengths_in(number)
        for column in dataset.columns_found:
            with report.noting(file.path):
                file.decode(group, column, first, lengths, dataset.d_model)
        with report.noting(file.path):
            file.read(group, list(dataset.column_names))
    _check_description(dataset, report)


def _check_description(dataset: ParquetDataset, report: Report) -> None:
    path = sidecar(dataset.files[0].path)
    extraction = dataset.described.get("extraction")
    if dataset.described.get("kind") != "nla_dataset" or not isinstance(extraction, dict):
        return
    rows = dataset.described.get("row_count")
    if rows is not None and rows != dataset.num_examples:
        report.add("count-claim", path, rows, f"{dataset.num_examples}, as in the file", "field 'row_count'")
    width = extraction.get("d_model")
    if width is not None and width != dataset.d_model:
        report.add("claim", path, width, f"{dataset.d_model}, the size of the vectors", "field 'extraction.d_model'")
    layer = extraction.get("layer_index")
    if "activation_layer" in dataset.column_names and layer is not None:
        with report.noting(path):
            values = set(dataset.columns(["activation_layer"])["activation_layer"].unique().to_pylist())
            if values - {layer}:
                text = f"{layer}, but column activation_layer has {sorted(values, key=str)[:5]}"
                report.add("claim", path, text, "the layer of all rows", "field 'extraction.layer_index'")
