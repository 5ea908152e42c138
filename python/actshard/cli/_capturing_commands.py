"""The command ``actshard capture``."""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

import typer

from actshard.cli._app import output
from actshard.cli._options import (
    JsonOption,
    PadOption,
    QuietOption,
    ShardBytes,
    TargetOptions,
    layers_option,
    refuse_other_options,
)
from actshard.formats import registry

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A model of transformers: its folder or its name on the hub; or MODULE:FUNCTION, a function of (ids, mask).",
        show_default=False,
    ),
]
TextsArgument = Annotated[
    str,
    typer.Argument(
        help="A file, a folder or a glob: .txt (a text per line), .jsonl, .json or .parquet.", show_default=False
    ),
]
FolderArgument = Annotated[str, typer.Argument(help="The folder to create.", show_default=False)]
CaptureFormat = Annotated[str, typer.Option(help=f"Format: {', '.join(registry.written())}.")]
CaptureLayers = Annotated[
    str,
    layers_option(
        "Layers: 0 is the embedding, k the output of block k-1; 0-3 is a range; final_norm; blocks.5.hook_resid_post; or names "
        "of modules. Comma-separated. Default: all integers."
    ),
]
CaptureTokens = Annotated[
    str, typer.Option(help="Tokens to store: all, content, last, mean, or positions, such as 0,-1.")
]
CaptureDtype = Annotated[
    str, typer.Option(help="Dtype to store: float16, bfloat16, ... Default: the model's.", show_default=False)
]
CaptureTokenizer = Annotated[
    str,
    typer.Option(help="A tokenizer: a folder with tokenizer.json. Default: the model's.", show_default=False),
]
TextColumn = Annotated[
    str,
    typer.Option(
        metavar="COLUMN",
        help="Column with the text, the chat or the token ids. Default: text, prompt, messages or input_ids.",
        show_default=False,
    ),
]
CaptureColumns = Annotated[
    str,
    typer.Option(help="Other columns to store: comma-separated names; none. Default: all.", show_default=False),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Longer examples are left empty. Default: the model's maximum.", show_default=False),
]
CutOption = Annotated[bool, typer.Option("--truncate", help="Cut longer examples instead.")]
SpecialTokens = Annotated[
    bool,
    typer.Option("--special-tokens/--no-special-tokens", help="Add the tokenizer's special tokens, such as BOS."),
]
BatchTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Token positions per batch. Default: 4096, on a GPU 16384.", show_default=False),
]
HostMemory = Annotated[str, typer.Option(help="Memory of states on the host.")]
NonfiniteOption = Annotated[str, typer.Option(help="For NaN and infinite values: refuse, or count, which stores them.")]
EstimateOption = Annotated[
    bool, typer.Option("--estimate", help="Print examples, tokens, bytes, files and time; write nothing.")
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue an interrupted capture.")]
PartOfCapture = Annotated[
    str,
    typer.Option(
        metavar="I/N",
        help="Write part I of N, from 0; `actshard merge` combines them. auto: from RANK and WORLD_SIZE.",
        show_default=False,
    ),
]
RevisionOption = Annotated[str, typer.Option(help="Commit, branch or tag of a model of the hub.", show_default=False)]
DeviceOption = Annotated[str, typer.Option(help="Device: cpu, cuda, cuda:1. Default: a GPU, if there is one.")]
ModelOptions = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Argument of from_pretrained, such as dtype=bfloat16. Repeatable."),
]
VllmFolder = Annotated[
    str,
    typer.Option(
        metavar="DIR",
        help="Make a dataset of vLLM's request files in DIR: `actshard capture --from-vllm DIR OUT`.",
        show_default=False,
    ),
]
FollowOption = Annotated[
    bool, typer.Option("--follow", help="vLLM: wait for further files, until Ctrl-C or --idle; --resume continues.")
]
IdleOption = Annotated[
    float | None,
    typer.Option(min=0, help="vLLM: seconds without a new file after which --follow ends.", show_default=False),
]
IncompleteOption = Annotated[
    str,
    typer.Option(
        help="vLLM: files that are truncated or being written at the end: wait, which leaves the dataset unfinished, or skip."
    ),
]
DeleteOption = Annotated[bool, typer.Option("--delete", help="vLLM: delete request files that are committed.")]

