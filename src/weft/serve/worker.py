"""The process that has a model's plans: `python -m weft.serve.worker FD` on a socket to the front end.

It runs one batch after the other until that socket is closed, and knows no query, no protocol and no queue. Of a
co-location bundle it runs the job, too (`beside.py`).
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import signal
import socket
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from weft.errors import ArtifactError, DeviceError, UserError, WeftError
from weft.ir.types import Array
from weft.serve.channel import DONE, FAILED, RUN, Channel, Kind, Message
from weft.serve.errors import LostDeviceError
from weft.serve.ring import Ring
from weft.serve.signature import Signature


class Model(Protocol):
    """What a worker runs."""

    signature: Signature

    def bind(self, plan: int, inputs: Sequence[Array], outputs: Sequence[Array]) -> Callable[[], None]:
        """What runs one of the plans from these arrays to those."""
        ...

    def warm_up(self) -> None:
        """Run each plan once."""
        ...


@runtime_checkable
class Answering(Protocol):
    """A model that takes batches by itself, as it has something beside them to do."""

    signature: Signature

    def warm_up(self) -> None:
        """Run its plan once."""
        ...

    def open(self, ring: Ring, channel: Channel) -> Callable[[], None]:
        """What answers until the front end is gone."""
        ...

    def close(self) -> None:
        """Behind that: what is beside is ended, and kept."""
        ...


Load = Callable[[Mapping[str, object], Sequence[int]], tuple[Model | Answering, str]]
"""Of settings and files: the model, and a digest of what it was loaded from."""


def serve(channel: Channel, load: Load) -> None:
    """Load, tell, and run batches until the other end is gone.

    Raises:
        LostDeviceError: this process can run nothing more; its batches are for the next one [W304].
    """
    hello = channel.receive()
    if hello is None:
        return
    try:
        model, digest = load(hello.json(), hello.fds)
        model.warm_up()
    except Exception as error:  # out of memory, a missing library: the front end says it, and lives
        _refuse(channel, error)
        return
    finally:
        for fd in hello.fds:
            os.close(fd)
    channel.send_json(Kind.SIGNATURE, {"signature": model.signature.to_json(), "digest": digest})
    memory = channel.receive()
    if memory is None:
        return
    (fd,) = memory.fds
    ring = Ring(model.signature, cast("int", memory.json()["slots"]), fd)
    os.close(fd)
    if isinstance(model, Answering):
        _serve_beside(channel, ring, model)
        return
    bound = [
        [model.bind(p, ring.inputs(slot, p), ring.outputs(slot, p)) for p in range(len(model.signature.sizes))]
        for slot in range(ring.slots)
    ]
    channel.send(Kind.READY)
    gc.collect()
    gc.freeze()
    while (message := channel.receive()) is not None:
        _answer(channel, ring, bound, message)


def _refuse(channel: Channel, error: Exception) -> None:
    told = str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
    channel.send(Kind.REFUSED, told.encode()[:4000])


def _serve_beside(channel: Channel, ring: Ring, model: Answering) -> None:
    try:
        run = model.open(ring, channel)
    except Exception as error:  # whatever the job, its files or the GPU raise
        _refuse(channel, error)
        return
    channel.send(Kind.READY)
    lost = False
    try:
        run()
    except LostDeviceError:
        lost = True  # nothing that is asked of the GPU would return
        raise
    finally:
        del run  # the framework has noted streams for the memory that it keeps alive, and `close` ends those
        if not lost:
            model.close()


def _answer(channel: Channel, ring: Ring, bound: Sequence[Sequence[Callable[[], None]]], message: Message) -> None:
    number, plan, _ = RUN.unpack(message.body)
    began = time.perf_counter()
    try:
        bound[number % ring.slots][plan]()
    except LostDeviceError:
        raise
    except WeftError as error:
        ours = isinstance(error, UserError)
        text = str(error.details.get("problem", str(error).splitlines()[0].removesuffix(f" [{error.code}]")))
        channel.send(Kind.FAILED, FAILED.pack(number, ours) + text.encode()[:2000])
        return
    ring.mark(number)
    channel.send(Kind.DONE, DONE.pack(number, time.perf_counter() - began))


def load_plans(settings: Mapping[str, object], fds: Sequence[int]) -> tuple[Model | Answering, str]:
    """The saved plans in these files, or the co-location bundle in this folder; `alone`: without its job.

    Raises:
        ArtifactError: one cannot be loaded, or they are not of one model [W401].
        DeviceError: one is for a GPU, and there is none [W301].
    """
    import torch

    from weft.options import Options
    from weft.serve.plans import Plans, loaded

    threads = cast("int", settings["threads"])
    if threads:
        torch.set_num_threads(threads)
    cache = cast("str", settings["cache"])
    options = Options(cache_dir=Path(cache) if cache else None, threads=threads)
    trust = cast("list[str]", settings["trust"])
    names = cast("list[str]", settings["names"])
    if settings["bundle"]:
        from weft.serve.beside import opened

        with _naming(names[0]):
            return opened(fds[0], names[0], trust, options, alone=bool(settings["alone"]))
    models, digests = [], hashlib.sha256()
    for fd, name in zip(fds, names, strict=True):
        path = Path(f"/dev/fd/{fd}")
        with _naming(name):
            models.append(loaded(path, trust, options))
            with zipfile.ZipFile(path) as archive:
                digests.update(archive.read("manifest.json"))
    return Plans(models), digests.hexdigest()


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """What is wrong with a file is told by the name that it has for people, not by that of its descriptor."""
    try:
        yield
    except ArtifactError as error:
        problem, remedy = (str(error.details.get(k, "")) for k in ("problem", "remedy"))
        raise ArtifactError(where=name, problem=problem, remedy=remedy) from None
    except DeviceError as error:  # a plan for a GPU, and there is none
        if type(error) is not DeviceError:
            raise
        raise DeviceError(where=name, problem=str(error.details["problem"])) from None


def _end_with(parent: int) -> None:
    """End when the front end is gone, at whatever batch this is, which may never end."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    """Run until the front end closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the front end drains, and then ends this
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with socket.socket(fileno=int(sys.argv[1])) as end:
        try:
            serve(Channel(end), load_plans)
        except BrokenPipeError:
            return  # the front end is gone
        except LostDeviceError as error:
            sys.exit(f"weft: {error}")


if __name__ == "__main__":
    main()
