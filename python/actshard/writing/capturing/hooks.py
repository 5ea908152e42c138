"""Torch modules as models: hooks on the modules of the layers keep the chosen rows, and the last one ends the forward pass."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike, NDArray

from actshard.base import _arguments
from actshard.base.errors import ArgumentError, DtypeError, UnsupportedError
from actshard.base.layers import Layer, plain
from actshard.writing.capturing.backend import BatchRows, PaddedBatch
from actshard.writing.capturing.callables import different_widths
from actshard.writing.capturing.encoding import Example
from actshard.writing.given import as_numpy

if TYPE_CHECKING:
    from types import ModuleType

    import torch
    from torch.utils.hooks import RemovableHandle

_MASKS = ("attention_mask", "mask")
"""Names of a forward pass' argument for the mask."""
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


@dataclass(frozen=True)
class HookPoint:
    """Where a layer's states are taken.

    Attributes:
        layer: the layer's name.
        path: path of the module in the model, as in ``model.named_modules()``.
        side: whether the module's input or its output.
    """

    layer: Layer
    path: str
    side: str = "output"

    def __str__(self) -> str:
        return f"{self.side} of {self.path}"


@dataclass(frozen=True)
class TorchModel:
    """A torch module that a capture runs.

    Attributes:
        name: the name or folder it was loaded by; None: the caller loaded it.
        revision: commit, branch or tag on the hub.
        module: the module whose names the layers are.
        trunk: the module to call: ``module``, or its part without a head.
        provenance: what identifies it.
        points: returns the hook points of layers; None: of all layers.
        most_tokens: maximum number of tokens; None: unknown.
        pad_id: the id with which examples are filled.
        arguments: further arguments of the forward pass.
        vocabulary: number of token ids; None: unknown.
        positions: number of positions with an embedding; None: positions are not learned, or unknown.
    """

    name: str | None
    revision: str | None
    module: torch.nn.Module
    trunk: torch.nn.Module
    provenance: Mapping[str, object]
    points: Callable[[tuple[Layer, ...] | None], Sequence[HookPoint]]
    most_tokens: int | None = None
    pad_id: int = 0
    arguments: Mapping[str, object] | None = None
    vocabulary: int | None = None
    positions: int | None = None

    def open(
        self, layers: tuple[Layer, ...] | None, dtype: DTypeLike | None, *, first: Example, mean: bool
    ) -> HookedStates:
        """Returns the model with hooks on the layers. Runs it once, with the first tokens of an example."""
        return HookedStates(self, self.points(layers), dtype, first=first, mean=mean)


class _LastLayerError(Exception):
    """Ends a forward pass after its last hook; it is never an error."""


