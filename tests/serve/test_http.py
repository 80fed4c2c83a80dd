"""The protocol over HTTP, by a server in this process: good queries, over a hundred kinds of bad ones, and limits."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.cases.serve_requests import HEADER, OVER, Answer, Request, binary, changed, good, malformed, send
from tests.serve.conftest import Saved

pytest.importorskip("fastapi", reason="the extra weft[serve] is not installed")
pytest.importorskip("uvicorn", reason="the extra weft[serve] is not installed")

from weft.errors import OptionError
from weft.serve import ServeOptions, Server, Source
from weft.serve.access import FrontOptions, FrontSettings
from weft.serve.front import Front, listen

BAD = malformed()


@contextmanager
def fronted(server: Server, **settings: Any) -> Iterator[int]:
    options = FrontOptions(port=0, grpc_port=-1, **settings)
    with listen(options) as listening:
        front = Front(server, options, listening)
        front.start()
        try:
            yield front.port
        finally:
            front.stop()


@pytest.fixture(scope="module")
def port(saved: Saved) -> Iterator[int]:
    models = {"mlp": [saved.one, saved.eight], "mixing": saved.mixing, "two": saved.two}
    with (
        Server(models, saved.options(isolated=False)) as server,
        fronted(server, max_body_bytes=OVER) as number,
    ):  # fmt: skip
        yield number


def ask(port: int, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> Answer:
    if body is None:
        return send(port, Request(method="GET", path=path, headers=headers or {}))
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return send(port, Request(data, path=path, headers=headers or {}))


def works(port: int, saved: Saved) -> bool:
    answer = ask(port, "/v2/models/mlp/infer", good(2))
    given = np.array(good(2)["inputs"][0]["data"], np.float32).reshape(2, 16)
    data = json.loads(answer.body)["outputs"][0]["data"]
    return answer.status == 200 and np.allclose(data, saved.answer("mlp", given)[0].reshape(-1), atol=1e-5)


def test_there_are_a_hundred_kinds() -> None:
    assert len(BAD) >= 150


@pytest.mark.parametrize("name", BAD)
def test_what_is_malformed_is_told(name: str, port: int) -> None:
    request = BAD[name]
    answer = send(port, request)
    assert answer.status in request.statuses, answer.body[:500]
    if name != "a header over the limit" and "nobody" not in request.method and answer.status != 431:
        told = json.loads(answer.body)["error"]
        assert isinstance(told, str) and 5 < len(told) < 1000


def test_bytes_changed_at_random_are_never_the_servers_fault(port: int, saved: Saved) -> None:
    length = str(binary(2).headers[HEADER])
    for i, body in enumerate(changed(250, seed=5)):
        headers = {HEADER: length} if i % 2 else {}
        answer = send(port, Request(body, headers=headers))
        assert answer.status in (200, 400), (body, answer)
    assert works(port, saved)


def test_what_is_no_http_is_refused(port: int, saved: Saved) -> None:
    for data in (b"nonsense\r\n\r\n", b"GET\r\n\r\n", bytes(range(256)), b"POST /v2 HTTP/9.9\r\n\r\n",
                 b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: x\r\nContent-Length: minus\r\n\r\n",
                 b"POST /v2 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"):  # fmt: skip
        with socket.create_connection(("127.0.0.1", port), timeout=20) as there:
            there.sendall(data)
            assert b" 40" in there.recv(4096)[:20]
    assert works(port, saved)


def test_a_header_that_is_there_twice(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    request = binary()
    connection.putrequest("POST", request.path)
    for value in (request.headers[HEADER], "5"):
        connection.putheader(HEADER, value)
    connection.putheader("Content-Length", str(len(request.body)))
    connection.endheaders(request.body)
    response = connection.getresponse()
    assert response.status == 400 and b"twice" in response.read()
    connection.close()


def test_queries_in_json(port: int, saved: Saved) -> None:
    assert works(port, saved)
    nested = good(2)
    nested["inputs"][0]["data"] = np.reshape(nested["inputs"][0]["data"], (2, 16)).tolist()
    nested |= {"id": "seven", "outputs": [{"name": "output"}]}
    answer = json.loads(ask(port, "/v2/models/mlp/versions/1/infer", nested).body)
    assert (answer["id"], answer["model_name"], answer["model_version"]) == ("seven", "mlp", "1")
    assert answer["outputs"][0]["shape"] == [2, 4]
    inputs = [
        {"name": "a", "shape": [4, 5], "datatype": "FP16", "data": [0.5, 1.5, 2.5, 3.5, 9.5] * 4},
        {"name": "flag", "shape": [4], "datatype": "BOOL", "data": [True, False, False, True]},
    ]
    answer = json.loads(ask(port, "/v2/models/two/infer", {"inputs": inputs}).body)
    first, second = answer["outputs"]
    assert first["datatype"] == "FP16" and first["data"][:6] == [1.5, 4.5, 7.5, 10.5, 28.5, 0.5]
    assert second == {"name": "output_1", "datatype": "INT64", "shape": [4], "data": [4, 4, 4, 4]}
    inputs[1]["data"] = [1, 0, 0, 1]
    assert b"has data of type int" in ask(port, "/v2/models/two/infer", {"inputs": inputs}).body
    whole = {"inputs": [{"name": "x", "shape": [3, 5], "datatype": "FP32", "data": [1.0] * 15}]}
    assert json.loads(ask(port, "/v2/models/mixing/infer", whole).body)["outputs"][0]["data"] == [0.0] * 15


def test_queries_with_bytes(port: int, saved: Saved) -> None:
    import gzip

    request = binary(3)
    given = np.arange(48, dtype=np.float32).reshape(3, 16)
    want = saved.answer("mlp", given)[0]
    answer = send(port, request)
    assert np.allclose(json.loads(answer.body)["outputs"][0]["data"], want.reshape(-1), atol=1e-5)
    size = int(request.headers[HEADER])
    text = json.loads(request.body[:size]) | {"parameters": {"binary_data_output": True}}
    head = json.dumps(text).encode()
    for encoding in ("", "gzip"):
        body = head + request.body[size:]
        headers = {HEADER: str(len(head))} | ({"Content-Encoding": encoding} if encoding else {})
        answer = send(port, Request(gzip.compress(body) if encoding else body, headers=headers))
        size = int(answer.headers[HEADER.lower()])
        told = json.loads(answer.body[:size])["outputs"][0]
        assert told["parameters"] == {"binary_data_size": 48} and "data" not in told
        assert np.allclose(np.frombuffer(answer.body[size:], np.float32).reshape(3, 4), want, atol=1e-5)
        size = int(request.headers[HEADER])


def test_what_is_told_of_server_and_models(port: int) -> None:
    assert ask(port, "/v2/health/live").status == ask(port, "/v2/health/ready").status == 200
    assert json.loads(ask(port, "/v2").body)["name"] == "weft"
    about = json.loads(ask(port, "/v2/models/mlp").body)
    assert about["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 16]}]
    assert json.loads(ask(port, "/v2/models/mixing").body)["inputs"][0]["shape"] == [3, 5]
    assert ask(port, "/v2/models/mlp/ready").status == ask(port, "/v2/models/mlp/versions/1/ready").status == 200
    assert json.loads(ask(port, "/v2/models/mlp/config").body)["max_batch_size"] == 8
    ask(port, "/v2/models/mlp/infer", good(2))
    stats = json.loads(ask(port, "/v2/models/mlp/stats").body)["model_stats"][0]
    assert stats["inference_count"] >= 2 and stats["inference_stats"]["success"]["count"] >= 1
    assert len(json.loads(ask(port, "/v2/models/stats").body)["model_stats"]) == 3
    index = json.loads(ask(port, "/v2/repository/index", {}).body)
    assert {(m["name"], m["state"]) for m in index} == {(n, "READY") for n in ("mlp", "mixing", "two")}
    lines = ask(port, "/metrics").body.decode().splitlines()
    assert "weft_server_ready 1" in lines
    named = [x for x in lines if x.startswith('weft_queries_total{model="mlp",version="1",outcome="success"}')]
    assert len(named) == 1 and float(named[0].split()[-1]) >= 1
    buckets = [int(x.split()[-1]) for x in lines if x.startswith('weft_query_seconds_bucket{model="mlp"')]
    assert buckets == sorted(buckets) and len(buckets) == 19


def test_models_come_and_go(saved: Saved) -> None:
    with Server({"mlp": saved.eight}, saved.options(isolated=False)) as server, fronted(server) as port:
        assert ask(port, "/v2/repository/models/mlp/unload", {}).status == 200
        answer = ask(port, "/v2/models/mlp/infer", good())
        assert answer.status == 503 and int(answer.headers["retry-after"]) >= 1
        assert ask(port, "/v2/models/mlp/ready").status == 503
        assert json.loads(ask(port, "/v2/repository/index", {"ready": True}).body) == []
        assert ask(port, "/v2/repository/models/mlp/load", {}).status == 200
        assert works(port, saved)
    with Server(saved.eight, saved.options(isolated=False)) as server, fronted(server, control=False) as port:
        for action in ("load", "unload"):
            assert b"at a client's wish" in ask(port, f"/v2/repository/models/eight/{action}", {}).body


def test_a_token_is_asked_for(saved: Saved) -> None:
    with Server({"mlp": saved.eight}, saved.options(isolated=False)) as server, fronted(server, token="a b c") as port:
        for shown in (
            {},
            {"Authorization": "Bearer abc"},
            {"Authorization": "a b c"},
            {"Authorization": "Basic a b c"},
        ):
            answer = ask(port, "/v2/models/mlp/infer", good(), shown)
            assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert ask(port, "/metrics", headers=shown).status == 401
        assert ask(port, "/v2/health/ready").status == 200
        assert ask(port, "/v2/models/mlp/infer", good(), {"Authorization": "bearer a b c"}).status == 200


def test_tls(saved: Saved, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(cert),
               "-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("there is no openssl that could make a certificate")
    with Server({"mlp": saved.eight}, saved.options(isolated=False)) as server:
        with fronted(server, cert=cert, key=key) as port:
            context = ssl.create_default_context(cafile=str(cert))
            connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=20, context=context)
            connection.request("POST", "/v2/models/mlp/infer", json.dumps(good()))
            assert connection.getresponse().status == 200
            connection.close()
        key.write_text("no key")
        with pytest.raises(OptionError, match="it cannot be used"), fronted(server, cert=cert, key=key):
            pass


def test_overload_and_deadlines_have_their_codes(saved: Saved) -> None:
    with (
        Server({"mlp": saved.eight}, saved.options(isolated=False, max_queries=4, max_delay_s=3.0)) as server,
        fronted(server) as port,
    ):  # fmt: skip
        late = ask(port, "/v2/models/mlp/infer", {**good(), "parameters": {"timeout": 50_000}})
        assert late.status == 504 and "no answer within 0.05 s" in json.loads(late.body)["error"]
        waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
        text = json.dumps(good()).encode()
        for there in waiting:
            there.sendall(b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(text))
            there.sendall(text)
        until(lambda: server.model("mlp").waiting == 4)
        refused = ask(port, "/v2/models/mlp/infer", good())
        assert refused.status == 429 and int(refused.headers["retry-after"]) >= 1
        for there in waiting[1:]:  # who closes takes back what still waits
            there.close()
        until(lambda: server.model("mlp").waiting == 1)
        assert waiting[0].recv(100).startswith(b"HTTP/1.1 200")
        waiting[0].close()
        assert server.model("mlp").statistics.snapshot().outcomes["cancelled"] == 3


def until(what: Any) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def test_a_body_that_does_not_come_is_not_waited_for(saved: Saved) -> None:
    with Server({"mlp": saved.eight}, saved.options(isolated=False)) as server, fronted(server, read_s=0.2) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as there:
            there.sendall(b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
            assert there.recv(100).startswith(b"HTTP/1.1 408")
        assert works(port, saved)


def test_the_end_answers_what_waits(saved: Saved) -> None:
    with Server({"mlp": saved.eight}, saved.options(isolated=False, max_delay_s=0.5)) as server:
        options = FrontOptions(port=0, grpc_port=-1)
        with listen(options) as listening:
            front = Front(server, options, listening)
            front.start()
            answers: list[Answer] = []
            threads = [
                threading.Thread(target=lambda: answers.append(ask(front.port, "/v2/models/mlp/infer", good())))
                for _ in range(5)
            ]
            for t in threads:
                t.start()
            until(lambda: server.model("mlp").waiting == 5)
            front.stop()
            for t in threads:
                t.join()
            assert [a.status for a in answers] == [200] * 5


def test_a_port_that_is_taken_is_told(port: int) -> None:
    with pytest.raises(OptionError, match="--port"):
        listen(FrontOptions(port=port))
    with pytest.raises(OptionError, match="--host"):
        listen(FrontOptions(host="no.such.host.invalid"))


def test_settings_that_are_none(tmp_path: Path) -> None:
    for settings, why in (
        ({"port": 70000}, "port"), ({"grpc_port": -2}, "grpc_port"), ({"max_body_bytes": 0}, "max_body"),
        ({"cert": tmp_path / "x"}, "together"), ({"cert": tmp_path / "x", "key": tmp_path / "y"}, "is no file"),
        ({"token": "ü"}, "ASCII"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=why):
            FrontOptions(**settings)
    assert FrontOptions(host="0.0.0.0").is_open and not FrontOptions(host="0.0.0.0", token="x").is_open


@pytest.mark.slow
def test_a_connection_rests_between_two_queries(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for rest_s in (6.0, 0.0):  # uvicorn's own five seconds would end it
        connection.request("GET", "/v2")
        assert connection.getresponse().read()
        time.sleep(rest_s)
    connection.close()


def test_what_the_process_of_a_front_end_is_told(tmp_path: Path) -> None:
    (tmp_path / "key").touch()
    models = (Source("m", "2", (tmp_path / "a.weft", tmp_path / "b.weft")),)
    front = FrontOptions(port=0, token="secret", cert=tmp_path / "key", key=tmp_path / "key")
    options = ServeOptions(cache=tmp_path, trust=("ab",), standby=True)
    for directory in (None, tmp_path):
        settings = FrontSettings(models, directory, options, front, 7, standby=True, without=("m",))
        assert FrontSettings.from_json(settings.to_json()) == settings
