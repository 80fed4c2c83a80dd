"""The architectures of the zoo: 150 of timm, torchvision, transformers, diffusers and torch, with random weights.

Each is made from its library's own configuration, nothing is fetched. Where the published size would take minutes on a
processor, layers are fewer and narrower; what is computed in a layer is the library's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

Called = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]
"""A module, and what it is called with by place and by name."""


@dataclass(frozen=True)
class Architecture:
    """One row of the zoo."""

    name: str
    """`library/architecture`."""
    family: str
    make: Callable[[], Called]
    """The module in inference mode, with random weights, and its example inputs at batch 1; draws from torch's seed."""
    on_gpu: bool = False
    """One of the 60 that are measured on a GPU, too."""

    @property
    def library(self) -> str:
        """What must be installed."""
        return self.name.partition("/")[0]


# --- inputs


def _image(size: int, channels: int = 3, name: str = "") -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
    def made() -> tuple[tuple[Any, ...], dict[str, Any]]:
        image = torch.randn(1, channels, size, size)
        return ((), {name: image}) if name else ((image,), {})

    return made


def _named(**shapes: Any) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Tensors by name: a shape is drawn from a normal distribution; (bound, *shape) after `"ids"` are integers."""

    def made() -> tuple[tuple[Any, ...], dict[str, Any]]:
        found: dict[str, Any] = {}
        for name, shape in shapes.items():
            if isinstance(shape, tuple) and shape and shape[0] == "ids":
                found[name] = torch.randint(3, shape[1], shape[2:])
            elif isinstance(shape, tuple) and shape and shape[0] == "ones":
                found[name] = torch.ones(shape[1:], dtype=torch.int64)
            elif isinstance(shape, tuple):
                found[name] = torch.randn(shape)
            else:
                found[name] = shape
        return (), found

    return made


_WORDS = 1000
_TOKENS = _named(input_ids=("ids", _WORDS, 1, 64), attention_mask=("ones", 1, 64))
_IDS = _named(input_ids=("ids", _WORDS, 1, 64))
_PAIR = _named(input_ids=("ids", _WORDS, 1, 48), decoder_input_ids=("ids", _WORDS, 1, 24))
_SOUND = _named(input_values=(1, 16000))


# --- libraries


def _timm(name: str, family: str, size: int = 224, *, gpu: bool = False, **options: Any) -> Architecture:
    def make() -> Called:
        model = importlib.import_module("timm").create_model(name, pretrained=False, **options)
        return model.eval(), (torch.randn(1, 3, size, size),), {}

    return Architecture(f"timm/{name}", family, make, gpu)


def _vision(
    place: str,
    family: str,
    shape: tuple[int, ...],
    *,
    gpu: bool = False,
    listed: bool = False,
    count: int = 1,
    **options: Any,
) -> Architecture:
    """One of torchvision; `listed`: it takes a list of images, `count`: so many arguments."""

    def make() -> Called:
        models: Any = importlib.import_module("torchvision.models")
        for part in place.split(".")[:-1]:
            models = getattr(models, part)
        model = getattr(models, place.rpartition(".")[2])(weights=None, **options).eval()
        if listed:
            return model, ([torch.rand(shape)],), {}
        return model, tuple(torch.randn(shape) for _ in range(count)), {}

    return Architecture(f"torchvision/{place.rpartition('.')[2]}", family, make, gpu)


def _hf(
    name: str,
    model: str,
    family: str,
    inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]],
    config: Mapping[str, Any] = MappingProxyType({}),
    *,
    of: str = "",
    gpu: bool = False,
) -> Architecture:
    """One of transformers, `model` from the configuration `of` its library (default: by the model's name)."""
    configuration = of or model.partition("Model")[0].partition("For")[0].partition("LMHead")[0] + "Config"

    def make() -> Called:
        library: Any = importlib.import_module("transformers")
        given = {k: v() if callable(v) else v for k, v in config.items()}
        made = getattr(library, model)(getattr(library, configuration)(**given)).eval()
        return made, *inputs()

    return Architecture(f"transformers/{name}", family, make, gpu)


def _diffusion(
    name: str, inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]], *, gpu: bool = False, **config: Any
) -> Architecture:
    def make() -> Called:
        made = getattr(importlib.import_module("diffusers"), name)(**config).eval()
        return made, *inputs()

    return Architecture(f"diffusers/{name}", "diffusion", make, gpu)


