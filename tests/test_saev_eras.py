"""Datasets as each version of saev's protocol wrote them, created here: they open without a warning and read bit for bit."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from conftest import bits, refuses

Meta = dict[str, Any]
N, CONTENT, D, LAYERS = 7, 3, 4, [2, 5]


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sorted_spaced(m: Meta) -> str:
    return sha(json.dumps(m, sort_keys=True))


def sorted_compact(m: Meta) -> str:
    return sha(json.dumps(m, sort_keys=True, separators=(",", ":")))


def declared(m: Meta) -> str:
    return sha(json.dumps(m, separators=(",", ":"), ensure_ascii=False))


def declared8(m: Meta) -> str:
    return declared(m)[:8]


@dataclass(frozen=True)
class Era:
    """`fields` in the order written: our name of the value, or `their name=our name`."""

    name: str
    fields: str
    hash: Callable[[Meta], str] = sorted_compact
    counts: str | None = "n_imgs"  # of shards.json, which did not exist before 2025-06-18
    protocol: str | None = None
    data: str = "str"


OLD = "seed n_imgs=n n_patches_per_shard=budget data"
OLDER = "n_patches_per_img=content d_vit=d"
VIT = "vit_family=family vit_ckpt=ckpt layers n_patches_per_img=content cls_token d_vit=d"
V1 = f"{VIT} n_imgs=n max_patches_per_shard=budget data"
V2 = "family ckpt layers patches_per_ex=content cls_token d_model=d n_ex=n patches_per_shard=budget data"
LATE = "cls_token d_model=d n_examples=n max_tokens_per_shard=budget data dataset pixel_agg dtype protocol"
TODAY = f"family ckpt layers content_tokens_per_example=content {LATE}"

ERAS = [
    Era("bd33ddd_2024-10-31", f"width height model=ckpt n_layers {OLDER} {OLD}", sorted_spaced, None),
    Era(
        "29b1d29_2024-11-04",
        f"width height model_org=family model_ckpt=ckpt n_layers {OLDER} {OLD}",
        sorted_spaced,
        None,
    ),
    Era("f9cd2fa_2024-11-04", f"model_org=family model_ckpt=ckpt n_layers {OLDER} {OLD}", sorted_spaced, None),
    Era(
        "9d4cae4_2024-11-19",
        f"model_org=family model_ckpt=ckpt layers n_patches_per_img=content cls_token d_vit=d {OLD}",
        sorted_spaced,
        None,
    ),
    Era(
        "7d346f4_2024-11-22",
        f"model_family=family model_ckpt=ckpt layers n_patches_per_img=content cls_token d_vit=d {OLD}",
        sorted_spaced,
        None,
    ),
    Era("43b54ea_2025-03-01", f"{VIT} {OLD}", sorted_spaced, None),
    Era("e70fbac_2025-06-17", f"{VIT} seed n_imgs=n max_patches_per_shard=budget data", sorted_spaced, None),
    Era("c270a9f_2025-06-18_before_shards_json", f"{V1}", counts=None),
    Era("c270a9f_2025-06-18", f"{V1}"),
    Era("a6052a5_2025-06-19", f"{V1} dtype protocol", protocol="1.0.0"),
    Era("1c842cc_2025-06-19", f"{V1} dtype protocol", protocol="1.0.0", data="object"),
    Era("9179aa0_2025-09-15", f"{V1} dtype protocol", protocol="1.1", data="object"),
    Era("70cd3b4_2025-09-16", f"{V1} pixel_agg dtype protocol", protocol="1.1", data="object"),
    Era("29d3347_2025-10-02", f"{V2} pixel_agg dtype protocol", counts="n_ex", protocol="1.1", data="object"),
    Era("d4cc39a_2025-10-02", f"{V2} pixel_agg dtype protocol", counts="n_ex", protocol="2.0", data="object"),
    Era("e43e7dd_2025-10-03", f"{V2} dataset pixel_agg dtype protocol", counts="n_ex", protocol="2.0", data="object"),
    Era("the_text_2.0", f"{V2} dataset dtype protocol", counts="n_ex", protocol="2.0", data="object"),
    Era(
        "a38acda_2025-10-07",
        f"family ckpt layers n_content_tokens_per_example=content {LATE}",
        counts="n_examples",
        protocol="2.0",
        data="object",
    ),
    Era("5d0f89c_2025-10-08", TODAY, counts="n_examples", protocol="2.0", data="object"),
    Era("c3dd0ae_2025-10-10", TODAY, declared, "n_examples", "2.0", "object"),
    Era("00d8cec_2025-10-13", TODAY, declared, "n_examples", "2.1", "pickle"),
    Era("075ac76_2025-10-14", TODAY, declared8, "n_examples", "2.1", "pickle"),
]
LAST = ERAS[-1]


def values(n: int, layers: int, tokens: int, d: int) -> np.ndarray:
    e, la, t, k = np.ogrid[:n, :layers, :tokens, :d]
    return ((e * 65536 + la * 4096 + t * 64 + k) / 8).astype(np.float32)


def dump(
    root: Path,
    era: Era = LAST,
    *,
    n: int = N,
    layers: list[int] = LAYERS,
    cls: bool = True,
    eps: int = 3,
    tail: str = "padded",
    pixel_agg: str | None = "majority",
    change: Callable[[Meta], Any] = lambda _: None,
) -> tuple[Path, np.ndarray]:
    """A dataset as the era's writer left it, and its expected values. `tail`: the last shard is truncated or padded."""
    tokens = CONTENT + cls
    known = {
        "width": 224,
        "height": 224,
        "family": "clip",
        "ckpt": "hf-hub:modèle/β",
        "layers": layers,
        "n_layers": len(layers),
        "content": CONTENT,
        "cls_token": cls,
        "d": D,
        "seed": 42,
        "n": n,
        "budget": eps * len(layers) * tokens + 1,
        "data": {
            "str": "ImageFolder(root='/daten/bäume')",
            "object": {"root": "/daten/bäume", "split": "train", "__class__": "ImageFolder"},
            "pickle": base64.b64encode(pickle.dumps(("cfg", 1))).decode(),
        }[era.data],
        "dataset": "/daten/bäume",
        "pixel_agg": pixel_agg,
        "dtype": "float32",
        "protocol": era.protocol,
    }
    pairs = [field.split("=") for field in era.fields.split()]
    meta = {pair[0]: known[pair[-1]] for pair in pairs}
    change(meta)
    folder = root / era.hash(meta)
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(json.dumps(meta, indent=4 if era.hash is not declared8 else 2))
    acts = values(n, len(layers), tokens, D)
    shards = []
    for i in range(0, n, eps):
        block = acts[i : i + eps]
        shards.append({"name": f"acts{i // eps:06}.bin", era.counts or "": len(block)})
        if tail == "padded":
            block = np.concatenate([block, np.zeros((eps - len(block), *block.shape[1:]), np.float32)])
        block.tofile(folder / shards[-1]["name"])
    if tail == "padded" and n % eps == 0:
        shards.append({"name": f"acts{n // eps:06}.bin", era.counts or "": 0})
        np.zeros((eps, *acts.shape[1:]), np.float32).tofile(folder / shards[-1]["name"])
    if era.counts:
        (folder / "shards.json").write_text(json.dumps(shards))
    return folder, acts