class HookedStates:
    """A torch module as a :class:`~actshard.writing.capturing.backend.Backend`."""

    def __init__(
        self, model: TorchModel, points: Sequence[HookPoint], dtype: DTypeLike | None, *, first: Example, mean: bool
    ) -> None:
        import torch

        self._torch = torch
        self._model, self._points = model, tuple(points)
        self.layers = tuple(point.layer for point in self._points)
        self.most_tokens = model.most_tokens
        self.pad_id: int | None = model.pad_id
        self._device = _device_of(model.trunk, torch)
        self._on_gpu = self._device.type == "cuda"
        self.batch_tokens = 16384 if self._on_gpu else 4096
        self._mask, self._mask_kind, self._arguments = _call_of(model.trunk, model.arguments)
        self.pads = self._mask is not None
        self._copies = torch.cuda.Stream(self._device) if self._on_gpu else None
        self._batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None
        self._kept: dict[int, torch.Tensor] = {}
        self._ends = False
        self._as_dtype: torch.dtype | None = None
        self._was_training = [module for module in model.module.modules() if module.training]
        self._hooks: list[RemovableHandle] = []
        try:
            model.module.eval()
            for number, point in enumerate(self._points):
                self._hooks.append(self._register(number, point))
            self.width, self.dtype = self._probe(first, dtype, mean)
        except BaseException:
            self.close()
            raise
        self._as_dtype = _torch_dtype(self.dtype, torch)
        self._ends = True
        self.provenance: Mapping[str, object] = {
            **model.provenance, "hook_points": {str(point.layer): str(point) for point in self._points},
        }  # fmt: skip

    # -- hooks -----------------------------------------------------------------------------------------------------

    def _register(self, number: int, point: HookPoint) -> RemovableHandle:
        module = self._model.module.get_submodule(point.path)
        if point.side == "input":

            def before(module: torch.nn.Module, arguments: tuple[object, ...], keywords: Mapping[str, object]) -> None:
                self._keep(number, _tensor_of(arguments or tuple(keywords.values()), self._torch, point))

            return module.register_forward_pre_hook(before, with_kwargs=True)

        def after(module: torch.nn.Module, arguments: tuple[object, ...], output: object) -> None:
            self._keep(number, _tensor_of(output, self._torch, point))

        return module.register_forward_hook(after)

    def _keep(self, number: int, states: torch.Tensor) -> None:
        if self._batch is None:
            return  # the model runs for another caller
        ids, mask, rows = self._batch
        point = self._points[number]
        if number in self._kept:
            raise UnsupportedError(
                f"layers: {plain(point.layer)}: {point.path} runs several times in a forward pass; capture the modules inside it"
            )
        examples, tokens = ids.shape
        if tuple(states.shape[:-1]) not in ((examples, tokens), (examples * tokens,)):
            raise UnsupportedError(
                f"layers: {plain(point.layer)}: expected ({examples}, {tokens}, d_model) states as the {point}, found "
                f"{tuple(states.shape)}"
            )
        flat = states.detach().reshape(examples * tokens, states.shape[-1])
        if rows is not None:
            chosen = flat.index_select(0, rows.to(flat.device))  # a copy: later modules may write into their input
        else:
            weights = mask.to(flat.device)
            exact = flat.reshape(examples, tokens, -1).float().masked_fill(~weights[:, :, None], 0)
            chosen = (exact.sum(dim=1) / weights.sum(dim=1, keepdim=True)).to(flat.dtype)
        self._kept[number] = chosen if self._as_dtype is None else chosen.to(self._as_dtype)
        if self._ends and len(self._kept) == len(self._points):
            raise _LastLayerError

    # -- forward passes --------------------------------------------------------------------------------------------

    def _run(self, batch: PaddedBatch) -> list[torch.Tensor]:
        """Runs the model up to its last layer and returns the chosen rows ``(n, d)`` of each layer, on the device."""
        self._check_ids(batch)
        torch = self._torch
        ids = torch.from_numpy(batch.ids).to(self._device, non_blocking=True)
        mask = torch.from_numpy(batch.mask).to(self._device, non_blocking=True)
        rows = None if batch.rows is None else torch.from_numpy(batch.rows).to(self._device, non_blocking=True)
        arguments = dict(self._arguments)
        if self._mask is not None:
            arguments[self._mask] = mask.to(self._mask_kind(torch))
        self._batch, self._kept = (ids, mask, rows), {}
        try:
            with torch.no_grad():  # in inference mode, buffers that a model replaces could not be trained with later
                self._model.trunk(ids, **arguments)
        except _LastLayerError:
            pass
        finally:
            self._batch, states, self._kept = None, self._kept, {}
        missing = [point for number, point in enumerate(self._points) if number not in states]
        if missing:
            raise UnsupportedError(
                f"layers: {plain(missing[0].layer)}: {missing[0].path} did not run in the forward pass of "
                f"{type(self._model.trunk).__name__}"
            )
        return [states[number] for number in range(len(self._points))]

    def _check_ids(self, batch: PaddedBatch) -> None:
        """Raises ArgumentError for a token id that the model has no embedding for."""
        count = self._model.vocabulary
        if count is None:
            return
        outside = np.argwhere((batch.ids < 0) | (batch.ids >= count))
        if len(outside):
            row, column = outside[0].tolist()
            rows = np.arange(len(batch.ids)) if batch.rows is None else batch.rows // batch.ids.shape[1]
            raise ArgumentError(
                f"example {batch.numbers[rows == row][0]}, token {column}: expected a token id from 0 to {count - 1}, which the "
                f"model has embeddings for, found {batch.ids[row, column]}. Pass the model's own tokenizer"
            )

    def _probe(self, first: Example, dtype: DTypeLike | None, mean: bool) -> tuple[int, np.dtype[np.generic]]:
        """Width and dtype of the states of a short example. The whole forward pass runs, to see each module once."""
        ids = first.ids[None, :8]
        rows = None if mean else np.arange(ids.shape[1])
        numbers = np.full(1 if mean else ids.shape[1], first.number)
        states = self._run(PaddedBatch(ids, np.ones(ids.shape, bool), rows, numbers, numbers))
        widths = [int(rows.shape[1]) for rows in states]
        if len(set(widths)) > 1:
            raise ArgumentError(different_widths(self.layers, widths))
        dtypes = list(dict.fromkeys(as_numpy(rows[:0]).dtype for rows in states))
        if dtype is None and len(dtypes) > 1:
            raise DtypeError(f"dtype: the layers have the dtypes {', '.join(map(str, dtypes))}. Pass the one to store")
        return widths[0], dtypes[0] if dtype is None else _arguments.dtype(dtype)[0]

    def start(self, batch: PaddedBatch) -> BatchRows | _Copies:
        """Runs the model. On a GPU the rows are copied on a stream of their own, to pinned memory."""
        states = self._run(batch)
        torch = self._torch
        if self._copies is None:
            return BatchRows([as_numpy(rows) for rows in states], self._finite_on_cpu(states))
        with torch.inference_mode():
            finite = torch.stack([rows.isfinite().all(dim=1).to(self._device) for rows in states])
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copies), torch.inference_mode():
            host = [torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True) for rows in (*states, finite)]
            for pinned, rows in zip(host, (*states, finite), strict=True):
                pinned.copy_(rows, non_blocking=True)
                rows.record_stream(self._copies)
            event = torch.cuda.Event()
            event.record(self._copies)
        return _Copies(host, event)

    def _finite_on_cpu(self, states: Sequence[torch.Tensor]) -> NDArray[np.bool_]:
        """``(layers, n)`` bool: rows with finite values only. A finite sum, which costs a fifth, is enough."""
        torch = self._torch
        with torch.inference_mode():
            sums = torch.stack([rows.sum(dim=1, dtype=torch.float32) for rows in states]).isfinite()
            if not sums.all():
                sums = torch.stack([rows.isfinite().all(dim=1) for rows in states])
        return as_numpy(sums)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether torch, or Python, ran out of memory."""
        kinds = (MemoryError, getattr(self._torch, "OutOfMemoryError", MemoryError))
        return isinstance(error, kinds) or (
            isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _OUT_OF_MEMORY)
        )

    def release(self) -> None:
        """Frees the memory that torch holds for later tensors."""
        gc.collect()
        if self._on_gpu:
            self._torch.cuda.empty_cache()

    def close(self) -> None:
        """Removes the hooks, and returns modules to training that were."""
        for hook in self._hooks:
            hook.remove()
        for module in self._was_training:
            module.training = True


@dataclass(frozen=True)
class _Copies:
    """Rows that are being copied from a GPU; the last array is :attr:`BatchRows.finite`."""

    host: list[torch.Tensor]
    event: torch.cuda.Event

    def wait(self) -> BatchRows:
        """Waits for the copies."""
        self.event.synchronize()
        *layers, finite = (as_numpy(array) for array in self.host)
        return BatchRows(layers, finite)


def _tensor_of(value: object, torch: ModuleType, point: HookPoint) -> torch.Tensor:
    """The states in what a module takes or returns: a tensor, or the first one of a tuple or an output object."""
    if isinstance(value, torch.Tensor):
        return value
    values: Iterable[object] = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    )
    tensor = next((item for item in values if isinstance(item, torch.Tensor)), None)
    if tensor is None:
        raise UnsupportedError(
            f"layers: {plain(point.layer)}: expected a tensor as the {point}, found {type(value).__name__}"
        )
    return tensor


def _device_of(module: torch.nn.Module, torch: ModuleType) -> torch.device:
    parameter = next(module.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _call_of(
    trunk: torch.nn.Module, arguments: Mapping[str, object] | None
) -> tuple[str | None, Callable[[ModuleType], torch.dtype], Mapping[str, object]]:
    """Name and dtype of the mask's argument, and further arguments that the forward pass has."""
    parameters = inspect.signature(trunk.forward).parameters
    mask = next((name for name in _MASKS if name in parameters), None)
    further = {name: value for name, value in (arguments or {}).items() if name in parameters}
    return mask, (lambda torch: torch.int64 if mask == "attention_mask" else torch.bool), further


def _torch_dtype(dtype: np.dtype[np.generic], torch: ModuleType) -> torch.dtype:
    return getattr(torch, str(dtype))


def fingerprint(module: torch.nn.Module) -> str:
    """SHA-256 of the names, shapes and dtypes of a module's parameters, and of about 64 elements of each."""
    import hashlib

    import torch

    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype};".encode())
        if parameter.device.type == "meta" or not parameter.numel():
            continue
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 64)].contiguous().cpu()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
