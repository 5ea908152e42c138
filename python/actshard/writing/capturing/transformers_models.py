"""Models of transformers, and other torch modules: loads them, and finds the modules of layers by their names.

Integers name the residual stream: 0 is the embedding, the input of the first block; k is the output of block k - 1. The output of
the last block is not ``hidden_states[-1]`` of most decoders, which is the output of their final norm: the layer ``"final_norm"``.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from actshard.base.errors import ArgumentError, MissingExtraError
from actshard.base.layers import Layer, short
from actshard.writing.capturing.hooks import HookPoint, TorchModel, fingerprint

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

FINAL_NORM = "final_norm"
_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "final_norm", "layernorm", "ln_final", "norm_f")
"""Names of the norm that follows the blocks, as a sibling of their list."""
_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers")
_HOOK = re.compile(r"blocks\.(\d+)\.hook_resid_(pre|post)")
_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len")


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model.

    Attributes:
        path: path of their list in the model.
        count: their number.
        norm: path of the final norm; None: the model has none.
    """

    path: str
    count: int
    norm: str | None

    def point(self, layer: Layer, number: int) -> HookPoint:
        """Hook point of the residual stream: 0 is the input of the first block, k the output of block k - 1."""
        if number == 0:
            return HookPoint(layer, f"{self.path}.0", "input")
        return HookPoint(layer, f"{self.path}.{number - 1}")


def torch_model(
    model: str | os.PathLike[str] | torch.nn.Module,
    *,
    revision: str | None,
    device: torch.device | str | int | None,
    options: Mapping[str, object] | None,
) -> TorchModel:
    """Returns a model of transformers, by name or loaded, or another torch module.

    Args:
        model: a name on the hub, a folder, or a ``torch.nn.Module``.
        revision: commit, branch or tag on the hub.
        device: device of the model; None: its own, or a GPU if a named model is loaded and there is one.
        options: arguments of ``AutoModel.from_pretrained``.

    Raises:
        MissingExtraError: torch or transformers is not installed. ArgumentError: the model cannot be loaded.
    """
    if isinstance(model, str | os.PathLike):
        name = os.fspath(model)
        module = _load(name, revision, device, options)
    else:
        for argument, value in (("revision", revision), ("model_options", options)):
            if value is not None:
                raise ArgumentError(f"{argument}: expected the name of a model with it, found a loaded model")
        loaded = getattr(model, "_orig_mod", model)  # compiled code runs no hooks that are added later
        module = loaded if device is None else _moved(loaded, device)
        name = str(getattr(getattr(module, "config", None), "_name_or_path", "") or type(module).__name__)
    config = getattr(module, "config", None)
    trunk = _trunk(module, config)
    text_config: object = (
        config if config is None or not hasattr(config, "get_text_config") else config.get_text_config()
    )
    most_tokens = _most_tokens(text_config)
    return TorchModel(
        name if isinstance(model, str | os.PathLike) else None,
        revision,
        module,
        trunk,
        _provenance(module, name, revision, config),
        lambda layers: hook_points(module, trunk, text_config, layers),
        most_tokens,
        _pad_id(text_config),
        {"use_cache": False},
        _vocabulary(trunk),
        most_tokens if _has_learned_positions(trunk) else None,
    )