def check(store: actshard.Store, acts: np.ndarray, layers: tuple[int, ...] | None = None) -> None:
    """Reads every row, in every way."""
    n, _, tokens, d = acts.shape
    assert (store.format, store.num_examples, store.d_model, store.dtype) == ("saev", n, d, np.float32)
    assert store.layers == (layers or tuple(LAYERS))
    assert store.token_counts.tolist() == [tokens] * n
    e, t = np.divmod(np.random.default_rng(1).permutation(n * tokens), tokens)
    for position, layer in enumerate(store.layers):
        want = bits(acts[:, position])
        assert np.array_equal(bits(store.gather(layer, e, t)), want[e, t])
        assert np.array_equal(bits(store.gather(layer, np.arange(n)[:, None], range(tokens))), want)
        assert np.array_equal(bits(store.last_tokens(layer)), want[:, -1])
        for x in range(n):
            assert np.array_equal(bits(store.sequence(x, layer)), want[x])


@pytest.mark.parametrize("tail", ["truncated", "padded"])
@pytest.mark.parametrize("era", ERAS, ids=lambda era: era.name)
def test_every_era_reads_without_a_warning(tmp_path: Path, io: str, era: Era, tail: str) -> None:
    folder, acts = dump(tmp_path, era, tail=tail)
    store = actshard.open(folder, io=io)
    assert store.warnings == ()
    check(store, acts, (-2, -1) if "n_layers" in era.fields else None)
    assert store.metadata == json.loads((folder / "metadata.json").read_text())
    assert store.labels is None
    assert "hf-hub:modèle/β" in store.info()["model"]


