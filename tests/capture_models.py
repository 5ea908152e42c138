"""Models of transformers with random weights, a tokenizer trained on a few sentences, and the oracle of captures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

WORDS = [
    *(
        "the",
        "farmer",
        "takes",
        "a",
        "train",
        "in",
        "the",
        "morning",
        "and",
        "reads",
        "an",
        "old",
        "book",
        "about",
        "rivers",
    ),
    *(
        "while",
        "children",
        "play",
        "near",
        "a",
        "quiet",
        "station",
        "because",
        "winter",
        "has",
        "come",
        "early",
        "this",
        "year",
    ),
]
VOCABULARY = 400
WIDTH, BLOCKS, HEADS = 32, 4, 4


def sentences(count: int, seed: int = 0, longest: int = 40) -> list[str]:
    """Texts of 1 to ``longest`` words."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, longest + 1))) for _ in range(count)]


def trained_tokenizer(side: str = "right", *, template: bool = False) -> Any:
    """A fast tokenizer of transformers, with BOS before each text."""
    import tokenizers
    import transformers

    library = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    specials = ["<unk>", "<bos>", "<eos>", "<pad>", "<|user|>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=specials, show_progress=False)
    library.train_from_iterator(sentences(200, 1), trainer)
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", library.token_to_id("<bos>"))]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>",
        additional_special_tokens=["<|user|>"], padding_side=side,
    )  # fmt: skip
    if template:
        tokenizer.chat_template = (
            "{{ bos_token }}{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '' }}"
            "{{ m.content }}{% endfor %}"
        )
    return tokenizer


def _config(name: str, **fields: Any) -> Any:
    import transformers

    return getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, **fields)


_COMMON = {
    "hidden_size": WIDTH,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": HEADS,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: _config("Llama", **_COMMON, num_key_value_heads=2),
    "gpt2": lambda: _config("GPT2", n_embd=WIDTH, n_layer=BLOCKS, n_head=HEADS, n_positions=128),
    "qwen2": lambda: _config("Qwen2", **_COMMON, num_key_value_heads=2),
    "gemma2": lambda: _config("Gemma2", **_COMMON, num_key_value_heads=2, head_dim=8, sliding_window=8),
    "bert": lambda: _config("Bert", **_COMMON),
    "roberta": lambda: _config("Roberta", **_COMMON, pad_token_id=3),
    "t5": lambda: _config("T5", d_model=WIDTH, num_layers=BLOCKS, num_heads=HEADS, d_ff=64, d_kv=8),
    "opt": lambda: _config("OPT", **{**_COMMON, "ffn_dim": 64, "word_embed_proj_dim": WIDTH}),
    "neox": lambda: _config("GPTNeoX", **_COMMON),
    "mistral": lambda: _config("Mistral", **_COMMON, num_key_value_heads=2, sliding_window=6),
}
"""Kinds of models: decoders with rotary and learned positions, sliding windows, encoders, an encoder-decoder's encoder."""
WITHOUT_NORM = ("bert", "roberta")
"""Kinds whose last hidden state is the output of the last block."""


def model_of(kind: str, *, head: bool = False) -> Any:
    """A model with random weights, in float32."""
    import torch
    import transformers

    torch.manual_seed(7)
    config = CONFIGS[kind]()
    if kind == "t5":
        return (transformers.T5ForConditionalGeneration if head else transformers.T5EncoderModel)(config).eval()
    if head:
        return transformers.AutoModelForCausalLM.from_config(config).eval()
    return transformers.AutoModel.from_config(config).eval()


def blocks_of(model: Any) -> Sequence[Any]:
    """The blocks, by their place in each kind of model."""
    for names in ("layers", "h", "encoder.layer", "encoder.block", "decoder.layers"):
        place = model
        for name in names.split("."):
            place = getattr(place, name, None)
        if place is not None:
            return list(place)
    raise AssertionError(type(model))


def hidden_states(model: Any, ids: Sequence[int]) -> list[np.ndarray]:
    """The oracle: one example, no padding, no mask, hooks by hand: the embedding, and the output of each block, each ``(T, d)``."""
    import torch

    states: list[np.ndarray] = []

    def tensor(value: Any) -> Any:
        return value[0] if isinstance(value, tuple) else value

    blocks = blocks_of(model)

    def before(module: Any, arguments: Any, named: Any) -> None:
        states.append(tensor(arguments or named["hidden_states"])[0].numpy().copy())

    def after(module: Any, arguments: Any, output: Any) -> None:
        states.append(tensor(output)[0].numpy().copy())

    hooks = [blocks[0].register_forward_pre_hook(before, with_kwargs=True)]
    hooks += [block.register_forward_hook(after) for block in blocks]
    with torch.no_grad():
        last = model(input_ids=torch.tensor([list(ids)])).last_hidden_state[0].numpy()
    for hook in hooks:
        hook.remove()
    return [*states, last]
