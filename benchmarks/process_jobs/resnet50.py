"""Training of resnet50 on drawn images: a unit is a step of a batch of 32."""

from __future__ import annotations

import torch

from benchmarks.models import NETWORKS
from benchmarks.process_jobs.training import Training, classes

BATCH = 32
torch.manual_seed(0)
_KIND = NETWORKS["resnet50"]
_TRAINING = Training(_KIND.build(), lambda number: _KIND.inputs(BATCH, number)[0], classes(1000))
unit, save, load = _TRAINING.unit, _TRAINING.save, _TRAINING.load
