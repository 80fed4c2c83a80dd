"""Training of bert_base on drawn sentences: a unit is a step of a batch of 16."""

from __future__ import annotations

import torch

from benchmarks.models import NETWORKS
from benchmarks.process_jobs.training import Training, squares

BATCH = 16
torch.manual_seed(0)
_KIND = NETWORKS["bert_base"]
_TRAINING = Training(_KIND.build(), lambda number: _KIND.inputs(BATCH, number)[0], squares, rate=1e-4)
unit, save, load = _TRAINING.unit, _TRAINING.save, _TRAINING.load
