"""Captures of torch models equal hooks by hand on each example alone: for kinds of models, sides of padding, choices of tokens."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from capture_models import (
    BLOCKS,
    CONFIGS,
    WIDTH,
    WITHOUT_NORM,
    hidden_states,
    model_of,
    sentences,
    trained_tokenizer,
)

pytestmark = pytest.mark.peers

LAYERS = list(range(BLOCKS + 1))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_each_row_is_that_of_its_example_alone(kind: str, side: str, tmp_path: Path) -> None:
    """Whatever the batches and the tokenizer's padding side: equal to 1e-5, ids and positions exactly."""
    model, tokenizer, texts = model_of(kind), trained_tokenizer(side), sentences(23)
    done = actshard.capture(model, texts, tmp_path / "d", tokenizer=tokenizer, batch_tokens=100)
    store = actshard.open(done.path)
    assert store.layers == tuple(LAYERS)
    assert done.padding > 0, "some batches have padding"
    ids = store.table["input_ids"].to_pylist()
    for example, text in enumerate(texts):
        assert ids[example] == tokenizer(text)["input_ids"]
        expected = hidden_states(model, ids[example])
        for layer in LAYERS:
            states = store.sequence(example, layer)
            assert states.shape == (len(ids[example]), WIDTH)
            np.testing.assert_allclose(states, expected[layer], rtol=0, atol=1e-5)
    assert store.table["text"].to_pylist() == texts
    special = store.table["special_tokens_mask"].to_pylist()
    assert all(mask == [1, *[0] * (len(mask) - 1)] for mask in special), "BOS and nothing else"


@pytest.mark.parametrize("kind", CONFIGS)
def test_equal_batches_are_bit_equal(kind: str, tmp_path: Path) -> None:
    model, texts = model_of(kind), sentences(5)
    done = actshard.capture(model, texts, tmp_path / "d", tokenizer=trained_tokenizer(), batch_tokens=1)
    store = actshard.open(done.path)
    for example, ids in enumerate(store.table["input_ids"].to_pylist()):
        expected = hidden_states(model, ids)
        for layer in LAYERS:
            assert np.array_equal(store.sequence(example, layer), expected[layer])


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_final_norm_is_the_last_hidden_state_and_no_integer_is(kind: str, tmp_path: Path) -> None:
    model, texts = model_of(kind), sentences(3)
    tokenizer = trained_tokenizer()
    if kind in WITHOUT_NORM:
        with pytest.raises(actshard.ArgumentError, match=f"its last state is layer {BLOCKS}"):
            actshard.capture(model, texts, tmp_path / "d", tokenizer=tokenizer, layers="final_norm")
        return
    done = actshard.capture(
        model, texts, tmp_path / "d", "zarr", tokenizer=tokenizer, layers=[BLOCKS, "final_norm"], batch_tokens=1
    )
    store = actshard.open(done.path)
    for example, ids in enumerate(store.table["input_ids"].to_pylist()):
        expected = hidden_states(model, ids)
        assert np.array_equal(store.sequence(example, "final_norm"), expected[-1])
        assert np.array_equal(store.sequence(example, BLOCKS), expected[BLOCKS])
        assert not np.allclose(expected[-1], expected[BLOCKS], atol=1e-3)


@pytest.mark.parametrize("kind", CONFIGS)
def test_integers_below_the_last_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    import torch

    model, texts = model_of(kind), sentences(2)
    done = actshard.capture(model, texts, tmp_path / "d", tokenizer=trained_tokenizer(), batch_tokens=1)
    store = actshard.open(done.path)
    for example, ids in enumerate(store.table["input_ids"].to_pylist()):
        with torch.no_grad():
            states = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
        for layer in LAYERS if kind in WITHOUT_NORM else LAYERS[:-1]:
            assert np.array_equal(store.sequence(example, layer), states[layer][0].numpy()), layer