def _plain(name: str, family: str, make: Callable[[], Called], *, gpu: bool = False) -> Architecture:
    return Architecture(f"torch/{name}", family, make, gpu)


# --- configurations of text models

_BERT: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": _WORDS,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "max_position_embeddings": 512,
    }
)
_LLAMA: Mapping[str, Any] = MappingProxyType({**_BERT, "num_key_value_heads": 2, "pad_token_id": 0})
_BART: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": _WORDS,
        "d_model": 256,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 1024,
        "decoder_ffn_dim": 1024,
        "max_position_embeddings": 512,
    }
)
_T5: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": _WORDS,
        "d_model": 256,
        "d_kv": 64,
        "d_ff": 1024,
        "num_layers": 3,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    }
)
_WAV: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "conv_dim": (128,) * 7,
        "num_conv_pos_embeddings": 32,
        "num_conv_pos_embedding_groups": 4,
    }
)
_VIT: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "intermediate_size": 768,
        "image_size": 224,
    }
)
_MOE: Mapping[str, Any] = MappingProxyType({**_LLAMA, "num_hidden_layers": 2})


def _resnet_backbone() -> Any:
    return importlib.import_module("transformers").ResNetConfig(
        embedding_size=32,
        hidden_sizes=[32, 64, 128, 256],
        depths=[1, 1, 1, 1],
        out_features=["stage2", "stage3", "stage4"],
    )


def _last_stage() -> Any:
    return importlib.import_module("transformers").ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 1, 1], out_features=["stage4"]
    )


def _swin_backbone() -> Any:
    return importlib.import_module("transformers").SwinConfig(
        image_size=128,
        embed_dim=48,
        depths=[1, 1, 2, 1],
        num_heads=[3, 3, 6, 12],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )


_DETR: Mapping[str, Any] = MappingProxyType(
    {
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
        "d_model": 128,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 256,
        "decoder_ffn_dim": 256,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "num_queries": 30,
    }
)
_CLIP_TEXT = {
    "vocab_size": _WORDS,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 512,
}
_CLIP_VISION = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "image_size": 128,
    "patch_size": 16,
}
_TEXT_AND_IMAGE = _named(input_ids=("ids", 900, 1, 16), attention_mask=("ones", 1, 16), pixel_values=(1, 3, 128, 128))


# --- recurrent networks of torch alone


class _Tagger(torch.nn.Module):
    """Words, a recurrent layer in both directions, a label for each word."""

    def __init__(self, kind: type[torch.nn.Module]) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(_WORDS, 128)
        self.layers = kind(128, 128, num_layers=2, bidirectional=True, batch_first=True)
        self.labels = torch.nn.Linear(256, 17)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.labels(self.layers(self.words(words))[0])


class _Speech(torch.nn.Module):
    """Convolutions over a spectrum, recurrent layers, log probabilities of letters."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = torch.nn.Sequential(
            torch.nn.Conv2d(1, 32, (11, 5), stride=(2, 2), padding=(5, 2)),
            torch.nn.BatchNorm2d(32),
            torch.nn.Hardtanh(0, 20),
            torch.nn.Conv2d(32, 32, (11, 5), stride=(2, 1), padding=(5, 2)),
            torch.nn.BatchNorm2d(32),
            torch.nn.Hardtanh(0, 20),
        )
        self.recurrent = torch.nn.GRU(32 * 20, 256, num_layers=2, bidirectional=True)
        self.letters = torch.nn.Linear(512, 29)

    def forward(self, spectrum: torch.Tensor) -> torch.Tensor:
        x = self.convolutions(spectrum)
        x = x.flatten(1, 2).permute(2, 0, 1)
        return self.letters(self.recurrent(x)[0]).log_softmax(-1)


class _Translator(torch.nn.Module):
    """An encoder and a decoder of recurrent layers, with attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = torch.nn.Embedding(_WORDS, 128), torch.nn.Embedding(_WORDS, 128)
        self.encoder = torch.nn.LSTM(128, 192, batch_first=True)
        self.decoder = torch.nn.LSTM(128, 192, batch_first=True)
        self.joined = torch.nn.Linear(384, 192)
        self.words = torch.nn.Linear(192, _WORDS)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        read, state = self.encoder(self.source(source))
        written, _ = self.decoder(self.target(target), state)
        weights = (written @ read.transpose(1, 2)).softmax(-1)
        return self.words(torch.tanh(self.joined(torch.cat([written, weights @ read], -1))))