_FOLD_OPTIONS = frozenset(
    (
        "to",
        "layers",
        "dtype",
        "option",
        "from_vllm",
        "follow",
        "idle",
        "incomplete",
        "delete",
        "resume",
        "quiet",
        "json",
    )
)
"""Options of ``--from-vllm``."""


def capture_command(
    context: typer.Context,
    model: ModelArgument,
    texts: TextsArgument = "",
    out: FolderArgument = "",
    to: CaptureFormat = registry.DEFAULT_FORMAT,
    layers: CaptureLayers = "",
    tokens: CaptureTokens = "all",
    dtype: CaptureDtype = "",
    tokenizer: CaptureTokenizer = "",
    text: TextColumn = "",
    columns: CaptureColumns = "",
    max_tokens: MaxTokens = None,
    truncate: CutOption = False,
    special_tokens: SpecialTokens = True,
    batch_tokens: BatchTokens = None,
    memory: HostMemory = "2GiB",
    on_nonfinite: NonfiniteOption = "refuse",
    estimate: EstimateOption = False,
    resume: ResumeOption = False,
    part: PartOfCapture = "",
    revision: RevisionOption = "",
    device: DeviceOption = "",
    model_option: ModelOptions = None,
    pad: PadOption = False,
    shard_bytes: ShardBytes = "",
    option: TargetOptions = None,
    from_vllm: VllmFolder = "",
    follow: FollowOption = False,
    idle: IdleOption = None,
    incomplete: IncompleteOption = "wait",
    delete: DeleteOption = False,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Compute a model's hidden states of texts and write them as a dataset. Resumable. Models by name need the extra capture.

    Exit status: 0 success, 1 examples were left empty or values are not finite, 3 could not run.
    """
    from actshard.cli import capture as verb
    from actshard.cli.convert import options_named
    from actshard.writing.capturing.transformers_models import named_tokenizer

    if from_vllm:
        refuse_other_options(context, "--from-vllm", _FOLD_OPTIONS)
        ends = {"follow": follow, "idle": idle, "incomplete": incomplete, "delete": delete, "resume": resume}
        _fold(from_vllm, [model, texts, out], to, layers, dtype, option, ends, quiet=quiet, json=json)
    verb.check_places(texts, out)
    result = verb.run(
        verb.model_named(model),
        texts,
        out,
        to,
        quiet=quiet or json,
        layers=verb.layers_named(layers),
        tokens=verb.tokens_named(tokens),
        dtype=dtype or None,
        tokenizer=named_tokenizer(tokenizer) if tokenizer else None,
        text=text or None,
        columns=verb.columns_chosen(columns),
        max_tokens=max_tokens,
        truncate=truncate,
        special_tokens=special_tokens,
        batch_tokens=batch_tokens,
        memory=memory,
        on_nonfinite=verb.nonfinite_named(on_nonfinite),
        estimate=estimate,
        resume=resume,
        part=verb.part_named(part),
        revision=revision or None,
        device=device or None,
        model_options=options_named(model_option or [], "the model", short=False) or None,
        pad=pad,
        shard_bytes=shard_bytes or None,
        options=options_named(option or [], "the target format"),
    )
    output(json, result.as_dict, lambda: verb.show(result))
    raise typer.Exit(verb.exit_status(result))


def _fold(
    requests: str,
    places: list[str],
    to: str,
    layers: str,
    dtype: str,
    option: list[str] | None,
    ends: dict[str, Any],
    *,
    quiet: bool,
    json: bool,
) -> NoReturn:
    """``actshard capture --from-vllm``. ``ends``: the options that decide when it ends, and what becomes of the files."""
    from actshard.cli import capture as verb
    from actshard.cli.convert import options_named

    options = options_named(option or [], "the target format")
    names = verb.layers_named(layers)
    fold = verb.fold(
        requests, places, to, quiet=quiet or json, layers=names, dtype=dtype or None, options=options, **ends
    )
    output(json, fold.as_dict, lambda: verb.show_fold(fold))
    raise typer.Exit(verb.fold_status(fold))