@pytest.mark.parametrize("era", [e for e in ERAS if "cls_token" in e.fields], ids=lambda era: era.name)
def test_without_cls_there_is_one_token_less(tmp_path: Path, io: str, era: Era) -> None:
    folder, acts = dump(tmp_path, era, cls=False)
    check(actshard.open(folder, io=io), acts)


@pytest.mark.parametrize("era", [e for e in ERAS if "pixel_agg" in e.fields], ids=lambda era: era.name)
@pytest.mark.parametrize("pixel_agg", [None, "prefer-fg"])
def test_pixel_agg_may_be_null(tmp_path: Path, era: Era, pixel_agg: str | None) -> None:
    folder, acts = dump(tmp_path, era, pixel_agg=pixel_agg)
    check(actshard.open(folder), acts)


@pytest.mark.parametrize("tail", ["truncated", "padded"])
@pytest.mark.parametrize(("n", "eps"), [(6, 3), (5, 3), (3, 3), (2, 100), (1, 1), (4, 1)])
def test_any_number_of_examples_and_shards(tmp_path: Path, io: str, n: int, eps: int, tail: str) -> None:
    folder, acts = dump(tmp_path, n=n, eps=eps, tail=tail)
    store = actshard.open(folder, io=io)
    check(store, acts)


@pytest.mark.parametrize("bad", [6, 7, 8, 9, 1 << 40, -1])
def test_example_outside_the_dataset_is_named(tmp_path: Path, io: str, bad: int) -> None:
    store = actshard.open(dump(tmp_path, n=6, eps=3)[0], io=io)
    with refuses(actshard.OutOfRangeError, None, f"example {bad} is out of range: the dataset has 6 examples"):
        store.gather(2, [0, bad], 0)
    with refuses(actshard.OutOfRangeError, None, f"example {bad} is out of range: the dataset has 6 examples"):
        store.sequence(bad, 2)


def test_padding_and_the_extra_shard_are_never_read(tmp_path: Path, io: str) -> None:
    for n in (6, 7):
        folder, acts = dump(tmp_path, n=n, eps=3)
        tail = folder / "acts000002.bin"
        padding = np.fromfile(tail, np.float32)
        assert padding.size == 3 * acts[0].size
        padding[(n - 6) * acts[0].size :] = np.nan
        padding.tofile(tail)
        check(actshard.open(folder, io=io), acts)


@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_extra_shard_may_have_any_size(tmp_path: Path, io: str, size: int) -> None:
    folder, acts = dump(tmp_path, n=6, eps=3)
    (folder / "acts000002.bin").write_bytes(b"\xff" * size)
    check(actshard.open(folder, io=io), acts)


def test_missing_extra_shard_is_a_warning(tmp_path: Path, io: str) -> None:
    folder, acts = dump(tmp_path, n=6, eps=3)
    (folder / "acts000002.bin").unlink()
    with pytest.warns(actshard.ActshardWarning, match="acts000002.bin"):
        store = actshard.open(folder, io=io)
    check(store, acts)


@pytest.mark.parametrize("layers", [[-2, -1], [-1], [-12, 0, 23]])
def test_layers_are_names_also_negative_ones(tmp_path: Path, io: str, layers: list[int]) -> None:
    folder, acts = dump(tmp_path, layers=layers)
    store = actshard.open(folder, io=io)
    check(store, acts, tuple(layers))
    for position in {0, 1, -3} - set(layers):
        with refuses(actshard.LayerError, store.path, str(list(layers))[1:-1]):
            store.last_tokens(position)