def load_tokenizer(name: str, revision: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model on the hub, or of a folder."""
    transformers = _transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"tokenizer: cannot load the tokenizer of {name!r}: {_first_line(error)}. Pass tokenizer="
        ) from error


def named_tokenizer(name: str) -> object:
    """Loads a tokenizer with transformers, which also reads names of the hub and chat templates; else returns the name."""
    try:
        import transformers
    except ImportError:
        return name
    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return name


def _transformers() -> Any:
    try:
        import torch  # noqa: F401 -- transformers is importable without it
        import transformers
    except ImportError as error:
        raise MissingExtraError.of("capturing a model by its name", "capture") from error
    return transformers


def _load(
    name: str, revision: str | None, device: torch.device | str | int | None, options: Mapping[str, object] | None
) -> torch.nn.Module:
    transformers = _transformers()
    import torch

    arguments = {"dtype": "auto", **(options or {})}
    try:
        module, loading = transformers.AutoModel.from_pretrained(
            name, revision=revision, **{**arguments, "output_loading_info": True}
        )
    except MemoryError:
        raise
    except (
        Exception
    ) as error:  # of many libraries: ImportError of a kernel, SafetensorError of a file, AttributeError of a dtype
        raise ArgumentError(f"model: cannot load {name!r}: {_first_line(error)}") from error
    _refuse_random(module, name, loading)
    if device is None and "device_map" not in arguments:
        device = "cuda" if torch.cuda.is_available() else None
    return module if device is None else _moved(module, device)


def _moved(module: torch.nn.Module, device: torch.device | str | int | None) -> torch.nn.Module:
    try:
        return module.to(device)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        raise ArgumentError(f"device: cannot move the model to {device!r:.80}: {_first_line(error)}") from error


def _refuse_random(module: torch.nn.Module, name: str, loading: Mapping[str, Sequence[str | tuple[str, ...]]]) -> None:
    """Raises ArgumentError if weights of the part that runs are not in the files: transformers fills them with random numbers."""
    trunk = {id(parameter) for parameter in _trunk(module, getattr(module, "config", None)).parameters()}
    used = {path for path, parameter in module.named_parameters() if id(parameter) in trunk and "pooler" not in path}
    mismatched = [key if isinstance(key, str) else key[0] for key in loading.get("mismatched_keys", ())]
    random = sorted(used & {*loading.get("missing_keys", ()), *mismatched})
    if random:
        raise ArgumentError(
            f"model: expected all weights of {type(module).__name__} in {name!r}, found none that fit for {len(random)} of them, "
            f"such as {random[0]}: they would be random. Complete the files, or load the model yourself and pass it"
        )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:300]


def _trunk(module: torch.nn.Module, config: PretrainedConfig | None) -> torch.nn.Module:
    """The part of a model to call: without a head, and of an encoder-decoder the encoder."""
    if getattr(config, "is_encoder_decoder", False) and hasattr(module, "get_encoder"):
        return module.get_encoder()
    prefix = getattr(module, "base_model_prefix", "")
    base = getattr(module, prefix, None) if prefix else None
    return module if base is None or not hasattr(base, "forward") else base


def _vocabulary(trunk: torch.nn.Module) -> int | None:
    """Number of token ids that a model of transformers has embeddings for; None: unknown."""
    try:
        embedding = trunk.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    count = getattr(embedding, "num_embeddings", None)
    return count if isinstance(count, int) else None


def _has_learned_positions(trunk: torch.nn.Module) -> bool:
    """Whether positions have embeddings of their own, as in GPT-2 and BERT: others compute longer examples than configured."""
    return any(
        hasattr(module, "num_embeddings") and path.rpartition(".")[2] in _POSITIONS
        for path, module in trunk.named_modules()
    )


_POSITIONS = ("wpe", "position_embeddings", "embed_positions", "position_embedding")


def _most_tokens(config: PretrainedConfig | None) -> int | None:
    if config is None:
        return None
    limits = [getattr(config, name, None) for name in _LIMITS]
    valid_limits = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    if not valid_limits:
        return None
    # RoBERTa and others number positions from their padding id + 1 on.
    offset = (config.pad_token_id or 0) + 1 if getattr(config, "model_type", "") in _OFFSET_POSITIONS else 0
    return valid_limits[0] - offset


def _pad_id(config: PretrainedConfig | None) -> int:
    """An id for padding that the embedding has. RoBERTa numbers positions by it; to other models it makes no difference."""
    pad_id, size = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None)
    return pad_id if isinstance(pad_id, int) and 0 <= pad_id < (size or 1) else 0


_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "longformer", "mpnet", "esm")


def _provenance(
    module: torch.nn.Module, name: str, revision: str | None, config: PretrainedConfig | None
) -> dict[str, object]:
    versions = {}
    for library in ("torch", "transformers"):
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            versions[library] = "unknown"
    parameter = next(module.parameters(), None)
    return {
        "model": name,
        "revision": getattr(config, "_commit_hash", None) or revision,
        "architecture": type(module).__name__,
        "configuration": _digest_of(config),
        "weights": fingerprint(module),
        "model_dtype": None if parameter is None else str(parameter.dtype).removeprefix("torch."),
        "attention": getattr(config, "_attn_implementation", None),
        "versions": versions,
    }


def _digest_of(config: PretrainedConfig | None) -> str | None:
    if config is None or not hasattr(config, "to_dict"):
        return None
    fields = {name: value for name, value in config.to_dict().items() if name not in _UNSTABLE}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=repr).encode()).hexdigest()


_UNSTABLE = ("_name_or_path", "transformers_version", "_commit_hash", "use_cache", "torch_dtype", "dtype")


# -- names of layers -----------------------------------------------------------------------------------------------------


def hook_points(
    module: torch.nn.Module, trunk: torch.nn.Module, config: PretrainedConfig | None, layers: tuple[Layer, ...] | None
) -> list[HookPoint]:
    """Returns the hook points of layers; ``layers=None`` is the residual stream before and after every block.

    Args:
        module: the module whose names are searched.
        trunk: the module with the blocks.
        config: its configuration; None: the module is no model of transformers, and integers name no layers.
        layers: integers, negative ones from the end; ``"final_norm"``; ``"blocks.5.hook_resid_post"`` or ``_pre``; or names of
            modules, whose outputs are taken.

    Raises:
        ArgumentError: an unknown name, with the closest known one.
    """
    blocks = find_blocks(module, trunk, config)
    if layers is None:
        if blocks is None:
            raise ArgumentError(
                f"layers: expected names of modules of {type(module).__name__}, found none. Pass layers="
            )
        layers = tuple(range(blocks.count + 1))
    modules = dict(module.named_modules())
    points = [_point(layer, blocks, modules, type(module).__name__) for layer in layers]
    names = [point.layer for point in points]
    if len(set(names)) < len(names):
        raise ArgumentError(f"layers: expected different layers, found {short(names)}")
    return points


def _point(layer: Layer, blocks: Blocks | None, modules: Mapping[str, torch.nn.Module], kind: str) -> HookPoint:
    if isinstance(layer, int):
        if blocks is None:
            raise ArgumentError(
                f"layers: {layer}: the blocks of {kind} are unknown; pass names of modules, such as {_some(modules)}"
            )
        number = layer + blocks.count + 1 if layer < 0 else layer
        if not 0 <= number <= blocks.count:
            raise ArgumentError(
                f"layers: expected 0 (the embedding) to {blocks.count} (the output of the last block), found {layer}"
            )
        return blocks.point(number, number)
    if blocks is not None:
        if layer == FINAL_NORM:
            if blocks.norm is None:
                raise ArgumentError(
                    f"layers: {FINAL_NORM}: {kind} has no norm after its blocks; its last state is layer {blocks.count}"
                )
            return HookPoint(layer, blocks.norm)
        match = _HOOK.fullmatch(layer)
        if match is not None:
            number = int(match[1]) + (match[2] == "post")
            if int(match[1]) < blocks.count:
                return blocks.point(layer, number)
    if layer in modules and layer:
        return HookPoint(layer, layer)
    names = [name for name in modules if name]
    hooks = (
        []
        if blocks is None
        else [f"blocks.{i}.hook_resid_{side}" for i in range(blocks.count) for side in ("pre", "post")]
    )
    near = get_close_matches(layer, [*names, *hooks, *([FINAL_NORM] if blocks is not None and blocks.norm else [])], 1)
    meant = f". Do you mean {near[0]!r}?" if near else ""
    numbers = "" if blocks is None else f"0 to {blocks.count}, {FINAL_NORM!r}, 'blocks.0.hook_resid_post' or "
    raise ArgumentError(
        f"layers: {layer!r:.100} is not a layer of {kind}; expected {numbers}the name of a module, such as {_some(modules)}{meant}"
    )


def _some(modules: Mapping[str, torch.nn.Module]) -> str:
    """Names of some modules for messages: those of the first block."""
    names = [name for name in modules if name]
    block_names = [name for name in names if re.search(r"\.0\.\w+$", name)]
    return ", ".join(repr(name) for name in (block_names or names)[:3]) or "none"


def find_blocks(module: torch.nn.Module, trunk: torch.nn.Module, config: PretrainedConfig | None) -> Blocks | None:
    """The list of blocks of a model of transformers: of the trunk's lists with the configured length, the outermost one."""
    count = next((value for name in _COUNTS if isinstance(value := getattr(config, name, None), int)), None)
    if count is None:
        return None
    paths = {id(part): path for path, part in module.named_modules()}
    lists: list[tuple[int, str, torch.nn.Module]] = []
    for path, part in trunk.named_modules():
        if type(part).__name__ == "ModuleList" and len(part) == count and id(part) in paths:
            lists.append((path.count("."), paths[id(part)], part))
    if not lists:
        return None
    _, path, _ = min(lists, key=lambda item: item[0])
    parent_path = path.rpartition(".")[0]
    parent = module.get_submodule(parent_path)
    norm = next((name for name in _NORMS if _is_module(getattr(parent, name, None))), None)
    if norm is None and parent_path:
        parent_path = parent_path.rpartition(".")[0]
        parent = module.get_submodule(parent_path)
        norm = next((name for name in _NORMS if _is_module(getattr(parent, name, None))), None)
    return Blocks(path, count, None if norm is None else f"{parent_path}.{norm}".lstrip("."))


def _is_module(value: object) -> bool:
    return hasattr(value, "named_modules")
