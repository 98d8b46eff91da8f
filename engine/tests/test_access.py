"""Keys, TLS, CORS, request ids, the access log, and the warning when a server is open to everyone."""

import http.client
import json
import shutil
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from server_process import ServerProcess, call

from mambalign.engine.api_keys import ApiKeys
from mambalign.engine.config import ServerConfig
from mambalign.engine.option import ConfigError


def test_keys_from_every_place(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nfrom-file\n\n  spaced  \n")
    options = ServerConfig(api_key="one, two", api_key_file=str(file))
    keys = ApiKeys.read(options, {"MAMBALIGN_API_KEY": "three"})
    for key in ("one", "two", "three", "from-file", "spaced"):
        assert keys.allow(f"Bearer {key}") and keys.allow(f"bearer {key}")
        assert not keys.allow(key) and not keys.allow(f"Basic {key}") and not keys.allow(f"Bearer {key}x")
    for wrong in ("", "Bearer", "Bearer ", "Bearer # ours", "Bearer one, two", "Bearer \udcff"):
        assert not keys.allow(wrong)
    assert not ApiKeys.read(ServerConfig(), {})


def test_a_place_without_a_key_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    for options, environ, words in [
        (ServerConfig(api_key=" , "), {}, "--api-key: holds no key"),
        (ServerConfig(), {"MAMBALIGN_API_KEY": ""}, "MAMBALIGN_API_KEY: holds no key"),
        (ServerConfig(api_key_file=str(empty)), {}, "--api-key-file: holds no key"),
        (ServerConfig(api_key_file="/no/such"), {}, "cannot be read: No such file"),
    ]:
        with pytest.raises(ConfigError, match=words):
            ApiKeys.read(options, environ)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--api-key-file", "/no/such"), "--api-key-file /no/such: cannot be read"),
        (("--ssl-keyfile", "key.pem"), "--ssl-keyfile: needs --ssl-certfile"),
        (("--ssl-certfile", "/no/such"), "--ssl-certfile /no/such: cannot be used"),
        (("--max-body-size", "10"), "--max-body-size 10: must be at least 1024"),
    ],
)
def test_wrong_options_are_one_line(fake_model: Path, options: tuple[str, str], words: str) -> None:
    server = ServerProcess(fake_model, *options, program="fake_core.py")
    assert server.wait_exit() == 2
    assert words in server.lines[-1] and "Traceback" not in server.output


@pytest.fixture(scope="module")
def server(fake_model: Path) -> Iterator[ServerProcess]:
    options = ("--api-key", "one,two", "--cors-origins", "https://a.example, https://b.example", "--host", "0.0.0.0")
    with ServerProcess(fake_model, *options, program="fake_core.py") as server:
        yield server


def ask(url: str, headers: dict[str, str], method: str = "GET") -> tuple[int, dict[str, str]]:
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, dict(response.headers)
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers)


def test_each_key_opens(server: ServerProcess) -> None:
    for key in ("one", "two"):
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
        assert client.models.list().data
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="three", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="needs its API key"):
        client.responses.create(model="tiny", input="x")
    assert "one" not in server.output.replace("none", ""), "no key is printed"


def test_browsers_of_known_origins_only(server: ServerProcess) -> None:
    url, key = f"{server.url}/v1/models", {"Authorization": "Bearer one"}
    status, headers = ask(url, key | {"Origin": "https://a.example"})
    assert status == 200 and headers["Access-Control-Allow-Origin"] == "https://a.example"
    assert "Origin" in headers["Vary"]
    assert "Access-Control-Allow-Origin" not in ask(url, key | {"Origin": "https://c.example"})[1]
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    status, headers = ask(url, asked | {"Origin": "https://b.example"}, "OPTIONS")
    assert status == 204 and headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    assert ask(url, asked | {"Origin": "https://c.example"}, "OPTIONS")[0] == 401
    status, headers = ask(url, {"Origin": "https://a.example"})
    assert status == 401 and headers["Access-Control-Allow-Origin"] == "https://a.example", "pages can read errors"


