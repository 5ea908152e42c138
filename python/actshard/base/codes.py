"""Codes of warnings and findings, with their meanings, consequences and remedies.

:func:`actshard.verify` reports findings. Opening a dataset warns about some of them, and other calls have warnings of their own.
Each has a code and a text. Codes are public and stable: they are added, never renamed or removed. Programs should compare codes,
not texts.

Codes that several formats use are declared here, those of one format in its folder. ``scripts/verify_page.py``
generates the tables of ``docs/verify.md`` from them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Severity = Literal["error", "warning", "note"]

ERROR: Severity = "error"
WARNING: Severity = "warning"
NOTE: Severity = "note"


@dataclass(frozen=True)
class Code:
    """A code and its texts.

    Attributes:
        name: the code, lower case with hyphens.
        severity: ``"error"``, ``"warning"`` or ``"note"``.
        meaning: the problem.
        consequence: its effect on readers of the dataset, or on the caller.
        remedy: the recommended action; part of every finding.
    """

    name: str
    severity: Severity
    meaning: str
    consequence: str
    remedy: str


class Remark(str):
    """A warning about a dataset: a str with the code under which :func:`actshard.verify` reports it."""

    code: str

    def __new__(cls, code: str, text: str) -> Remark:
        """``code`` is a key of ``actshard.reading.verifying.CODES``."""
        remark = super().__new__(cls, text)
        remark.code = code
        return remark

    def __reduce__(self) -> tuple[type[Remark], tuple[str, str]]:
        return Remark, (self.code, str(self))

    @classmethod
    def of(cls, text: str) -> Remark:
        """Converts a str to a remark with the code ``reader-warning``; returns a remark unchanged."""
        return text if isinstance(text, Remark) else cls("reader-warning", text)

    def within(self, name: str) -> Remark:
        """Returns the remark prefixed with the name of a part of the dataset."""
        return Remark(self.code, f"{name}: {self}")


_UNREADABLE = "Rows of this file cannot be read."
_REWRITE = "restore it, or write the dataset again"

FINDINGS: dict[str, tuple[Code, ...]] = {
    "Files": (
        Code(
            "unknown-format",
            ERROR,
            "No format recognises the path.",
            "The dataset cannot be opened.",
            "check the path, or name the format (format=, --format)",
        ),
        Code(
            "unfinished",
            ERROR,
            "A writer, a merge, a plan or an upload was interrupted, or is still running.",
            "The dataset cannot be opened.",
            "finish it as described, or write the dataset again",
        ),
        Code(
            "missing-file",
            ERROR,
            "A file that the metadata list, or that belongs between other numbered files, does not exist.",
            "Its rows cannot be read. Without a numbered file, later examples have lower positions.",
            _REWRITE,
        ),
        Code(
            "skipped-numbers",
            NOTE,
            "Numbers of files have gaps, and the program that writes the format skips numbers, too.",
            "If files were lost instead, their examples are missing.",
            "compare the number of examples with that of the source",
        ),
        Code(
            "not-a-file",
            ERROR,
            "A folder or a special file has the name of a data file.",
            _UNREADABLE,
            "move it away and restore the file",
        ),
        Code(
            "unreadable",
            ERROR,
            "The operating system refuses to open or read a file.",
            _UNREADABLE,
            "check permissions and the disk",
        ),
        Code("empty-file", ERROR, "A file has no bytes.", _UNREADABLE, _REWRITE),
        Code(
            "truncated",
            ERROR,
            "A file is shorter than its content requires.",
            "Rows at its end are lost; most formats refuse to open.",
            "copy it again, or write the dataset again",
        ),
        Code(
            "too-long",
            ERROR,
            "A file is longer than the metadata require.",
            "The metadata may belong to another dataset, and rows may be read from wrong offsets.",
            "check that the metadata and the files belong to the same dataset",
        ),
        Code(
            "unlisted-file",
            WARNING,
            "A file looks like part of the dataset, but the metadata do not list it.",
            "Its rows are not read.",
            "remove it, or list it in the metadata",
        ),
        Code(
            "checksum",
            ERROR,
            "A file's checksum differs from the one in the metadata.",
            "The file is damaged or was replaced; reading it raises an error.",
            "copy it again",
        ),
        Code(
            "size-bytes",
            ERROR,
            "A file's size differs from the one in the metadata.",
            "The file is damaged or was replaced; reading it raises an error.",
            "copy it again",
        ),
        Code("gzip", ERROR, "A file is not gzip, or its gzip data are damaged.", _UNREADABLE, "copy it again"),
        Code(
            "unsafe-pickle",
            ERROR,
            "A pickle would import or call something. None of it was run.",
            "actshard refuses to read the file.",
            "do not load it with pickle",
        ),
        Code(
            "chunk-missing",
            WARNING,
            "A chunk of stored tokens, or of values per sample, has no file.",
            "Its rows contain the fill value.",
            "check that the chunk was written",
        ),
        Code(
            "not-listed",
            NOTE,
            "The dataset is on a web server, which cannot list files.",
            "Files that the metadata do not list are not checked.",
            "verify a copy in a bucket or a local folder to check them too",
        ),
        Code(
            "oversized-file",
            WARNING,
            "A torch file stores far more bytes than its tensors have: slices were saved with their whole storage.",
            "The folder is many times larger than necessary, and slow to copy.",
            "save tensor.clone() instead of a slice, or convert the folder",
        ),
        Code(
            "integer-rows",
            WARNING,
            "Rows are 16-bit integers, as programs write the bits of bfloat16 or float16 numbers that have no dtype in numpy.",
            "If so, the numbers are meaningless until they are reinterpreted.",
            "name the dtype in the metadata (Zarr: bfloat16 as its dtype; layout.toml: dtype), or reinterpret the rows",
        ),
        Code(
            "unread-object",
            NOTE,
            "A torch file contains objects of other types than plain values, tensors and numpy arrays.",
            "These entries cannot be read. The others can, and nothing was imported or run.",
            "save such entries as plain values if they matter; loading the file with pickle imports what it names",
        ),
        Code(
            "record-checksum",
            ERROR,
            "The CRC-32 of a record of a zip archive differs from the one in its directory.",
            "The values in it may be wrong.",
            "copy the file again from its source",
        ),
    ),
    "Metadata and tables": (
        Code(
            "metadata",
            ERROR,
            "A field of the metadata is missing or wrong.",
            "The dataset, or the part that the field describes, cannot be read.",
            "correct the field",
        ),
        Code(
            "format",
            ERROR,
            "A file contradicts its format, or another file of the dataset.",
            "The dataset, or a part of it, cannot be read.",
            _REWRITE,
        ),
        Code(
            "unsupported",
            ERROR,
            "A version or a dtype is not supported.",
            "The dataset, or a part of it, cannot be read.",
            "upgrade actshard, or convert with the original system",
        ),
        Code(
            "header",
            ERROR,
            "A safetensors header breaks a rule of its format.",
            _UNREADABLE,
            "copy the file again, or write the dataset again",
        ),
        Code(
            "version",
            WARNING,
            "The dataset has a newer version than actshard knows.",
            "Fields may have another meaning.",
            "upgrade actshard",
        ),
        Code(
            "count-claim",
            ERROR,
            "A count in the metadata differs from the number found.",
            "Examples or rows may be missing.",
            "correct the count, or restore the missing files",
        ),
        Code(
            "claim",
            WARNING,
            "A value in the metadata differs from the files.",
            "The value in the files is used.",
            "trust the files; correct the metadata",
        ),
        Code(
            "dtype-claim",
            WARNING,
            "The dtype in the metadata differs from the dtype of the files.",
            "The dtype of the files is used.",
            "trust the files; correct the descriptor",
        ),
        Code(
            "address-out-of-range",
            ERROR,
            "An address points outside its file.",
            "The rows of this example cannot be read.",
            "write the index again",
        ),
        Code(
            "address-overlap",
            ERROR,
            "Two examples or tokens have the same row.",
            "At least one of them returns the rows of another.",
            "write the index again",
        ),
        Code(
            "duplicate-sample",
            ERROR,
            "A sample number, line or shard occurs twice.",
            "Sample numbers are ambiguous.",
            "merge again, or renumber the samples",
        ),
        Code(
            "layout",
            NOTE,
            "The layout is unusual but supported.",
            "None for actshard; the original system may not read it.",
            "nothing needs to be done",
        ),
        Code(
            "reader-warning",
            WARNING,
            "Opening the dataset issues a warning without its own code.",
            "See the message.",
            "see the message",
        ),
        Code(
            "latent-location",
            ERROR,
            "An entry of sparse latents has an example, token or feature that the store does not have.",
            "Reading it, or all entries, raises an error.",
            "write the file again: uint16 locations wrap above 65,535",
        ),
        Code(
            "duplicate-latent",
            ERROR,
            "A token has two values of one feature, or two files contain one feature.",
            "Counts are too high; a dense array is refused.",
            "write the latents again",
        ),
        Code(
            "token-range",
            ERROR,
            "Token ids are negative, or exceed the tokenizer's vocabulary.",
            "Embedding lookups fail, or use wrong rows.",
            "build the dataset again with that tokenizer",
        ),
        Code(
            "mask-value",
            ERROR,
            "A mask has values other than 0 and 1.",
            "Losses are weighted wrongly.",
            "build the dataset again",
        ),
    ),
    "Values (with `--deep`)": (
        Code(
            "nan",
            ERROR,
            "Rows contain NaN values.",
            "Losses and statistics over these rows become NaN.",
            "leave these examples out, or extract them again",
        ),
        Code(
            "infinite",
            ERROR,
            "Rows contain infinite values.",
            "Losses and statistics over these rows become infinite or NaN.",
            "leave these examples out; float16 overflows at 65,504",
        ),
        Code(
            "zero-row",
            WARNING,
            "All values of a row are zero.",
            "The row may be padding, or may never have been written.",
            "check that the rows were written and are not padding",
        ),
        Code(
            "constant-row",
            WARNING,
            "All values of a row are equal and finite.",
            "The row contains no information.",
            "check how the rows were computed",
        ),
        Code(
            "dead-dimension",
            WARNING,
            "A column is zero in every row.",
            "The dimension contains no information.",
            "check the hook that recorded the activations",
        ),
        Code(
            "constant-dimension",
            WARNING,
            "A column has the same value in every row.",
            "The dimension contains no information.",
            "check the hook that recorded the activations",
        ),
        Code(
            "constant-layer",
            WARNING,
            "All rows of a layer are equal.",
            "The layer contains no information.",
            "leave the layer out; embeddings of one token are equal (layer 0 of last tokens), otherwise check the hook",
        ),
        Code(
            "other-rows",
            ERROR,
            "The rows are not those that actshard wrote, by the digests in the record of the dataset.",
            "The dataset was changed, or damaged, after it was written.",
            "write the dataset again, or restore its files from a copy",
        ),
        Code(
            "other-file",
            WARNING,
            "A file of columns, lengths or metadata is not the one that actshard wrote, by its checksum in the record.",
            "The file was changed, or damaged, after it was written.",
            "restore the file from a copy, unless you changed it",
        ),
        Code(
            "duplicate-example",
            WARNING,
            "Examples have identical rows in every layer.",
            "These examples count more than once.",
            "check for repeated inputs",
        ),
        Code(
            "padded-column",
            WARNING,
            "A column has as many values in every example as the longest example has tokens.",
            "Values of padding are taken for tokens: streams of sequences and keep= refuse the column.",
            "write the column again, with the values of each example's tokens; append() cuts arrays by lengths=",
        ),
        Code(
            "wide-dtype",
            NOTE,
            "Every value has the precision of a narrower dtype.",
            "The dataset takes more space than it needs.",
            "convert with dtype= to save space",
        ),
        Code(
            "mixed-dtypes",
            NOTE,
            "Examples are stored with several dtypes.",
            "Rows of different examples cannot be read into one array without a conversion.",
            "read or convert it with dtype=",
        ),
    ),
}
"""Findings that several formats share, by the heading of their table in docs/verify.md."""

CALLS: tuple[Code, ...] = (
    Code(
        "overflow",
        WARNING,
        "Finite values became infinite in a conversion to a narrower dtype, or were clipped by the scales of other rows.",
        "The batch, array or dataset contains infinite or clipped values.",
        'read with a wider dtype=, or a smaller scale=; write with scales="token", or convert',
    ),
    Code(
        "no-example-chosen",
        WARNING,
        "A selection, a stream, or a dataset's share of a mixture is empty.",
        "No rows of it are read.",
        "check keep=, ignore_labels=, min_token= and max_norm=, the length of examples, or block_size of a mixture; compare a "
        "column of store.table with .to_numpy() == x, or with pyarrow.compute.equal(column, x)",
    ),
    Code(
        "state-without-dataset",
        WARNING,
        "A stream's state from an older release does not name its dataset.",
        "A state of another dataset would not be detected.",
        "check that the state belongs to this dataset",
    ),
    Code(
        "missing-lines",
        WARNING,
        "A file of JSON lines has no line for some samples.",
        "Their columns are null.",
        "add the lines, or expect null values",
    ),
    Code(
        "column-type-changed",
        WARNING,
        "A format stores the values of a column as another type.",
        "The column has this type when it is read.",
        "convert the values before they are appended, or choose another format",
    ),
    Code(
        "many-files",
        WARNING,
        "A dataset takes more than 100,000 files.",
        "Copies, listings and removals are slow, and some file systems limit the number of files.",
        "write a format or version with few large files, such as Zarr with version=3",
    ),
    Code(
        "padding",
        WARNING,
        "A third or more of the bytes of a dataset are padding of short examples.",
        "The dataset takes more space, and more time to write and to copy.",
        "write Zarr with version=3, or a format without padding, such as lmprobe",
    ),
    Code(
        "layer-names-changed",
        WARNING,
        "A format stores numbers of layers as strings, because other layers have strings as names.",
        'These layers are read by their strings: `store.layer("5")`.',
        "name all layers by numbers, or all by strings; or choose Zarr, which stores both",
    ),
    Code(
        "metadata-dropped",
        WARNING,
        "Merged parts have different metadata.",
        "The merged dataset has the first part's; the warning names the fields.",
        "write the parts with equal metadata, or read them together with actshard.concat",
    ),
    Code(
        "plugin-not-used",
        WARNING,
        "A package declares a format that cannot be loaded, or whose name is already in use.",
        "Datasets of that format are not recognised.",
        "upgrade, repair or remove the package",
    ),
    Code(
        "disk-cache",
        WARNING,
        "The disk cache of a remote store cannot be used.",
        "Every read downloads its bytes again.",
        "pass a writable local folder as cache=",
    ),
    Code(
        "sequences-too-long",
        WARNING,
        "Examples have more tokens than a batch of sequences, and too_long= drops or cuts them.",
        "The stream does not contain these tokens; the warning gives their number.",
        'raise batch_tokens, or pass too_long="split"',
    ),
    Code(
        "remote-exact",
        WARNING,
        'A remote store is streamed with shuffle="exact".',
        "Each row may cost a request.",
        'use shuffle="window"',
    ),
    Code(
        "tokenizer-truncates",
        WARNING,
        "The tokenizer truncates texts, as configured in its tokenizer.json.",
        "Tokens after that length are lost.",
        "call no_truncation() on the tokenizer to keep them",
    ),
    Code(
        "no-eos",
        WARNING,
        "Documents are stored without an eos token.",
        "Boundaries between documents are lost in windows.",
        "build the cache with a tokenizer that names its eos token",
    ),
    Code(
        "cache-settings",
        WARNING,
        "A token cache was built with another tokenizer or format than the configuration's.",
        "Token ids and document boundaries are those of the cache.",
        "set the configuration's tokenizer and format to those of the cache, or build the cache again with overwrite=True",
    ),
    Code(
        "unknown-revision",
        WARNING,
        "The hub does not return the commit of a dataset.",
        "A change of the dataset between two runs of a build is not detected.",
        "set revision= to a commit",
    ),
    Code(
        "unused-setting",
        WARNING,
        "A setting of the configuration has no effect.",
        "The build ignores it, as Levanter does.",
        "move it to the place that the message names",
    ),
    Code(
        "records-skipped",
        WARNING,
        "Records of the sources could not be processed and were skipped.",
        "The cache does not contain them.",
        "correct the records that the report lists, and build again",
    ),
    Code(
        "other-unfinished",
        WARNING,
        "resume=True begins a dataset, and one that was requested with other arguments is unfinished next to it.",
        "The examples of the unfinished dataset stay on the disk and are not continued.",
        "repeat the request that began it, or remove its folder",
    ),
    Code(
        "examples-left-empty",
        WARNING,
        "Examples of a capture have no tokens, too many, or lack a chosen position.",
        "They are in the dataset without rows; the column problem contains the reason.",
        "correct the texts, or pass max_tokens= with truncate=True",
    ),
    Code(
        "non-finite-captured",
        WARNING,
        'A model returned NaN or infinite values, and on_nonfinite="count" stored them.',
        "Rows of the dataset contain these values; the warning names the first examples.",
        "correct the model, or store a wider dtype",
    ),
    Code(
        "examples-left-out",
        WARNING,
        'Files of examples are missing, unfinished or damaged, and incomplete="skip" opened the dataset without them.',
        "These examples have no tokens; others move only where files are in the order of their names.",
        'open the dataset again when its writer has finished; without incomplete="skip", reading these examples is an error',
    ),
    Code(
        "requests-left-out",
        WARNING,
        "Request files were truncated, still being written, or of another shape when the dataset of them was finished.",
        "The dataset lacks these requests; the warning names the first ones.",
        "run these requests again, and fold them to another dataset",
    ),
    Code(
        "batch-halved",
        WARNING,
        "A device ran out of memory during a capture.",
        "The capture continues with smaller batches.",
        "pass the batch_tokens= that the warning names",
    ),
)
"""Warnings about calls, not datasets; :func:`actshard.verify` does not report them."""


Concern = Literal["findings", "calls"]
"""Codes of findings about datasets, or of warnings about calls."""

_declared: list[Callable[[Concern], Iterable[Code]]] = []


def declare(provider: Callable[[Concern], Iterable[Code]]) -> None:
    """Adds codes that are declared elsewhere. ``provider`` is called at the first lookup, because it may load formats."""
    _declared.append(provider)
    findings.cache_clear()
    calls.cache_clear()


@functools.cache
def findings() -> Mapping[str, Code]:
    """Returns all findings by code: general ones, then those of formats. If a code is declared twice, the first one is used."""
    return _by_name([code for group in FINDINGS.values() for code in group], "findings")


@functools.cache
def calls() -> Mapping[str, Code]:
    """Returns all warnings about calls by code."""
    return _by_name(list(CALLS), "calls")


def _by_name(general: list[Code], kind: Concern) -> Mapping[str, Code]:
    codes = general + [code for provider in _declared for code in provider(kind)]
    return MappingProxyType({code.name: code for code in reversed(codes)})
