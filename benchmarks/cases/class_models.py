"""Classes of networks that were behind their peers: for each device its classes, for each class three members or more.

Weights are random, from each library's own configuration. Every class has members that were looked at while its
kernels were written (`tuned`), and two at least that were not. `timm` and `transformers` are needed for all.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.cases import mamba
from benchmarks.models import load

Inputs = tuple[torch.Tensor, ...]
_WORDS = 1000


class First(torch.nn.Module):
    """A module called by place, whose first tensor alone is the result: the same for every contender."""

    def __init__(self, module: torch.nn.Module, names: tuple[str, ...] = ()) -> None:
        """`names`: what the module calls its arguments; by place without."""
        super().__init__()
        self.module, self.names = module, names

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        named = dict(zip(self.names, inputs, strict=True)) if self.names else {}
        found = self.module(**named) if named else self.module(*inputs)
        while not isinstance(found, torch.Tensor):
            found = found[0]
        return found


@dataclass(frozen=True)
class Member:
    """One network of a class."""

    group: str
    """The class."""
    name: str
    make: Callable[[], tuple[torch.nn.Module, Inputs]]
    """The module in inference mode and its inputs; draws from torch's seed."""
    batch: int = 1
    library: str = "timm"
    """What must be installed; empty: nothing."""
    tuned: bool = False
    """Looked at while tuning."""

    @property
    def case(self) -> str:
        """As a record names it."""
        return f"{self.name}/b{self.batch}"


def _timm(group: str, name: str, size: int = 224, batch: int = 1, *, tuned: bool = False) -> Member:
    def make() -> tuple[torch.nn.Module, Inputs]:
        model = importlib.import_module("timm").create_model(name, pretrained=False)
        return First(model).eval(), (torch.randn(batch, 3, size, size),)

    return Member(group, name, make, batch, tuned=tuned)


def _own(group: str, name: str, batch: int) -> Member:
    def make() -> tuple[torch.nn.Module, Inputs]:
        module, inputs = load(name, batch)
        return First(module).eval(), tuple(inputs)

    return Member(group, name, make, batch, library="", tuned=True)


def _hf(
    group: str,
    name: str,
    model: str,
    config: Mapping[str, Any],
    inputs: Mapping[str, tuple[int, ...]],
    *,
    of: str = "",
    tuned: bool = False,
) -> Member:
    """One of transformers, or a part. Inputs by name and shape: integers where the name ends in `ids`, else normal."""

    def make() -> tuple[torch.nn.Module, Inputs]:
        library: Any = importlib.import_module("transformers")
        whole, _, part = model.partition(".")
        made = getattr(library, whole)(getattr(library, of or whole.partition("Model")[0] + "Config")(**config)).eval()
        made = made.get_submodule(part)
        tensors = [torch.randint(3, _WORDS, s) if n.endswith("ids") else torch.randn(s) for n, s in inputs.items()]
        return First(made, tuple(inputs)).eval(), tuple(tensors)

    return Member(group, name, make, next(iter(inputs.values()))[0], "transformers", tuned)


def _mamba() -> tuple[torch.nn.Module, Inputs]:
    return First(mamba.Mamba()).eval(), (mamba.inputs(),)


# --- configurations


def _gpt2(layers: int) -> dict[str, Any]:
    return {"vocab_size": _WORDS, "n_layer": layers, "use_cache": False}


def _opt(layers: int) -> dict[str, Any]:
    return {"vocab_size": _WORDS, "num_hidden_layers": layers, "use_cache": False}


def _neox(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": _WORDS, "hidden_size": 768, "num_hidden_layers": layers, "num_attention_heads": 12,
        "intermediate_size": 3072, "use_cache": False,
    }  # fmt: skip


def _wide(hidden: int, inner: int, heads: int, groups: int) -> dict[str, Any]:
    """Four layers of a decoder with grouped heads."""
    return {
        "vocab_size": _WORDS, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 4,
        "num_attention_heads": heads, "num_key_value_heads": groups, "use_cache": False, "pad_token_id": 0,
    }  # fmt: skip


_STATES = {"vocab_size": _WORDS, "hidden_size": 256, "num_hidden_layers": 2, "use_cache": False}
_SOUND = {"num_hidden_layers": 3}


# --- the classes

