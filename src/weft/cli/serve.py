"""`weft serve`: saved plans over the protocols of KServe."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.show import visible
from weft.errors import OptionError
from weft.options import Options

TOKEN = "WEFT_SERVE_TOKEN"


def serve_command(
    files: Annotated[
        list[str],
        typer.Argument(metavar="[FILE ...]", help="saved plans: [NAME[:VERSION]=]FILE[,FILE...], a file by batch size"),
    ] = [],  # noqa: B006
    repository: Annotated[
        Path | None, typer.Option(help="a folder of further models: NAME.weft, or NAME/VERSION/*.weft")
    ] = None,
    host: Annotated[str, typer.Option(help="address to listen at; others than this machine's want a token")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="of HTTP; 0: any")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="of gRPC; 0: any, -1: none")] = 8001,
    max_batch: Annotated[int, typer.Option(help="most rows of a batch; 0: those of the largest plan")] = 0,
    max_queue_delay: Annotated[float, typer.Option(help="milliseconds that a batch waits to be full")] = 0.0,
    max_queue: Annotated[int, typer.Option(help="most queries of a model that wait")] = 1024,
    timeout: Annotated[float, typer.Option(help="seconds of a query that does not say how long it waits")] = 30.0,
    worker_timeout: Annotated[float, typer.Option(help="seconds of one batch until its worker is killed")] = 60.0,
    drain_timeout: Annotated[
        float, typer.Option(help="seconds to answer what waits when a model or the server ends")
    ] = (30.0),
    threads: Annotated[int, typer.Option(help="of the plans' kernels; 0: as each plan has them")] = 0,
    standby: Annotated[
        bool, typer.Option("--standby", help="keep second processes loaded, which take over when the first die")
    ] = False,
    trust: Annotated[list[str], typer.Option(help="digest of a plan that somebody else saved")] = [],  # noqa: B006
    token_file: Annotated[Path | None, typer.Option(help=f"a token that requests must show; else ${TOKEN}")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="certificate (PEM)")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="its key (PEM)")] = None,
    max_body: Annotated[float, typer.Option(help="largest request in MiB")] = 64.0,
    max_connections: Annotated[int, typer.Option(help="most connections of HTTP")] = 1024,
    control: Annotated[
        bool, typer.Option("--control/--no-control", help="clients may load and unload models from their files")
    ] = True,
) -> None:
    """Serve saved plans over HTTP and gRPC (Open Inference Protocol). Example: weft serve mlp=mlp-1.weft,mlp-8.weft.

    SIGTERM or Ctrl-C: what waits is answered, then it ends. docs/serve.md has the protocol, batches and faults.
    """
    from weft.serve.supervisor import Supervisor, need

    need()
    from weft.serve.access import MIB, FrontOptions
    from weft.serve.front import listen
    from weft.serve.process import opened
    from weft.serve.settings import ServeOptions, found_in, sources

    models = sources(files)
    if repository is not None:
        found_in(repository)
    elif not models:
        raise OptionError(option="FILE", problem="there is no model: give files, or --repository")
    for fd in opened([file for model in models for file in model.files]):  # told before any process is started
        os.close(fd)
    environment = Options.from_environment(os.environ)
    options = ServeOptions(
        max_batch=max_batch, max_delay_s=max_queue_delay / 1e3, max_queries=max_queue, timeout_s=timeout,
        worker_timeout_s=worker_timeout, drain_s=drain_timeout, threads=threads or environment.threads,
        standby=standby, cache=environment.cache, trust=tuple(trust),
    )  # fmt: skip
    front = FrontOptions(
        host=host, port=port, grpc_port=grpc_port, token=_token(token_file), cert=tls_cert, key=tls_key,
        max_body_bytes=int(max_body * MIB), max_connections=max_connections, control=control,
    )  # fmt: skip
    if front.is_open:
        _say(f"warning: {host} can be reached from elsewhere, and there is no token")
    with listen(front) as listening:
        code = Supervisor(models, repository, options, front, listening, _say).run()
    if code:
        sys.exit(code)


def _say(text: str) -> None:
    for line in text.splitlines():
        print(
            visible(line, 400) if line.startswith("  ") else f"weft: {visible(line, 400)}", file=sys.stderr, flush=True
        )


def _token(path: Path | None) -> str:
    if path is None:
        return os.environ.get(TOKEN, "")
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or "no text in UTF-8"
        raise OptionError(option="--token-file", problem=f"{path}: {problem}") from None
    if not text:
        raise OptionError(option="--token-file", problem=f"{path} is empty")
    return text