def test_names_of_hooks_and_modules(tmp_path: Path) -> None:
    model, texts = model_of("llama"), sentences(4)
    names = ["blocks.1.hook_resid_post", "blocks.1.hook_resid_pre", "layers.1", "layers.1.mlp", -1]
    done = actshard.capture(
        model, texts, tmp_path / "d", "zarr", tokenizer=trained_tokenizer(), layers=names, batch_tokens=1
    )
    store = actshard.open(done.path)
    assert store.layers == (*names[:4], BLOCKS)
    assert done.provenance["hook_points"]["blocks.1.hook_resid_pre"] == "output of layers.0"
    for example, ids in enumerate(store.table["input_ids"].to_pylist()):
        expected = hidden_states(model, ids)
        for name, layer in ((names[0], 2), (names[1], 1), (names[2], 2), (BLOCKS, BLOCKS)):
            assert np.array_equal(store.sequence(example, name), expected[layer])
        assert not np.allclose(store.sequence(example, "layers.1.mlp"), expected[2])


@pytest.mark.filterwarnings("ignore:.*example 3. no token is chosen:actshard.base.errors.ActshardWarning")  # one word
def test_chosen_tokens_are_those_of_the_whole_sequences(tmp_path: Path) -> None:
    """On the device, before anything is copied: the last, the mean, positions, and those of a function."""
    import pyarrow.compute as pc

    model, tokenizer, texts = model_of("gpt2"), trained_tokenizer("left"), sentences(17)

    def spaces(example: Any) -> Any:
        """Tokens that begin with a space."""
        return [i for i, (start, end) in enumerate(example.offsets) if example.text[start:end].startswith(" ")]

    choices: dict[str, Any] = {
        "all": "all",
        "last": "last",
        "mean": "mean",
        "two": [0, -1],
        "content": "content",
        "f": spaces,
    }
    stores = {}
    for name, tokens in choices.items():
        done = actshard.capture(
            model, texts, tmp_path / name, tokenizer=tokenizer, layers=[2], tokens=tokens, batch_tokens=90
        )
        stores[name] = actshard.open(done.path)
        assert done.bytes == done.rows * WIDTH * 4
    for example, text in enumerate(texts):
        whole = stores["all"].sequence(example, 2)
        places = {"last": [-1], "two": [0, -1], "content": range(1, len(whole))}
        for name, chosen in places.items():
            assert np.array_equal(stores[name].sequence(example, 2), whole[list(chosen)])
        np.testing.assert_allclose(stores["mean"].sequence(example, 2)[0], whole.mean(axis=0), atol=1e-6)
        positions = stores["f"].table["positions"][example].as_py()
        assert np.array_equal(stores["f"].sequence(example, 2), whole[positions])
        assert len(positions) == text.count(" ")
    assert pc.all(
        pc.equal(stores["all"].table["text_tokens"], pc.list_value_length(stores["all"].table["input_ids"]))
    ).as_py()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5"])
