"""Training losses."""

from __future__ import annotations

from weft.frontends.onnx.call import Call, Handler, Result
from weft.ir.declined import Declined


def _nll(c: Call) -> Result:
    return c.rule("nll_loss", c.x(0), c.x(1), c.x(2), reduction=c.get("reduction", "mean"), **_ignored(c))


def _cross_entropy(c: Call) -> Result:
    made = c.rule("softmax_cross_entropy", c.x(0), c.x(1), c.x(2), reduction=c.get("reduction", "mean"), **_ignored(c))
    return made if isinstance(made, Declined) else made[: max(c.num_outputs, 1)]


def _ignored(c: Call) -> dict[str, int]:
    return {"ignore_index": int(c.get("ignore_index"))} if c.get("ignore_index") is not None else {}


HANDLERS: dict[tuple[str, str], Handler] = {
    ("", "NegativeLogLikelihoodLoss"): _nll,
    ("", "SoftmaxCrossEntropyLoss"): _cross_entropy,
}
