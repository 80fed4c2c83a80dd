"""Triton's client at work: `python client.py HTTP_PORT GRPC_PORT`, with `tritonclient[http,grpc]`. Prints `fine`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
import tritonclient.http.aio

X = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)


def given(module: Any, *, binary: bool = True) -> Any:
    found = module.InferInput("input", [3, 16], "FP32")
    found.set_data_from_numpy(X, **({} if module is tritonclient.grpc else {"binary_data": binary}))
    return found


def check(module: Any, port: str) -> np.ndarray[Any, Any]:
    with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("mlp", "1")
        client.get_server_metadata()
        client.get_model_metadata("mlp")
        client.get_model_config("mlp")
        client.get_model_repository_index()
        answer = client.infer("mlp", [given(module)], request_id="7", outputs=[module.InferRequestedOutput("output")])
        first = answer.as_numpy("output")
        waiting = [client.async_infer("mlp", [given(module)]) for _ in range(5)] if module is tritonclient.http else []
        for one in waiting:
            assert np.array_equal(one.get_result().as_numpy("output"), first)
        client.get_inference_statistics("mlp")
        client.unload_model("mlp")
        assert not client.is_model_ready("mlp")
        client.load_model("mlp")
        assert client.is_model_ready("mlp")
        try:
            client.infer("nobody", [given(module)])
            told = "an answer"
        except tritonclient.utils.InferenceServerException as error:
            told = str(error)
        assert "no model 'nobody'" in told
    return np.asarray(first)


async def together(port: str) -> np.ndarray[Any, Any]:
    async with tritonclient.http.aio.InferenceServerClient(f"127.0.0.1:{port}") as client:
        text = given(tritonclient.http, binary=False)
        found = await asyncio.gather(*[client.infer("mlp", [text], request_compression_algorithm=how)
                                       for how in (None, "gzip", "deflate")])  # fmt: skip
    assert all(np.array_equal(x.as_numpy("output"), found[0].as_numpy("output")) for x in found)
    return np.asarray(found[0].as_numpy("output"))


def main() -> None:
    http, grpc = sys.argv[1:]
    answers = [check(tritonclient.http, http), check(tritonclient.grpc, grpc), asyncio.run(together(http))]
    assert all(np.allclose(a, answers[0], atol=1e-6) for a in answers)
    print("fine")  # noqa: T201 - what the test reads


if __name__ == "__main__":
    main()