def test_the_forward_pass_ends_after_the_last_layer_and_has_no_head(kind: str, tmp_path: Path) -> None:
    model, texts = model_of(kind, head=True), sentences(6)
    runs: dict[str, int] = {}
    hooks = [
        module.register_forward_hook(lambda *_, name=name: runs.__setitem__(name, runs.get(name, 0) + 1))
        for name, module in model.named_modules()
        if name.endswith(("lm_head", ".0", ".1", ".2"))
    ]
    done = actshard.capture(model, texts, tmp_path / "d", tokenizer=trained_tokenizer(), layers=[0, 1], batch_tokens=1)
    assert len(hooks) > 3
    blocks = {
        path.rpartition(".")[0] for path in (str(p).rpartition(" ")[2] for p in done.provenance["hook_points"].values())
    }
    assert len(blocks) == 1
    (path,) = blocks
    assert runs.get("lm_head", 0) == 0
    assert runs[f"{path}.2"] == 1, "only when the model was looked at"
    assert runs[f"{path}.0"] >= len(texts)


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = model_of("llama").train()
    model.layers[1].eval()
    actshard.capture(model, sentences(3), tmp_path / "d", tokenizer=trained_tokenizer(), layers=[1])
    assert model.training
    assert not model.layers[1].training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_hooks_are_removed_after_an_error(tmp_path: Path) -> None:
    model, tokenizer = model_of("llama").train(), trained_tokenizer()

    wrong: list[dict[str, Any]] = [
        {"estimate": "yes"},
        {"metadata": {"x": object()}},
        {"tokens": lambda example: [0] if example.number == 0 else [True, False]},
        {"format": "lmprobe", "tokens": "last", "max_tokens": 5},
    ]
    for arguments in wrong:
        with pytest.raises(actshard.ActshardError):
            actshard.capture(model, sentences(9), tmp_path / "d", tokenizer=tokenizer, **arguments)
        assert model.training
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_can_be_trained_after_a_capture(tmp_path: Path) -> None:
    """Dynamic rotary embeddings replace a buffer during a forward pass; it must be no inference tensor."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=400, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    actshard.capture(model, [list(range(3, 40))], tmp_path / "d", max_tokens=64)
    assert not any(buffer.is_inference() for buffer in model.buffers())
    ids = torch.arange(3, 43)[None]
    model(ids, labels=ids).loss.backward()


def test_a_compiled_model_runs_its_hooks(tmp_path: Path) -> None:
    import torch

    model = model_of("llama")
    texts, tokenizer = sentences(3), trained_tokenizer()
    actshard.capture(model, texts, tmp_path / "a", tokenizer=tokenizer, layers=[1, "layers.1.mlp"])
    actshard.capture(torch.compile(model), texts, tmp_path / "b", tokenizer=tokenizer, layers=[1, "layers.1.mlp"])
    first, second = actshard.open(tmp_path / "a"), actshard.open(tmp_path / "b")
    assert np.array_equal(first.layer("layers.1.mlp").rows()[:], second.layer("layers.1.mlp").rows()[:])


def test_a_padding_id_that_the_embedding_lacks_is_not_used(tmp_path: Path) -> None:
    """As where a padding token was added to a tokenizer, and the model was not resized."""
    model, tokenizer, texts = model_of("llama"), trained_tokenizer(), sentences(9)
    tokenizer.add_special_tokens({"pad_token": "<another>"})
    model.resize_token_embeddings(tokenizer.pad_token_id)
    done = actshard.capture(model, texts, tmp_path / "d", tokenizer=tokenizer, layers=[1])
    assert done.padding > 0


def test_dropout_is_off(tmp_path: Path) -> None:
    model, texts = model_of("bert").train(), sentences(4)
    done = actshard.capture(model, texts, tmp_path / "d", tokenizer=trained_tokenizer(), layers=[2], batch_tokens=1)
    store = actshard.open(done.path)
    ids = store.table["input_ids"][0].as_py()
    assert np.array_equal(store.sequence(0, 2), hidden_states(model.eval(), ids)[2])


def test_a_smaller_batch_follows_where_memory_ends(tmp_path: Path) -> None:
    import torch

    model, texts = model_of("gpt2"), sentences(40)
    largest: list[int] = []

    def limited(module: Any, arguments: Any, named: Any) -> None:
        largest.append(arguments[0].shape[0] * arguments[0].shape[1])
        if largest[-1] > 200:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    hook = model.h[1].register_forward_pre_hook(limited, with_kwargs=True)
    with pytest.warns(actshard.ActshardWarning, match="out of memory with a batch of .* tokens") as caught:
        done = actshard.capture(
            model, texts, tmp_path / "d", tokenizer=trained_tokenizer(), layers=[4], batch_tokens=900
        )
    hook.remove()
    assert {warning.message.code for warning in caught} == {"batch-halved"}  # type: ignore[union-attr]
    assert done.batch_tokens <= 225
    store = actshard.open(done.path)
    for example, ids in enumerate(store.table["input_ids"].to_pylist()):
        np.testing.assert_allclose(store.sequence(example, 4), hidden_states(model, ids)[4], rtol=0, atol=1e-5)


def test_one_example_that_is_too_large_is_named(tmp_path: Path) -> None:
    model, texts = model_of("gpt2"), [*sentences(5, longest=4), " ".join(["train"] * 60)]

    def limited(module: Any, arguments: Any, named: Any) -> None:
        if arguments[0].shape[1] > 50:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")

    model.h[1].register_forward_pre_hook(limited, with_kwargs=True)
    with pytest.raises(actshard.NoMemoryError, match="example 5: the model needs more memory"):
        actshard.capture(model, texts, tmp_path / "d", tokenizer=trained_tokenizer(), layers=[4], batch_tokens=1)


def test_nan_of_a_model_is_refused_by_example_token_and_layer_or_counted(tmp_path: Path) -> None:
    import torch

    model, tokenizer, texts = model_of("llama"), trained_tokenizer(), ["the train", "a quiet river", "the morning"]
    token = tokenizer("a quiet river")["input_ids"][2]
    with torch.no_grad():
        model.embed_tokens.weight[token] = float("nan")
    arguments: dict[str, Any] = {"tokenizer": tokenizer, "layers": [0, 2]}
    with pytest.raises(actshard.FormatError, match="example 1, token 2, layer 0: NaN or infinite values"):
        actshard.capture(model, texts, tmp_path / "d", **arguments)
    with pytest.warns(actshard.ActshardWarning, match="NaN or infinite values, in the examples 1"):
        done = actshard.capture(model, texts, tmp_path / "d", on_nonfinite="count", resume=True, **arguments)
    assert done.nonfinite_examples == (1,)
    assert done.nonfinite > 1
    assert done.examples == 3


def test_values_too_large_for_the_stored_dtype_are_refused(tmp_path: Path) -> None:
    import torch

    model = model_of("llama")
    with torch.no_grad():
        model.embed_tokens.weight.mul_(1e8)
    with pytest.raises(actshard.FormatError, match="NaN or infinite values as float16"):
        actshard.capture(
            model, sentences(2), tmp_path / "d", tokenizer=trained_tokenizer(), layers=[0], dtype="float16"
        )


def test_bfloat16_states_are_stored_as_they_are(tmp_path: Path) -> None:
    import torch

    model, texts = model_of("llama").to(torch.bfloat16), sentences(3)
    done = actshard.capture(model, texts, tmp_path / "d", tokenizer=trained_tokenizer(), layers=[3], batch_tokens=1)
    assert done.dtype == "bfloat16"
    store = actshard.open(done.path)
    kept: list[Any] = []
    model.layers[2].register_forward_hook(lambda module, arguments, output: kept.append(output))
    with torch.no_grad():
        model(input_ids=torch.tensor([store.table["input_ids"][1].as_py()]))
    states = (kept[0][0] if isinstance(kept[0], tuple) else kept[0])[0]
    assert np.array_equal(store.sequence(1, 3).view(np.uint16), states.view(torch.uint16).numpy())


def test_another_model_tokenizer_or_option_is_refused_by_name_on_resume(tmp_path: Path) -> None:
    import torch

    model, tokenizer, texts = model_of("gpt2"), trained_tokenizer(), sentences(9)
    arguments: dict[str, Any] = {"tokenizer": tokenizer, "layers": [1, 2]}
    actshard.capture(model, texts, tmp_path / "d", **arguments)

    def refused(name: str, model: Any = model, texts: list[str] = texts, **other: Any) -> None:
        with pytest.raises(actshard.ExistsError, match=f"contains another dataset: {name}: expected"):
            actshard.capture(model, texts, tmp_path / "d", resume=True, **{**arguments, **other})

    tuned = model_of("gpt2")
    with torch.no_grad():
        tuned.h[3].mlp.c_fc.weight.add_(1e-3)
    refused("weights", tuned)
    refused("model", model_of("llama"))
    refused("attention", _with_attention("gpt2", "eager"))
    other = trained_tokenizer()
    other.add_tokens(["xyz"])
    refused("tokenizer_digest", tokenizer=other)
    refused("tokens", tokens="last")
    refused("special_tokens", special_tokens=False)
    refused("max_tokens", max_tokens=20)
    refused("texts", texts=[*texts[:-1], "another"])
    refused("layers", layers=[1, 3])
    refused("dtype", dtype="float16")
    again = actshard.capture(model, texts, tmp_path / "d", resume=True, **arguments)
    assert again.resumed_at == len(texts)
    assert again.tokens == 0


def test_one_changed_weight_is_refused_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest of the weights is of a sample; the rows of an example are of all weights before its layers."""
    import torch

    monkeypatch.setattr("actshard.writing.capturing.job.BATCHES_OF_A_WINDOW", 1)
    model, tokenizer, texts = model_of("gpt2"), trained_tokenizer(), sentences(60)

    def stop(progress: actshard.CaptureProgress) -> None:
        if progress.examples > 40:
            raise KeyboardInterrupt

    arguments: dict[str, Any] = {"tokenizer": tokenizer, "layers": [1, 2], "batch_tokens": 100}
    with pytest.raises(KeyboardInterrupt):
        actshard.capture(model, texts, tmp_path / "d", progress=stop, **arguments)
    with torch.no_grad():
        model.h[0].mlp.c_fc.weight[3, 5] += 5
    with pytest.raises(actshard.ArgumentError, match="model: expected the rows of example 0, layer 1"):
        actshard.capture(model, texts, tmp_path / "d", resume=True, **arguments)
    with torch.no_grad():
        model.h[0].mlp.c_fc.weight[3, 5] -= 5
    assert actshard.capture(model, texts, tmp_path / "d", resume=True, **arguments).resumed_at > 0


