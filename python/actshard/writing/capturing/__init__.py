"""From a model to a dataset: ``capture``.

- ``records``, ``column_types``, ``encoding``: texts, files or tables as examples with token ids
- ``choosing``, ``windows``: the chosen tokens; batches of similar lengths
- ``backend``: the interface of models; ``callables``, ``hooks`` and ``transformers_models`` implement it
- ``running``, ``appending``: computes batches, and appends them in another thread
- ``unfinished``: what a resumed capture compares and continues
- ``request_files``: makes a dataset of the files of an inference server, without a model
- ``arguments``: checks the arguments; ``job``: puts them together; ``result``: what is returned
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from numpy.typing import DTypeLike

from actshard.base import _arguments
from actshard.base.layers import Layer
from actshard.formats import registry
from actshard.writing.capturing.arguments import input_settings, model_settings, output_settings, run_settings
from actshard.writing.capturing.backend import TorchModule
from actshard.writing.capturing.callables import States
from actshard.writing.capturing.choosing import Chooser
from actshard.writing.capturing.encoding import Example
from actshard.writing.capturing.job import CaptureJob
from actshard.writing.capturing.result import Captured, Problem
from actshard.writing.capturing.running import CaptureProgress, OnNonfinite

__all__ = ["CaptureProgress", "Captured", "Example", "Problem", "capture"]


def capture(
    model: str | os.PathLike[str] | TorchModule | States,
    texts: str | os.PathLike[str] | Iterable[object],
    path: str | os.PathLike[str],
    format: str = registry.DEFAULT_FORMAT,
    *,
    layers: Layer | Sequence[Layer] | Literal["all"] = "all",
    tokens: Literal["all", "content", "last", "mean"] | int | Sequence[int] | Chooser = "all",
    tokenizer: object = None,
    text: str | None = None,
    columns: Sequence[str] | None = None,
    dtype: DTypeLike | None = None,
    special_tokens: bool = True,
    max_tokens: int | None = None,
    truncate: bool = False,
    batch_tokens: int | None = None,
    memory: int | str = "2GiB",
    on_nonfinite: OnNonfinite = "refuse",
    resume: bool = False,
    part: tuple[int, int] | None = None,
    estimate: bool = False,
    revision: str | None = None,
    device: object = None,
    model_options: Mapping[str, object] | None = None,
    metadata: Mapping[str, object] | None = None,
    pad: bool = False,
    shard_bytes: int | str | None = None,
    options: Mapping[str, object] | None = None,
    progress: Callable[[CaptureProgress], object] | None = None,
) -> Captured:
    """Computes a model's hidden states of texts and writes them as a dataset. Committed examples survive a kill.

    Examples are computed in batches of similar length, padded on the right, and stored in the order of ``texts``. Padding is never
    stored. Only the chosen rows of the chosen layers leave the device; the forward pass ends after the last of these layers.

    The dataset has a column with the texts, the further columns of the inputs, and: ``input_ids``, ``special_tokens_mask`` and,
    unless all tokens are stored, ``positions``, with one value per stored row; ``text_tokens``, tokens of the example; ``problem``,
    why an example has no rows, or null. An example that is empty, too long, lacks a chosen position, or has no chosen token has no
    rows. Examples never shift.

    Args:
        model: the name of a model of transformers on the hub, its folder, or the loaded model; any ``torch.nn.Module``, which is
            called with token ids, and with the mask if ``forward`` has ``attention_mask`` or ``mask``; or a function
            ``(ids, mask) -> {layer: (batch, tokens, d_model)}`` of numpy arrays ``(batch, tokens)``, int64 and bool, that returns
            numpy arrays or torch tensors.
        texts: a file, glob or folder of ``.txt`` (a text per line), ``.jsonl``, ``.json`` or ``.parquet`` files; a list of texts,
            token ids, chats or mappings; a ``pyarrow.Table``, ``datasets.Dataset`` or data frame; or an iterator, without
            ``resume``.
        path: folder of the dataset.
        format: a format that :func:`actshard.create` writes.
        layers: layers to store. Integers name the residual stream: 0 is the embedding, k the output of block k - 1; negative ones
            count from the end. ``"final_norm"`` is the output of the norm after the last block, which is ``hidden_states[-1]`` of
            most decoders. ``"blocks.5.hook_resid_post"`` is 6. Other texts name modules, such as ``"model.layers.5.mlp"``, for
            their output. All layers have one width. Default: all integers.
        tokens: ``"all"``; ``"content"``, all except special tokens; ``"last"``; ``"mean"`` over all tokens; positions, negative
            ones from the end; or a function of an example (``ids``, ``special``, ``text``, ``offsets``, ``columns``) that returns
            positions, or bools per token.
        tokenizer: a tokenizer of transformers, a ``tokenizers.Tokenizer``, a folder with ``tokenizer.json``, or a function from a
            text to ids. Default: that of a named model.
        text: column with the text, the chat (``[{"role": ..., "content": ...}]``) or the token ids. Default: ``text``, ``prompt``,
            ``messages`` or ``input_ids``.
        columns: columns of the inputs to store. Default: all.
        dtype: dtype to store; rows are cast on the device. Default: the model's.
        special_tokens: whether the tokenizer adds its special tokens, such as BOS, to texts.
        max_tokens: longer examples are left empty, or cut with ``truncate``. Default: the model's maximum.
        truncate: cut longer examples at their end.
        batch_tokens: token positions per batch. Default: 4,096, on a GPU 16,384. Halved if the device runs out of memory.
        memory: approximate memory of states on the host. A batch has at most a quarter of it.
        on_nonfinite: ``"refuse"`` raises at the first NaN or infinite value; ``"count"`` stores such rows, counts and names them.
        resume: continue after the committed examples; accept a finished dataset. The model, its weights, the tokenizer, the texts
            and all options that determine the stored values must be the same.
        part: ``(i, n)``: write part i of n, of about equally many examples; :func:`actshard.merge` combines the parts.
        estimate: write nothing, and return predictions: computes some examples to measure the speed.
        revision: commit, branch or tag of a named model.
        device: device to run on. Default: that of the model; for a named model a GPU, if there is one.
        model_options: arguments of ``AutoModel.from_pretrained``, such as ``{"dtype": "bfloat16"}``.
        metadata: further values that the format stores.
        pad: fill short examples, for formats with a constant number of tokens.
        shard_bytes: as for :func:`actshard.create`.
        options: options of the format.
        progress: called with a :class:`CaptureProgress` after each batch.

    Returns:
        A :class:`Captured`: what was written.

    Raises:
        ArgumentError, ArgumentTypeError, DtypeError: invalid arguments, an unknown layer, texts without tokens; another model,
            tokenizer, text or option than the unfinished dataset's.
        FormatError: NaN or infinite values, or an unreadable file of texts.
        ExistsError: ``path`` contains another dataset, or an unfinished one without ``resume``.
        MissingExtraError: ``pip install 'actshard[capture]'``.
        NoMemoryError: a single example does not fit into memory.
    """
    estimates = _arguments.switch(estimate, "estimate")  # checked before a model gets hooks
    job = CaptureJob(
        model_settings(model, layers, dtype, revision, device, model_options),
        input_settings(
            texts,
            tokens,
            tokenizer,
            text,
            columns,
            special_tokens=special_tokens,
            max_tokens=max_tokens,
            truncate=truncate,
        ),
        output_settings(path, format, metadata, options, pad=pad, shard_bytes=shard_bytes, part=part, resume=resume),
        run_settings(batch_tokens, memory, on_nonfinite, progress),
    )
    return job.estimate() if estimates else job.run()