def test_request_ids(server: ServerProcess) -> None:
    url = f"{server.url}/v1/models"
    assert ask(url, {"X-Request-Id": "mine-1"})[1]["X-Request-Id"] == "mine-1"
    made = {ask(url, {"X-Request-Id": name})[1]["X-Request-Id"] for name in ("", "x" * 129, "a b")}
    assert len(made) == 3 and all(name.startswith("req-") for name in made)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="one", max_retries=0)
    assert client.completions.create(model="tiny", prompt="x")._request_id.startswith("req-")


def log_entry(server: ServerProcess, request_id: str) -> dict:
    return json.loads(server.wait_line(rf'^\{{.*"request_id":"{request_id}".*\}}$', 5)[0])


def test_access_log_tells_everything_but_texts(server: ServerProcess) -> None:
    body = {"prompt": "secret text", "max_tokens": 5, "user": "u1", "n": 2}
    headers = {"Authorization": "Bearer one"}
    for stream in (False, True):
        name = f"log-{stream}"
        call(f"{server.url}/v1/completions", body | {"stream": stream}, headers | {"X-Request-Id": name})
        entry = log_entry(server, name)
        expected = {"method": "POST", "path": "/v1/completions", "status": 200, "user": "u1", "stream": stream}
        expected |= {"choices": 2, "prompt_tokens": 11, "completion_tokens": 10, "finish_reasons": ["length"] * 2}
        assert entry.items() >= expected.items() and entry["seconds"] > 0
    call(f"{server.url}/v1/completions", body | {"n": 0}, headers | {"X-Request-Id": "wrong"})
    assert log_entry(server, "wrong").items() >= {"status": 400, "param": "n"}.items()
    assert "secret" not in server.output


@pytest.mark.parametrize("stream", [False, True])
def test_access_log_tells_of_clients_that_left(server: ServerProcess, stream: bool) -> None:
    name = f"left-{stream}"
    connection = http.client.HTTPConnection("localhost", int(server.url.rsplit(":", 1)[1]))
    headers = {"Authorization": "Bearer one", "X-Request-Id": name}
    body = {"prompt": "<slow>", "max_tokens": 250, "stream": stream}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse() if stream else None
    time.sleep(0.1)
    if response is not None:
        response.close()
    connection.close()
    entry = log_entry(server, name)
    assert entry["finish_reasons"] == ["abort"] and entry["seconds"] < 2 and entry["completion_tokens"] > 0
    assert entry["status"] in ((200, 499) if stream else (499,))


def test_only_an_open_server_is_warned_of(server: ServerProcess, fake_model: Path) -> None:
    assert server.url and "warning:" not in server.output
    with ServerProcess(fake_model, "--host", "0.0.0.0", "--log-prompts", program="fake_core.py") as other:
        call(f"{other.url}/v1/completions", {"prompt": "abc", "max_tokens": 4}, {"X-Request-Id": "texts"})
        assert log_entry(other, "texts").items() >= {"prompts": ["abc"], "texts": ["abca"]}.items()
        assert "warning: on 0.0.0.0 everyone who reaches this machine can use it" in other.output
        assert "Access-Control-Allow-Origin" not in ask(f"{other.url}/health", {"Origin": "https://a.example"})[1]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_https(fake_model: Path, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
               "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost",
               "-addext", "subjectAltName=IP:127.0.0.1"]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    options = ("--ssl-certfile", cert, "--ssl-keyfile", key)
    with ServerProcess(fake_model, *options, program="fake_core.py") as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(cert))
        with urllib.request.urlopen(f"{server.url}/v1/models", context=context, timeout=10) as response:
            assert json.loads(response.read())["data"][0]["id"] == "tiny"


def test_keys_need_neither_torch_nor_aiohttp() -> None:
    code = "import mambalign.engine.api_keys, sys; sys.exit('torch' in sys.modules or 'aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