def _with_attention(kind: str, attention: str) -> Any:
    model = model_of(kind)
    model.config._attn_implementation = attention
    return model


def test_a_tokenizer_that_pads_and_truncates_is_the_same_tokenizer(tmp_path: Path) -> None:
    model, tokenizer, texts = model_of("gpt2"), trained_tokenizer(), sentences(6)
    actshard.capture(model, texts, tmp_path / "d", tokenizer=tokenizer, layers=[1])
    tokenizer(texts, padding=True, truncation=True, max_length=3)
    again = actshard.capture(model, texts, tmp_path / "d", tokenizer=tokenizer, layers=[1], resume=True)
    assert again.resumed_at == len(texts)


def test_a_model_and_its_tokenizer_are_loaded_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model_of("llama", head=True).save_pretrained(folder)
    trained_tokenizer().save_pretrained(folder)
    texts = sentences(5)
    done = actshard.capture(folder, texts, tmp_path / "d", layers=[2], batch_tokens=1)
    assert done.provenance["model"] == str(folder)
    assert done.provenance["architecture"] == "LlamaModel"
    assert {"torch", "transformers"} <= set(done.provenance["versions"])
    store = actshard.open(done.path)
    assert store.metadata["capture"]["model"] == str(folder)
    expected = hidden_states(model_of("llama", head=True).model, store.table["input_ids"][4].as_py())
    assert np.array_equal(store.sequence(4, 2), expected[2])
    with pytest.raises(actshard.ArgumentError, match="model: cannot load"):
        actshard.capture(tmp_path / "nothing", texts, tmp_path / "e")