def test_unsorted_layers_are_a_warning(tmp_path: Path, io: str) -> None:
    folder, acts = dump(tmp_path, layers=[5, -1, 2])
    with pytest.warns(actshard.ActshardWarning, match=r"\[5, -1, 2\].*swapped") as caught:
        store = actshard.open(folder, io=io)
    assert len(caught) == 1
    check(store, acts, (5, -1, 2))


@pytest.mark.parametrize("cls", [True, False])
def test_labels_have_no_column_for_cls(tmp_path: Path, io: str, cls: bool) -> None:
    folder, acts = dump(tmp_path, cls=cls)
    labels = np.random.default_rng(0).integers(0, 256, (N, CONTENT), np.uint8)
    labels.tofile(folder / "labels.bin")
    store = actshard.open(folder, io=io)
    assert store.labels.dtype == np.uint8
    assert np.array_equal(store.labels, labels)
    assert store.labels is store.labels
    with pytest.raises(ValueError, match="read-only"):
        store.labels[0, 0] = 1
    check(store, acts)


@pytest.mark.parametrize("era", [ERAS[0], LAST], ids=lambda era: era.name)
def test_renamed_folder_is_a_warning_that_tells_the_hash(tmp_path: Path, io: str, era: Era) -> None:
    folder, acts = dump(tmp_path / "x", era)
    renamed = folder.rename(tmp_path / "my_dump")
    with pytest.warns(actshard.ActshardWarning, match="renamed") as caught:
        store = actshard.open(renamed, io=io)
    assert len(caught) == 1
    if era is LAST:
        assert folder.name in str(caught[0].message)
    check(store, acts, (-2, -1) if era is ERAS[0] else None)


@pytest.mark.parametrize("place", ["saev/shards", "elsewhere", "with spaces/and ünicode/{layer}", "a.parquet", "index"])
def test_a_dump_may_lie_anywhere(tmp_path: Path, io: str, place: str) -> None:
    folder, acts = dump(tmp_path / place)
    check(actshard.open(folder, io=io), acts)
    check(actshard.open(str(folder) + "/", io=io), acts)


def test_a_link_to_the_folder_keeps_its_name(tmp_path: Path, io: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, acts = dump(tmp_path / "real")
    link = tmp_path / folder.name
    link.symlink_to(folder)
    check(actshard.open(link, io=io), acts)
    monkeypatch.chdir(folder)
    store = actshard.open(".", io=io)
    monkeypatch.chdir(tmp_path)
    check(store, acts)


@pytest.mark.parametrize(
    ("protocol", "match"),
    [
        ("3.0", "MAJOR version newer"),
        ("17.4.2", "MAJOR version newer"),
        ("2.7", "newer than actshard knows"),
        ("2.2.9", "newer"),
    ],
)
def test_newer_protocol_is_a_warning_and_still_reads(tmp_path: Path, io: str, protocol: str, match: str) -> None:
    folder, acts = dump(tmp_path, change=lambda m: m.update(protocol=protocol))
    with pytest.warns(actshard.ActshardWarning, match=match) as caught:
        store = actshard.open(folder, io=io)
    assert len(caught) == 1
    assert protocol in str(caught[0].message)
    check(store, acts)


def test_unknown_fields_are_kept_and_ignored(tmp_path: Path, io: str) -> None:
    folder, acts = dump(tmp_path, change=lambda m: m.update(new_thing={"a": [1, 2.5, None]}))
    store = actshard.open(folder, io=io)
    assert store.metadata["new_thing"] == {"a": [1, 2.5, None]}
    check(store, acts)


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.target,))


def test_data_is_never_unpickled(tmp_path: Path, io: str) -> None:
    target = tmp_path / "exploded"
    payload = base64.b64encode(pickle.dumps(Bomb(target))).decode()
    folder, acts = dump(tmp_path, change=lambda m: m.update(data=payload))
    store = actshard.open(folder, io=io)
    check(store, acts)
    assert store.metadata["data"] == payload
    store.info()
    assert store.table.num_rows == N
    pickle.loads(pickle.dumps(store)).close()
    assert not target.exists()
    pickle.loads(base64.b64decode(payload))
    assert target.exists()  # the pickle really executes code
