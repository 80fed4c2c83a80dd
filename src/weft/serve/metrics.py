"""The server's counts as Prometheus reads them: text, a line each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from weft.serve.backend import JobState
from weft.serve.served import Served
from weft.serve.server import Server
from weft.serve.statistics import BOUNDS_S, OUTCOMES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def text(server: Server) -> str:
    """All metrics of a server."""
    return "\n".join(_lines(server)) + "\n"


def _lines(server: Server) -> Iterator[str]:
    models = server.models()
    found = [(_labels(m), m, m.statistics.snapshot()) for m in models]
    yield from _head("weft_server_ready", "gauge", "1 where every model that is loaded answers")
    yield f"weft_server_ready {int(server.ready)}"
    yield from _head("weft_server_uptime_seconds", "gauge", "since the server was made")
    yield f"weft_server_uptime_seconds {time.time() - server.began:.3f}"
    yield from _head("weft_model_ready", "gauge", "1 where the model answers")
    yield from (f"weft_model_ready{{{x}}} {int(m.state == 'READY')}" for x, m, _ in found)
    yield from _head("weft_model_standby", "gauge", "1 where a second process would take over at once")
    yield from (f"weft_model_standby{{{x}}} {int(m.backend.stands_by)}" for x, m, _ in found)
    yield from _head("weft_queries_total", "counter", "queries by what became of them")
    for x, _, now in found:
        yield from (f'weft_queries_total{{{x},outcome="{o}"}} {now.outcomes[o]}' for o in OUTCOMES)
    yield from _head("weft_queries_waiting", "gauge", "queries in the queue")
    yield from (f"weft_queries_waiting{{{x}}} {m.waiting}" for x, m, _ in found)
    yield from _head("weft_queries_running", "gauge", "queries in batches that run")
    yield from (f"weft_queries_running{{{x}}} {m.running}" for x, m, _ in found)
    yield from _head("weft_rows_total", "counter", "rows of queries that were computed")
    yield from (f"weft_rows_total{{{x}}} {now.rows}" for x, _, now in found)
    yield from _head("weft_batches_total", "counter", "batches by their rows")
    for x, _, now in found:
        yield from (f'weft_batches_total{{{x},rows="{n}"}} {b.count}' for n, (_, b, _) in sorted(now.batches.items()))
    yield from _head("weft_batch_compute_seconds_total", "counter", "time that batches took in the plan")
    for x, _, now in found:
        yield f"weft_batch_compute_seconds_total{{{x}}} {sum(b.seconds for _, b, _ in now.batches.values()):.9f}"
    yield from _head("weft_worker_restarts_total", "counter", "workers that were started in place of dead ones")
    yield from (f"weft_worker_restarts_total{{{x}}} {m.restarts}" for x, m, _ in found)
    yield from _head("weft_queries_replayed_total", "counter", "queries that were run again as their worker died")
    yield from (f"weft_queries_replayed_total{{{x}}} {now.replayed}" for x, _, now in found)
    yield from _beside([(x, m.backend.job) for x, m, _ in found])
    yield from _head("weft_query_seconds", "histogram", "from a query's arrival to its answer")
    for x, _, now in found:
        below = 0
        for bound, count in zip(BOUNDS_S, now.latencies, strict=False):
            below += count
            yield f'weft_query_seconds_bucket{{{x},le="{bound:g}"}} {below}'
        yield f'weft_query_seconds_bucket{{{x},le="+Inf"}} {now.answered.count}'
        yield f"weft_query_seconds_sum{{{x}}} {now.answered.seconds:.9f}"
        yield f"weft_query_seconds_count{{{x}}} {now.answered.count}"


def _beside(found: Sequence[tuple[str, JobState | None]]) -> Iterator[str]:
    """Of models with a best-effort job."""
    jobs = [(x, f'{x},job="{_escaped(j.name)}"', j) for x, j in found if j is not None]
    if not jobs:
        return
    yield from _head("weft_job_running", "gauge", "1 where a best-effort job is beside the model, 0 if set aside")
    yield from (f"weft_job_running{{{x}}} {int(j.runs)}" for _, x, j in jobs)
    yield from _head("weft_job_done", "gauge", "1 where all of the job is done")
    yield from (f"weft_job_done{{{x}}} {int(j.done)}" for _, x, j in jobs)
    yield from _head("weft_job_passes", "gauge", "passes of the job that are done, of a process its units")
    yield from (f"weft_job_passes{{{x}}} {j.passes}" for _, x, j in jobs)
    yield from _head("weft_beside_late_total", "counter", "batches beside the job that were behind the target")
    yield from (f"weft_beside_late_total{{{x}}} {j.late}" for x, _, j in jobs)
    yield from _head("weft_beside_batches_total", "counter", "batches beside the job by their plan variant")
    for x, _, j in jobs:
        yield from (f'weft_beside_batches_total{{{x},variant="{_escaped(v)}"}} {n}' for v, n in j.variants.items())
    yield from _head("weft_beside_cap", "gauge", "the highest plan variant that is allowed now")
    yield from (f"weft_beside_cap{{{x}}} {j.cap}" for x, _, j in jobs)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _head(name: str, kind: str, told: str) -> Iterator[str]:
    yield f"# HELP {name} {told}"
    yield f"# TYPE {name} {kind}"


def _labels(served: Served) -> str:
    return f'model="{served.name}",version="{served.version}"'  # names hold nothing that needs escaping