def test_a_model_that_cannot_be_loaded_or_lacks_weights_is_refused(tmp_path: Path) -> None:
    """Transformers fills missing weights with random numbers. A pooler, which does not run, may be missing."""
    from safetensors.torch import load_file, save_file

    folder, texts, tokenizer = tmp_path / "model", sentences(3), trained_tokenizer()
    arguments: dict[str, Any] = {"tokenizer": tokenizer, "layers": [1]}
    model_of("bert").save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")

    def save(left_out: str) -> None:
        kept = {name: values for name, values in weights.items() if left_out not in name}
        assert len(kept) < len(weights)
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})

    save("pooler")
    assert actshard.capture(folder, texts, tmp_path / "d", **arguments).examples == 3
    for options, message in (
        ({"device": "nonsense"}, "device: cannot move the model to 'nonsense'"),
        ({"device": "cuda:77"}, "device: cannot move the model to 'cuda:77'"),
        ({"model_options": {"dtype": "nope"}}, "model: cannot load"),
        ({"model_options": {"attn_implementation": "nope"}}, "model: cannot load"),
    ):
        with pytest.raises(actshard.ArgumentError, match=message):
            actshard.capture(folder, texts, tmp_path / "e", **arguments, **options)
    save("layer.1.intermediate")
    with pytest.raises(
        actshard.ArgumentError, match=r"found none that fit for 2 of them, such as encoder.layer.1.inter"
    ):
        actshard.capture(folder, texts, tmp_path / "e", **arguments)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(actshard.ArgumentError, match="model: cannot load"):
        actshard.capture(folder, texts, tmp_path / "e", **arguments)
    with pytest.raises(actshard.ArgumentError, match="device: cannot move the model to 'nonsense'"):
        actshard.capture(model_of("bert"), texts, tmp_path / "e", device="nonsense", **arguments)