class _Frames(torch.nn.Module):
    """A convolutional LSTM over frames, by a loop of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = torch.nn.Conv2d(3 + 16, 64, 3, padding=1)
        self.shown = torch.nn.Conv2d(16, 3, 1)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        h = c = frames.new_zeros(frames.size(0), 16, *frames.shape[-2:])
        for t in range(frames.size(1)):
            i, f, o, g = self.gates(torch.cat([frames[:, t], h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.shown(h)


class _Waves(torch.nn.Module):
    """Dilated causal convolutions with gates, as WaveNet has them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv1d(1, 32, 1)
        self.gates = torch.nn.ModuleList(torch.nn.Conv1d(32, 64, 2, dilation=2**k) for k in range(8))
        self.skips = torch.nn.ModuleList(torch.nn.Conv1d(32, 64, 1) for _ in range(8))
        self.last = torch.nn.Conv1d(32, 256, 1)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        x, total = self.first(wave), torch.zeros(())
        for k, (gate, skip) in enumerate(zip(self.gates, self.skips, strict=True)):
            a, b = gate(torch.nn.functional.pad(x, (2**k, 0))).chunk(2, 1)
            kept, more = skip(a.tanh() * b.sigmoid()).chunk(2, 1)
            x, total = x + more, total + kept
        return self.last(total.relu())


def _words(*lengths: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randint(0, _WORDS, (1, n)) for n in lengths)


def _transformer() -> Called:
    layer = torch.nn.TransformerEncoderLayer(192, 4, 512, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 4).eval(), (torch.randn(1, 64, 192),), {}


def _whole_transformer() -> Called:
    model = torch.nn.Transformer(192, 4, 2, 2, 512, batch_first=True).eval()
    return model, (torch.randn(1, 48, 192), torch.randn(1, 24, 192)), {}