PREFILL, WIDE, LONG, GROUPS = "small prefill", "wide prefill", "long rows", "group convolutions"
BATCHES, SCANS, SOUND, WINDOWS = "large batches", "scans", "1-D convolutions", "windows"
GPU: tuple[Member, ...] = (
    _hf(PREFILL, "gpt2", "GPT2Model", _gpt2(12), {"input_ids": (1, 512)}, tuned=True),
    _hf(PREFILL, "opt", "OPTModel", _opt(12), {"input_ids": (1, 512)}),
    _hf(PREFILL, "gpt_neox", "GPTNeoXModel", _neox(12), {"input_ids": (1, 512)}),
    _hf(WIDE, "llama", "LlamaModel", _wide(2048, 8192, 32, 8), {"input_ids": (1, 512)}, tuned=True),
    _hf(WIDE, "qwen2", "Qwen2Model", _wide(1536, 8960, 12, 2), {"input_ids": (1, 512)}),
    _hf(WIDE, "mistral", "MistralModel", _wide(2048, 7168, 16, 4), {"input_ids": (1, 512)}),
    _hf(
        LONG, "whisper_encoder", "WhisperModel.encoder",
        {"d_model": 512, "encoder_layers": 6, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048,
         "decoder_layers": 1, "decoder_attention_heads": 8},
        {"input_features": (1, 80, 3000)}, of="WhisperConfig", tuned=True,
    ),
    _hf(LONG, "ast", "ASTModel", {"num_hidden_layers": 6}, {"input_values": (1, 1024, 128)}),
    _hf(
        LONG, "dinov2", "Dinov2Model",
        {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "image_size": 448},
        {"pixel_values": (1, 3, 448, 448)},
    ),
    _timm(GROUPS, "regnety_016", tuned=True),
    _timm(GROUPS, "resnext50_32x4d"),
    _timm(GROUPS, "regnetx_032"),
    _timm(BATCHES, "convnext_tiny", batch=16, tuned=True),
    _timm(BATCHES, "densenet121", batch=16, tuned=True),
    _own(BATCHES, "segformer_b0", 16),
    _own(BATCHES, "vgg16", 16),
    _timm(BATCHES, "efficientnet_b0", batch=16),
    _timm(BATCHES, "hrnet_w18_small", batch=16),
    Member(SCANS, "mamba", _mamba, library="transformers", tuned=True),
    _hf(SCANS, "falcon_mamba", "FalconMambaModel", _STATES, {"input_ids": (1, 64)}),
    _hf(
        SCANS, "mamba2", "Mamba2Model", {**_STATES, "num_heads": 8, "head_dim": 64, "state_size": 64, "n_groups": 1},
        {"input_ids": (1, 64)},
    ),
    _hf(SOUND, "wav2vec2", "Wav2Vec2Model", _SOUND, {"input_values": (4, 16000)}, tuned=True),
    _hf(SOUND, "hubert", "HubertModel", _SOUND, {"input_values": (4, 16000)}),
    _hf(SOUND, "data2vec_audio", "Data2VecAudioModel", _SOUND, {"input_values": (4, 16000)}),
    _timm(WINDOWS, "maxvit_tiny_tf_224", batch=2, tuned=True),
    _timm(WINDOWS, "swinv2_tiny_window8_256", 256, 2),
    _timm(WINDOWS, "coatnet_0_rw_224", batch=2),
)  # fmt: skip
PHONES, DECODERS, DEPTHWISE, JOINED = "mobile", "decoders", "depthwise and norms", "concatenations"
CPU: tuple[Member, ...] = (
    _timm(PHONES, "mobilenetv2_100", tuned=True),
    _timm(PHONES, "mobilenetv3_large_100"),
    _timm(PHONES, "tf_efficientnet_lite0"),
    _timm(GROUPS, "regnety_008", tuned=True),
    _timm(GROUPS, "resnext50_32x4d"),
    _timm(GROUPS, "regnetx_016"),
    _hf(DECODERS, "gpt2", "GPT2Model", _gpt2(4), {"input_ids": (1, 64)}, tuned=True),
    _hf(DECODERS, "opt", "OPTModel", _opt(4), {"input_ids": (1, 64)}),
    _hf(DECODERS, "gpt_neox", "GPTNeoXModel", _neox(4), {"input_ids": (1, 64)}),
    _timm(WINDOWS, "swin_tiny_patch4_window7_224", tuned=True),
    _timm(WINDOWS, "swinv2_tiny_window8_256", 256),
    _timm(WINDOWS, "nest_tiny"),
    _timm(DEPTHWISE, "convnext_atto", tuned=True),
    _timm(DEPTHWISE, "convnextv2_atto"),
    _timm(DEPTHWISE, "inception_next_atto"),
    _timm(JOINED, "densenet121", tuned=True),
    _timm(JOINED, "ese_vovnet39b"),
    _timm(JOINED, "dla34"),
)