@pytest.mark.parametrize("tokens", ["all", "last", "mean"])
def test_ids_and_positions_that_a_model_lacks_are_refused(tokens: str, tmp_path: Path) -> None:
    examples = [[1, 2, 3], [4, 5], [6, 7, 400, 8]]
    for kind in ("gpt2", "llama", "t5"):
        with pytest.raises(
            actshard.ArgumentError, match=r"example 2, token 2: expected a token id from 0 to 399, .* 400"
        ):
            actshard.capture(model_of(kind), examples, tmp_path / kind, layers=[1], tokens=tokens)
    with pytest.raises(actshard.ArgumentError, match=r"example 0, token 0: .* found -1"):
        actshard.capture(model_of("gpt2"), [[-1, 2]], tmp_path / "d", layers=[1], tokens=tokens)
    for kind in ("gpt2", "bert", "roberta", "opt"):
        with pytest.raises(actshard.ArgumentError, match="max_tokens: expected at most 12"):
            actshard.capture(model_of(kind), examples[:2], tmp_path / "d", layers=[1], tokens=tokens, max_tokens=200)
        longest = 124 if kind == "roberta" else 128
        done = actshard.capture(
            model_of(kind), [[5] * longest], tmp_path / f"{kind}-longest", layers=[1], tokens=tokens, max_tokens=longest
        )
        assert done.tokens == longest
    done = actshard.capture(model_of("llama"), [[5] * 150], tmp_path / "e", layers=[1], tokens=tokens, max_tokens=200)
    assert done.tokens == 150, "rotary positions have no end"


def test_chats_are_rendered_once_and_their_marks_are_special(tmp_path: Path) -> None:
    tokenizer = trained_tokenizer(template=True)
    chats = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": " the river"}] for text in sentences(3)
    ]
    done = actshard.capture(model_of("llama"), chats, tmp_path / "d", tokenizer=tokenizer, layers=[1])
    table = actshard.open(done.path).table
    for example, chat in enumerate(chats):
        ids = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
        assert table["input_ids"][example].as_py() == ids
        assert table["special_tokens_mask"][example].as_py() == [1, 1, *[0] * (len(ids) - 2)]
    assert table["text"][0].as_py().startswith("<bos><|user|>")


def test_a_chat_that_the_template_refuses_is_an_empty_example(tmp_path: Path) -> None:
    tokenizer = trained_tokenizer(template=True)
    refusal = "{% if messages[0].role != 'user' %}{{ raise_exception('the user begins') }}{% endif %}"
    tokenizer.chat_template = refusal + "{{ messages[0].content }}"
    chats: list[Any] = [[{"role": role, "content": "the train"}] for role in ("user", "assistant")]
    with pytest.warns(actshard.ActshardWarning, match=r"example 1: the chat template refuses it: .*the user begins"):
        done = actshard.capture(model_of("llama"), chats, tmp_path / "d", tokenizer=tokenizer, layers=[1])
    assert [problem.example for problem in done.problems] == [1]


@pytest.mark.parametrize("chat", [False, True])
def test_unknown_words_are_content_also_where_they_pad(chat: bool, tmp_path: Path) -> None:
    tokenizer = trained_tokenizer(template=True)
    tokenizer.pad_token = tokenizer.unk_token
    texts = ["the \u65e5 train", "the <eos> train"]
    inputs: list[Any] = [[{"role": "assistant", "content": text}] for text in texts] if chat else texts
    done = actshard.capture(model_of("llama"), inputs, tmp_path / "d", tokenizer=tokenizer, layers=[1])
    table = actshard.open(done.path).table
    ids, masks = table["input_ids"].to_pylist(), table["special_tokens_mask"].to_pylist()
    assert tokenizer.unk_token_id in ids[0]
    assert masks[0] == [1, *[0] * (len(ids[0]) - 1)]
    assert masks[1] == [int(i == 0 or (chat and token == tokenizer.eos_token_id)) for i, token in enumerate(ids[1])]


