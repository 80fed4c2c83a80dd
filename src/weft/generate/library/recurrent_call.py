"""Runs `weft.recurrent_weights`: weights of a recurrent layer in one piece of memory, as cuDNN reads them.

Weights that lie apart are gathered by every call of the framework's layer, which also warns of that. The framework's
own modules gather theirs once, by the same operator (`torch.nn.RNNBase.flatten_parameters`); it says nothing of it
in its schema, but makes the tensors that it is given views of the new memory. So it is given copies.
"""

from __future__ import annotations

import torch

from weft.generate.library.execute import register

WEIGHTS = "weft.recurrent_weights"


def recurrent_weights(
    mode: int, width: int, hidden: int, directions: int, *weights: torch.Tensor
) -> list[torch.Tensor]:
    """Copies of the weights of one layer, which on a GPU with cuDNN follow each other as that has it.

    Args:
        mode: cuDNN's number of the layer: RNN with relu 0, with tanh 1, LSTM 2, GRU 3.
        width: elements of an input.
        hidden: elements of a state.
        directions: 1, or 2: forward and backward.
        weights: per direction of the input (gates · hidden, width), of the state (gates · hidden, hidden), and both
            biases (gates · hidden,) where there are any.
    """
    made = [w.clone(memory_format=torch.contiguous_format) for w in weights]
    if made[0].is_cuda and torch.cudnn_is_acceptable(made[0]):
        each = len(made) // directions
        with torch.cuda.device(made[0].device), torch.no_grad():
            torch._cudnn_rnn_flatten_weight(made, each, width, mode, hidden, 0, 1, False, directions == 2)
    return made


register(WEIGHTS, recurrent_weights)
