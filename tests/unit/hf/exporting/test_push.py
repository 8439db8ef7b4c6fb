"""`alibi-lm export --push`, by the hub's real client against a hub of our own on this machine."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from huggingface_hub import constants

from alibi_lm.cli.main import main
from alibi_lm.hf.manifest import EXPORT_MANIFEST
from tests.unit.hf.small_step import add_tokenizer, write_step


class FakeHub(ThreadingHTTPServer):
    """A hub with one user; its repositories are kept in memory."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.role = "write"
        self.refusals: dict[str, int] = {}
        """Part of a path to the status with which it is refused."""
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, body: bytes | None) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        hub.asked.append(path)
        status = next((s for part, s in hub.refusals.items() if part in path), 200)
        if self.headers["Authorization"] != "Bearer hf_good":
            status = 401
        elif status == 200 and path.startswith("/api/models/"):
            owner, name, *_ = path.removeprefix("/api/models/").split("/")
            status = 200 if f"{owner}/{name}" in hub.repos else 404
        content: Any = {"error": "no"} if status != 200 else self._content(path, body)
        encoded = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def _content(self, path: str, body: bytes | None) -> Any:
        hub = self.server
        if path == "/api/whoami-v2":
            token = {"displayName": "laptop", "role": hub.role}
            return {"name": "ada", "type": "user", "auth": {"accessToken": token}}
        if path == "/api/validate-yaml":
            return {"warnings": [], "errors": []}
        if path == "/api/repos/create":
            asked = json.loads(body or b"")
            name = f"{asked.get('organization') or 'ada'}/{asked['name']}"
            hub.repos.setdefault(name, {".gitattributes": b""})
            hub.private.setdefault(name, asked.get("visibility") == "private"
                                   or asked.get("private") is True)  # fmt: skip
            return {"url": f"{hub.address}/{name}"}
        owner, name, *actions = path.removeprefix("/api/models/").split("/")
        files = hub.repos[f"{owner}/{name}"]
        action = actions[0]
        if action == "tree":
            return [{"type": "file", "path": p, "size": len(c), "oid": "0"}
                    for p, c in files.items()]  # fmt: skip
        if action == "preupload":
            return {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                              for f in json.loads(body or b"")["files"]]}  # fmt: skip
        assert action == "commit", path
        for line in (body or b"").splitlines():
            part = json.loads(line)
            if part["key"] == "file":
                files[part["value"]["path"]] = base64.b64decode(part["value"]["content"])
            elif part["key"] == "deletedFile":
                del files[part["value"]["path"]]
        return {"commitUrl": f"{hub.address}/{owner}/{name}/commit/1234", "commitOid": "1234"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    step = write_step(tmp_path / "run", {"num_heads": 8, "num_layers": 1})
    add_tokenizer(step, tmp_path)
    return tmp_path / "run"


def export(run: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["export", str(run), str(run.parent / "out"), *options])


def refused(result: Result, *parts: str) -> None:
    """One line that holds the parts, and exit code 2."""
    assert result.exit_code == 2, result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 1, lines
    for part in parts:
        assert part in lines[0]


def test_what_is_pushed_is_the_proven_folder(run: Path, hub: FakeHub) -> None:
    assert export(run, "--parity", "weights").exit_code == 0
    out = run.parent / "out"
    (out / "README.md").write_text((out / "README.md").read_text() + "\nMy own words.\n")
    (out / "notes.txt").write_text("mine")
    result = export(run, "--parity", "weights", "--push", "tiny")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].startswith("push tiny: 8 files, ")
    assert hub.private == {"ada/tiny": True}
    stored = hub.repos["ada/tiny"]
    here = {path.name: path.read_bytes() for path in out.iterdir() if path.name != "notes.txt"}
    assert stored == here | {".gitattributes": b""}
    # Shards that another export left there would be read; a user's own files stay.
    del stored["model.safetensors"]
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "eval.png"):
        stored[name] = b"old"
    assert export(run, "--push", "ada/tiny", "--public").exit_code == 0
    assert stored == here | {".gitattributes": b"", "eval.png": b"old"}
    assert hub.private == {"ada/tiny": True}
    assert export(run, "--push", "ada/open", "--public").exit_code == 0
    assert hub.private["ada/open"] is False


def test_a_dry_run_asks_the_hub_nothing(
    run: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    result = export(run, "--parity", "weights", "--push", "ada/tiny", "--dry-run")
    assert result.exit_code == 0, result.output
    assert hub.asked == []
    out = run.parent / "out"
    *files, last = result.stdout.splitlines()[1:]
    listed = {name: int(size.replace(",", "")) for size, _, name in map(str.split, files)}
    assert listed == {path.name: path.stat().st_size for path in out.iterdir()}
    size = sum(listed.values())
    assert f"push ada/tiny: 8 files, {size:,} bytes of {out} would be uploaded (private" in last


def test_mistakes_are_reported_before_the_export(
    run: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/b/c", "a b", "", "ada/tiny.git", "-x", "a..b"):
        refused(export(run, "--push", name), "--push", "is not a repository name")
    refused(export(run, "--dry-run"), "--dry-run", "add --push REPO")
    refused(export(run, "--public"), "--public", "add --push REPO")
    assert hub.asked == []
    hub.role = "read"
    refused(export(run, "--push", "ada/tiny"), "the token laptop of ada is read-only")
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    refused(export(run, "--push", "ada/tiny"), "Invalid user token", "hf auth login")
    monkeypatch.delenv("HF_TOKEN")
    refused(export(run, "--push", "ada/tiny"), "needs a login", "hf auth login")
    with socket.socket() as nobody:  # bound, and not listening
        nobody.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setenv("HF_TOKEN", "hf_good")
        refused(export(run, "--push", "ada/tiny"), "Connect", "check the connection")
    assert not (run.parent / "out").exists()


@pytest.mark.parametrize("where", ["repos/create", "preupload", "commit"])
def test_a_refused_upload_leaves_the_folder(run: Path, hub: FakeHub, where: str) -> None:
    hub.refusals[where] = 403
    options = ["--parity", "weights", "--push", "ada/tiny"]
    refused(export(run, *options), "--push = ada/tiny: upload failed", "403", "is complete")
    out = run.parent / "out"
    assert (out / EXPORT_MANIFEST).is_file()
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    hub.refusals.clear()
    again = export(run, *options)
    assert again.exit_code == 0, again.output
    assert "already exported" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    assert set(hub.repos["ada/tiny"]) == {path.name for path in out.iterdir()} | {".gitattributes"}


def test_the_network_goes_down_after_the_export(
    run: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from alibi_lm.hf.exporting import push

    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        right = push.check_manifest

        def goes_down(folder: Path) -> None:
            right(folder)
            monkeypatch.setattr(constants, "ENDPOINT", address)

        monkeypatch.setattr(push, "check_manifest", goes_down)
        result = export(run, "--parity", "weights", "--push", "ada/tiny")
    refused(result, "--push = ada/tiny: upload failed", "Connect", "is complete")
    assert (run.parent / "out" / EXPORT_MANIFEST).is_file()


def test_a_file_changed_since_the_export_is_not_pushed(run: Path, hub: FakeHub) -> None:
    assert export(run, "--parity", "weights").exit_code == 0
    config = run.parent / "out" / "config.json"
    config.write_text(config.read_text().replace('"n_heads": 8', '"n_heads": 4'))
    refused(
        export(run, "--parity", "weights", "--push", "tiny"), "config.json", "was changed after"
    )
    assert hub.repos == {}