def test_other_torch_modules_have_names_of_modules_as_layers(tmp_path: Path) -> None:
    """A forward pass without a mask gets examples of equal lengths only: no position is padding."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(50, 8)
            self.mix = torch.nn.Linear(8, 8)

        def forward(self, ids: Any) -> Any:
            x = self.embed(ids)
            return self.mix(x + x.mean(dim=1, keepdim=True))

    torch.manual_seed(0)
    net, rng = Net(), np.random.default_rng(0)
    inputs = [rng.integers(0, 50, n).tolist() for n in (3, 7, 3, 1, 7, 7)]
    done = actshard.capture(net, inputs, tmp_path / "d", layers=["mix"])
    assert done.padding == 0
    store = actshard.open(done.path)
    for example, ids in enumerate(inputs):
        with torch.no_grad():
            np.testing.assert_allclose(store.sequence(example, "mix"), net(torch.tensor([ids]))[0].numpy(), atol=1e-6)
    with pytest.raises(actshard.ArgumentError, match=r"'mixx' is not a layer of Net.*Do you mean 'mix'"):
        actshard.capture(net, inputs, tmp_path / "e", layers=["mixx"])
    with pytest.raises(actshard.ArgumentError, match="pass names of modules"):
        actshard.capture(net, inputs, tmp_path / "e", layers=[1])


def test_a_module_that_runs_several_times_is_refused(tmp_path: Path) -> None:
    import torch

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 8)

        def forward(self, ids: Any) -> Any:
            return self.block(self.block(self.embed(ids)))

    with pytest.raises(actshard.UnsupportedError, match="block runs several times in a forward pass"):
        actshard.capture(Twice(), [[1, 2]], tmp_path / "d", layers=["block"])
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ("layers.1.mpl", "Do you mean 'layers.1.mlp'"),
        ("blocks.1.hook_resid_pots", "Do you mean 'blocks.1.hook_resid_post'"),
        ("final_nrom", "Do you mean 'final_norm'"),
        (5, "expected 0 .the embedding. to 4"),
        (-6, "expected 0 .the embedding. to 4"),
        ("blocks.9.hook_resid_post", "is not a layer of LlamaModel"),
    ],
)
def test_an_unknown_layer_is_refused_with_the_closest_one(layer: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(actshard.ArgumentError, match=message):
        actshard.capture(model_of("llama"), sentences(2), tmp_path / "d", tokenizer=trained_tokenizer(), layers=[layer])
    assert not (tmp_path / "d").exists()


def test_layers_of_several_widths_are_refused_by_group(tmp_path: Path) -> None:
    with pytest.raises(actshard.ArgumentError, match=r"one width, found 32: \[1\]; 64: \['layers.0.mlp.up_proj'\]"):
        actshard.capture(
            model_of("llama"),
            sentences(2),
            tmp_path / "d",
            tokenizer=trained_tokenizer(),
            layers=[1, "layers.0.mlp.up_proj"],
        )


def test_no_states_are_kept_after_a_capture(tmp_path: Path) -> None:
    import torch

    model, tokenizer = model_of("llama"), trained_tokenizer()
    actshard.capture(model, sentences(3), tmp_path / "a", tokenizer=tokenizer, layers=[1])
    gc.collect()
    before = sum(isinstance(item, torch.Tensor) for item in gc.get_objects())
    actshard.capture(model, sentences(30), tmp_path / "b", tokenizer=tokenizer, layers=[1, 2, 3])
    gc.collect()
    assert sum(isinstance(item, torch.Tensor) for item in gc.get_objects()) <= before


def test_a_vision_model_is_captured_by_the_numbers_of_its_images(tmp_path: Path) -> None:
    """Patch tokens and CLS of a ViT, as a function: bit-equal to the model's own hidden states for the same batch."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=16, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    model = transformers.ViTModel(config, add_pooling_layer=False).eval()
    images = torch.randn(7, 3, 16, 16)

    def states(ids: np.ndarray, mask: np.ndarray) -> dict[actshard.Layer, Any]:
        with torch.no_grad():
            output = model(pixel_values=images[ids[:, 0]], output_hidden_states=True)
        return dict(enumerate(output.hidden_states))

    inputs = [{"input_ids": [image] * 5, "label": image % 2} for image in range(len(images))]
    done = actshard.capture(states, inputs, tmp_path / "dumps", "saev", columns=[], options={"cls_token": True})
    store = actshard.open(done.path)
    assert (store.special_tokens, store.token_counts.tolist()) == (1, [5] * 7)
    expected = states(np.arange(7)[:, None], np.ones((7, 1), bool))
    for image in range(7):
        for layer in store.layers:
            assert np.array_equal(store.sequence(image, layer), expected[layer][image].numpy())