ARCHITECTURES: tuple[Architecture, ...] = (
    # convolutional networks
    _timm("resnet18", "convolutional", gpu=True),
    _timm("resnet50", "convolutional", gpu=True),
    _timm("resnext50_32x4d", "convolutional", gpu=True),
    _timm("seresnet50", "convolutional", gpu=True),
    _timm("res2net50_14w_8s", "convolutional"),
    _timm("resnest14d", "convolutional"),
    _timm("densenet121", "convolutional", gpu=True),
    _timm("regnetx_008", "convolutional"),
    _timm("regnety_008", "convolutional", gpu=True),
    _timm("repvgg_a0", "convolutional"),
    _timm("dla34", "convolutional"),
    _timm("hrnet_w18_small", "convolutional", gpu=True),
    _timm("inception_v4", "convolutional", 299),
    _timm("xception41", "convolutional", 299),
    _timm("eca_nfnet_l0", "convolutional"),
    _timm("convnext_atto", "convolutional", gpu=True),
    _timm("convnextv2_atto", "convolutional", gpu=True),
    _timm("inception_next_atto", "convolutional"),
    _timm("ese_vovnet19b_dw", "convolutional"),
    _timm("hgnetv2_b0", "convolutional"),
    _timm("lambda_resnet26t", "convolutional", 256),
    _timm("botnet26t_256", "convolutional", 256),
    _timm("halonet26t", "convolutional", 256),
    _timm("mambaout_femto", "convolutional"),
    _vision("alexnet", "convolutional", (1, 3, 224, 224)),
    _vision("googlenet", "convolutional", (1, 3, 224, 224), init_weights=False),
    # networks for phones
    _timm("mobilenetv2_100", "mobile", gpu=True),
    _timm("mobilenetv3_small_100", "mobile", gpu=True),
    _timm("mobilenetv4_conv_small", "mobile"),
    _timm("efficientnet_b0", "mobile", gpu=True),
    _timm("tf_efficientnetv2_b0", "mobile"),
    _timm("ghostnet_100", "mobile", gpu=True),
    _timm("mixnet_s", "mobile"),
    _timm("mobileone_s0", "mobile"),
    _timm("fastvit_t8", "mobile", 256),
    _timm("starnet_s1", "mobile"),
    _timm("repvit_m0_9", "mobile"),
    _timm("edgenext_xx_small", "mobile", 256, gpu=True),
    _timm("mobilevit_xxs", "mobile", 256, gpu=True),
    _timm("mobilevitv2_050", "mobile", 256),
    _timm("efficientformer_l1", "mobile"),
    _vision("squeezenet1_1", "mobile", (1, 3, 224, 224)),
    _vision("shufflenet_v2_x1_0", "mobile", (1, 3, 224, 224), gpu=True),
    # transformers for images
    _timm("vit_tiny_patch16_224", "vision transformer", gpu=True),
    _timm("deit_tiny_distilled_patch16_224", "vision transformer"),
    _timm("cait_xxs24_224", "vision transformer"),
    _timm("beitv2_base_patch16_224", "vision transformer", depth=4),
    _timm("eva02_tiny_patch14_224", "vision transformer", gpu=True),
    _timm("swin_tiny_patch4_window7_224", "vision transformer", gpu=True),
    _timm("swinv2_tiny_window8_256", "vision transformer", 256, gpu=True),
    _timm("pvt_v2_b0", "vision transformer"),
    _timm("poolformer_s12", "vision transformer", gpu=True),
    _timm("caformer_s18", "vision transformer"),
    _timm("mixer_s16_224", "vision transformer", gpu=True),
    _timm("resmlp_12_224", "vision transformer"),
    _timm("gmlp_ti16_224", "vision transformer"),
    _timm("crossvit_tiny_240", "vision transformer", 240),
    _timm("coat_lite_tiny", "vision transformer"),
    _timm("maxvit_pico_rw_256", "vision transformer", 256, gpu=True),
    _timm("levit_128s", "vision transformer"),
    _timm("twins_svt_small", "vision transformer"),
    _timm("xcit_nano_12_p16_224", "vision transformer"),
    _timm("volo_d1_224", "vision transformer"),
    _timm("convit_tiny", "vision transformer"),
    _timm("davit_tiny", "vision transformer"),
    _timm("focalnet_tiny_srf", "vision transformer"),
    _timm("nest_tiny", "vision transformer"),
    _timm("efficientvit_m0", "vision transformer"),
    _timm("tiny_vit_5m_224", "vision transformer"),
    _timm("hiera_tiny_224", "vision transformer", gpu=True),
    _timm("gcvit_xxtiny", "vision transformer"),
    _timm("sequencer2d_s", "recurrent"),
    _hf(
        "dinov2",
        "Dinov2Model",
        "vision transformer",
        _image(224, name="pixel_values"),
        {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "image_size": 224, "patch_size": 16},
    ),
    _hf(
        "clip",
        "CLIPModel",
        "vision transformer",
        _TEXT_AND_IMAGE,
        {"text_config": _CLIP_TEXT, "vision_config": _CLIP_VISION},
        gpu=True,
    ),
    _hf(
        "siglip",
        "SiglipModel",
        "vision transformer",
        _TEXT_AND_IMAGE,
        {"text_config": {**_CLIP_TEXT, "max_position_embeddings": 64}, "vision_config": _CLIP_VISION},
    ),
    _hf(
        "videomae",
        "VideoMAEModel",
        "vision transformer",
        _named(pixel_values=(1, 8, 3, 112, 112)),
        {
            "image_size": 112,
            "num_frames": 8,
            "hidden_size": 192,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "intermediate_size": 768,
        },
    ),
    _vision("video.r3d_18", "convolutional", (1, 3, 8, 56, 56)),
    # language, encoders
    _hf("bert", "BertModel", "encoder", _TOKENS, _BERT, gpu=True),
    _hf("roberta", "RobertaForMaskedLM", "encoder", _TOKENS, _BERT),
    _hf("albert", "AlbertModel", "encoder", _TOKENS, {**_BERT, "embedding_size": 128}),
    _hf(
        "distilbert",
        "DistilBertModel",
        "encoder",
        _TOKENS,
        {"vocab_size": _WORDS, "dim": 256, "n_layers": 3, "n_heads": 4, "hidden_dim": 1024},
        gpu=True,
    ),
    _hf("electra", "ElectraForPreTraining", "encoder", _TOKENS, {**_BERT, "embedding_size": 128}),
    _hf(
        "deberta-v2",
        "DebertaV2Model",
        "encoder",
        _TOKENS,
        {
            **_BERT,
            "relative_attention": True,
            "position_buckets": 64,
            "pos_att_type": ["p2c", "c2p"],
            "norm_rel_ebd": "layer_norm",
        },
        gpu=True,
    ),
    _hf("mpnet", "MPNetModel", "encoder", _TOKENS, _BERT),
    _hf("convbert", "ConvBertModel", "encoder", _TOKENS, {**_BERT, "embedding_size": 128}),
    _hf("longformer", "LongformerModel", "encoder", _TOKENS, {**_BERT, "num_hidden_layers": 2, "attention_window": 32}),
    _hf("big_bird", "BigBirdModel", "encoder", _TOKENS, {**_BERT, "attention_type": "original_full"}),
    _hf("fnet", "FNetModel", "encoder", _IDS, _BERT, gpu=True),
    _hf(
        "nystromformer",
        "NystromformerModel",
        "encoder",
        _TOKENS,
        {**_BERT, "num_landmarks": 16, "segment_means_seq_len": 64},
    ),
    _hf(
        "modernbert",
        "ModernBertModel",
        "encoder",
        _TOKENS,
        {**_BERT, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2},
        gpu=True,
    ),
    _hf("roformer", "RoFormerModel", "encoder", _TOKENS, _BERT, of="RoFormerConfig"),
    _hf("mobilebert", "MobileBertModel", "encoder", _TOKENS, {"vocab_size": _WORDS, "num_hidden_layers": 4}),
    _hf(
        "xlnet",
        "XLNetModel",
        "encoder",
        _TOKENS,
        {"vocab_size": _WORDS, "d_model": 256, "n_layer": 3, "n_head": 4, "d_inner": 1024},
    ),
    # language, decoders
    _hf(
        "gpt2",
        "GPT2LMHeadModel",
        "decoder",
        _TOKENS,
        {"vocab_size": _WORDS, "n_embd": 256, "n_layer": 4, "n_head": 4},
        gpu=True,
    ),
    _hf(
        "gpt_neo",
        "GPTNeoForCausalLM",
        "decoder",
        _TOKENS,
        {
            "vocab_size": _WORDS,
            "hidden_size": 256,
            "num_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 32,
        },
    ),
    _hf("gpt_neox", "GPTNeoXForCausalLM", "decoder", _TOKENS, _BERT),
    _hf("opt", "OPTForCausalLM", "decoder", _TOKENS, {**_BERT, "ffn_dim": 1024, "word_embed_proj_dim": 256}, gpu=True),
    _hf(
        "bloom",
        "BloomForCausalLM",
        "decoder",
        _TOKENS,
        {"vocab_size": _WORDS, "hidden_size": 256, "n_layer": 4, "n_head": 4},
    ),
    _hf("llama", "LlamaForCausalLM", "decoder", _TOKENS, _LLAMA, gpu=True),
    _hf("mistral", "MistralForCausalLM", "decoder", _TOKENS, {**_LLAMA, "sliding_window": 32}),
    _hf("qwen3", "Qwen3ForCausalLM", "decoder", _TOKENS, {**_LLAMA, "head_dim": 64}, gpu=True),
    _hf("gemma2", "Gemma2ForCausalLM", "decoder", _TOKENS, {**_LLAMA, "head_dim": 64}, gpu=True),
    _hf("phi3", "Phi3ForCausalLM", "decoder", _TOKENS, _LLAMA),
    _hf(
        "falcon",
        "FalconForCausalLM",
        "decoder",
        _TOKENS,
        {"vocab_size": _WORDS, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4},
    ),
    _hf("stablelm", "StableLmForCausalLM", "decoder", _TOKENS, _LLAMA),
    _hf("olmo2", "Olmo2ForCausalLM", "decoder", _TOKENS, _LLAMA),
    # mixtures of experts
    _hf("mixtral", "MixtralForCausalLM", "mixture of experts", _TOKENS, {**_MOE, "num_local_experts": 4}, gpu=True),
    _hf(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "mixture of experts",
        _TOKENS,
        {**_MOE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 64},
        gpu=True,
    ),
    _hf(
        "olmoe", "OlmoeForCausalLM", "mixture of experts", _TOKENS, {**_MOE, "num_experts": 8, "num_experts_per_tok": 2}
    ),
    _hf(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        "mixture of experts",
        _TOKENS,
        {
            **_MOE,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "first_k_dense_replace": 1,
            "q_lora_rank": 64,
            "kv_lora_rank": 64,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
        },
        gpu=True,
    ),
    _hf(
        "gpt_oss",
        "GptOssForCausalLM",
        "mixture of experts",
        _TOKENS,
        {
            **_MOE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 64,
            "sliding_window": 32,
            "intermediate_size": 256,
        },
    ),
    _hf(
        "switch_transformers",
        "SwitchTransformersModel",
        "mixture of experts",
        _PAIR,
        {
            "vocab_size": _WORDS,
            "d_model": 128,
            "d_kv": 32,
            "d_ff": 256,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "num_experts": 4,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
        },
    ),
    # state-space models
    _hf(
        "mamba",
        "MambaForCausalLM",
        "state space",
        _IDS,
        {"vocab_size": _WORDS, "hidden_size": 128, "num_hidden_layers": 2, "state_size": 8},
        gpu=True,
    ),
    _hf(
        "mamba2",
        "Mamba2ForCausalLM",
        "state space",
        _IDS,
        {
            "vocab_size": _WORDS,
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 32,
            "n_groups": 1,
            "chunk_size": 32,
        },
        gpu=True,
    ),
    _hf(
        "recurrent_gemma",
        "RecurrentGemmaForCausalLM",
        "state space",
        _TOKENS,
        {
            "vocab_size": _WORDS,
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "lru_width": 128,
            "intermediate_size": 256,
            "attention_window_size": 32,
        },
    ),
    _hf(
        "rwkv",
        "RwkvForCausalLM",
        "state space",
        _IDS,
        {"vocab_size": _WORDS, "hidden_size": 128, "num_hidden_layers": 2, "attention_hidden_size": 128},
    ),
    # sequence to sequence
    _hf("t5", "T5Model", "sequence to sequence", _PAIR, _T5, gpu=True),
    _hf("bart", "BartModel", "sequence to sequence", _PAIR, _BART, gpu=True),
    _hf(
        "marian",
        "MarianModel",
        "sequence to sequence",
        _PAIR,
        {**_BART, "pad_token_id": 0, "decoder_start_token_id": 0},
        gpu=True,
    ),
    _hf("m2m_100", "M2M100Model", "sequence to sequence", _PAIR, _BART),
    _hf(
        "prophetnet",
        "ProphetNetModel",
        "sequence to sequence",
        _PAIR,
        {
            "vocab_size": _WORDS,
            "hidden_size": 128,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 256,
            "decoder_ffn_dim": 256,
        },
    ),
    # sound
    _hf("wav2vec2", "Wav2Vec2ForCTC", "sound", _SOUND, {**_WAV, "vocab_size": 32}, gpu=True),
    _hf("hubert", "HubertModel", "sound", _SOUND, _WAV, gpu=True),
    _hf("wavlm", "WavLMModel", "sound", _SOUND, _WAV),
    _hf(
        "whisper",
        "WhisperModel",
        "sound",
        _named(input_features=(1, 40, 200), decoder_input_ids=("ids", 900, 1, 16)),
        {
            **_BART,
            "num_mel_bins": 40,
            "max_source_positions": 100,
            "max_target_positions": 64,
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        gpu=True,
    ),
    _hf(
        "audio_spectrogram_transformer",
        "ASTModel",
        "sound",
        _named(input_values=(1, 256, 128)),
        {
            "hidden_size": 192,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "intermediate_size": 768,
            "max_length": 256,
        },
    ),
    _hf(
        "encodec",
        "EncodecModel",
        "sound",
        _named(input_values=(1, 1, 4800)),
        {
            "num_filters": 8,
            "hidden_size": 32,
            "codebook_size": 64,
            "codebook_dim": 32,
            "num_lstm_layers": 1,
            "target_bandwidths": [1.5],
        },
    ),
    # detection
    _vision(
        "detection.fasterrcnn_mobilenet_v3_large_320_fpn",
        "detection",
        (3, 320, 320),
        listed=True,
        weights_backbone=None,
    ),
    _vision(
        "detection.retinanet_resnet50_fpn",
        "detection",
        (3, 160, 160),
        listed=True,
        weights_backbone=None,
        min_size=160,
        max_size=160,
    ),
    _vision("detection.ssdlite320_mobilenet_v3_large", "detection", (3, 320, 320), listed=True, weights_backbone=None),
    _hf(
        "detr",
        "DetrForObjectDetection",
        "detection",
        _image(256, name="pixel_values"),
        {**_DETR, "backbone_config": _last_stage},
        gpu=True,
    ),
    _hf(
        "deformable_detr",
        "DeformableDetrForObjectDetection",
        "detection",
        _image(256, name="pixel_values"),
        {**_DETR, "backbone_config": _resnet_backbone},
        gpu=True,
    ),
    _hf(
        "yolos",
        "YolosForObjectDetection",
        "detection",
        _image(224, name="pixel_values"),
        {**_VIT, "image_size": [224, 224], "num_detection_tokens": 20},
        gpu=True,
    ),
    # segmentation, depth, and images from images
    _vision(
        "segmentation.lraspp_mobilenet_v3_large", "segmentation", (1, 3, 256, 256), weights_backbone=None, gpu=True
    ),
    _vision(
        "segmentation.deeplabv3_mobilenet_v3_large", "segmentation", (1, 3, 256, 256), weights_backbone=None, gpu=True
    ),
    _vision("optical_flow.raft_small", "segmentation", (1, 3, 128, 128), count=2),
    _hf("segformer", "SegformerForSemanticSegmentation", "segmentation", _image(256, name="pixel_values"), gpu=True),
    _hf(
        "mask2former",
        "Mask2FormerForUniversalSegmentation",
        "segmentation",
        _image(128, name="pixel_values"),
        {
            "backbone_config": _swin_backbone,
            "use_pretrained_backbone": False,
            "backbone": None,
            "feature_size": 64,
            "mask_feature_size": 64,
            "hidden_dim": 64,
            "encoder_feedforward_dim": 128,
            "dim_feedforward": 128,
            "encoder_layers": 2,
            "decoder_layers": 3,
            "num_queries": 10,
            "num_attention_heads": 4,
        },
        of="Mask2FormerConfig",
    ),
    _hf(
        "dpt",
        "DPTForDepthEstimation",
        "segmentation",
        _image(224, name="pixel_values"),
        {
            **_VIT,
            "patch_size": 16,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [24, 48, 96, 192],
            "fusion_hidden_size": 64,
        },
    ),
    _hf(
        "swin2sr",
        "Swin2SRForImageSuperResolution",
        "segmentation",
        _image(48, name="pixel_values"),
        {"image_size": 48, "embed_dim": 60, "depths": [2, 2], "num_heads": [6, 6], "window_size": 8},
    ),
    # diffusion
    _diffusion(
        "UNet2DModel",
        _named(sample=(1, 3, 32, 32), timestep=10),
        gpu=True,
        sample_size=32,
        block_out_channels=(32, 64, 64),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    ),
    _diffusion(
        "UNet2DConditionModel",
        _named(sample=(1, 4, 32, 32), timestep=10, encoder_hidden_states=(1, 16, 64)),
        gpu=True,
        sample_size=32,
        block_out_channels=(32, 64),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=64,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    _diffusion(
        "AutoencoderKL",
        _named(sample=(1, 3, 64, 64)),
        gpu=True,
        block_out_channels=(32, 64),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    # recurrent and plain networks of torch alone
    _plain("lstm-tagger", "recurrent", lambda: (_Tagger(torch.nn.LSTM).eval(), _words(48), {}), gpu=True),
    _plain("speech-gru", "recurrent", lambda: (_Speech().eval(), (torch.randn(1, 1, 80, 100),), {})),
    _plain("lstm-translator", "recurrent", lambda: (_Translator().eval(), _words(32, 24), {}), gpu=True),
    _plain("conv-lstm", "recurrent", lambda: (_Frames().eval(), (torch.randn(1, 6, 3, 48, 48),), {}), gpu=True),
    _plain("wavenet", "sound", lambda: (_Waves().eval(), (torch.randn(1, 1, 2048),), {}), gpu=True),
    _plain("transformer-encoder", "encoder", _transformer, gpu=True),
    _plain("transformer", "sequence to sequence", _whole_transformer),
)
