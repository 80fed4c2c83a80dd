"""A process that writes kernels: problems in, sources out. It sees no tensor, no device and no torch.

Requests: `hello` with the facts of a GPU, `make` with a problem. Every answer to `make` names the graph that was read,
so that the parent can tell that both saw the same.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from typing import BinaryIO, cast

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import CudaGenerator
from weft.generate.offer import Offer, kernels_of
from weft.ir.graph import Graph
from weft.ir.text import print_graph
from weft.kernels.codec import Json, kernel_to_json, schedule_to_json
from weft.kernels.dataclass_json import from_json
from weft.tune.messages import Message, body_size, decode, encode
from weft.tune.wire import problem_from_json


def graph_digest(graph: Graph) -> str:
    """SHA-256 of a graph's text, node numbers included."""
    return hashlib.sha256(print_graph(graph).encode()).hexdigest()


def offer_to_json(offer: Offer) -> Mapping[str, Json]:
    """An offer; `weft.tune.emitters` reads it."""
    kernels: list[Json] = [[schedule_to_json(s), kernel_to_json(k)] for s, k in offer.kernels]
    return {"kernels": kernels, "declined": list(offer.declined), "more": offer.more}


def answer(facts: GpuFacts, request: Message) -> Message:
    """The kernels of one problem."""
    problem = problem_from_json(request["problem"])
    offer = kernels_of(CudaGenerator(), problem, facts, int(cast("int", request["most"])))
    return {"event": "made", "graph": graph_digest(problem.graph), **offer_to_json(offer)}


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer requests until the parent goes away."""
    facts = GpuFacts()
    while header := source.read(4):
        request = decode(source.read(body_size(header)))
        if request.get("op") == "hello":
            facts = from_json(GpuFacts, request["facts"])
            continue
        sink.write(encode(answer(facts, request)))
        sink.flush()


def main() -> None:
    """Entry point of the process."""
    requests, answers = (int(x) for x in sys.argv[1:3])
    with os.fdopen(requests, "rb") as source, os.fdopen(answers, "wb") as sink:
        serve(source, sink)


if __name__ == "__main__":
    main()
