"""Popular architectures to trace together, with the sizes of published models but few layers.

Few layers are enough, because layers repeat shapes. Each model is built from its configuration
alone. If the defaults are not those of a published model, the settings of one are given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from opforge.traces.recordings import TracedRun
from opforge.traces.targets import Settings, Target


@dataclass(frozen=True, slots=True)
class ModeSettings:
    """Settings for inference or training of a family's architectures."""

    dtype: str
    batch: int
    seq: int = 128


@dataclass(frozen=True, slots=True)
class Family:
    """Architectures that run with the same settings."""

    inference: ModeSettings
    training: ModeSettings | None
    layers: int | None = 2


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture, and changes to its configuration."""

    target: Target
    family: str
    changes: Mapping[str, int] = field(default_factory=dict)
    image: int | None = None
    dtype: str | None = None
    """Overrides the family's dtype."""

    def runs(self, device: str, *, fake: bool = False) -> Iterator[tuple[str, Settings]]:
        """Yield the name and settings of each of its runs."""
        family = FAMILIES[self.family]
        for name, run in (("inference", family.inference), ("training", family.training)):
            if run is not None:
                dtype, train = self.dtype or run.dtype, name == "training"
                sizes = run.batch, run.seq, self.image, family.layers
                yield name, Settings(device, fake, dtype, train, *sizes, self.changes)


FAMILIES = {
    "encoder": Family(ModeSettings("f16", 16, 256), ModeSettings("f32", 8, 128)),
    "decoder": Family(ModeSettings("bf16", 1, 1024), ModeSettings("bf16", 2, 512)),
    "mixture": Family(ModeSettings("bf16", 1, 512), ModeSettings("bf16", 1, 256)),
    "encoder-decoder": Family(ModeSettings("bf16", 4, 256), ModeSettings("f32", 4, 128)),
    "state-space": Family(ModeSettings("bf16", 1, 32), ModeSettings("f32", 1, 16)),
    "vision": Family(ModeSettings("f16", 16), ModeSettings("f32", 8), layers=None),
    "convolution": Family(ModeSettings("f16", 16), ModeSettings("f32", 8), layers=None),
    "detection": Family(ModeSettings("f32", 1), None, layers=None),
    "audio": Family(ModeSettings("f16", 2), ModeSettings("f32", 2)),
    "multimodal": Family(ModeSettings("f16", 8, 64), ModeSettings("f32", 4, 64)),
}

_LLAMA_CONFIG = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}

_HF_ARCHITECTURES: dict[str, dict[str, dict[str, int]]] = {
    "encoder": {
        "BertForMaskedLM": {},
        "RobertaForMaskedLM": {},
        "DistilBertForSequenceClassification": {},
        "AlbertForMaskedLM": {},
        "ElectraForSequenceClassification": {},
        "DebertaV2ForMaskedLM": {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
        "MPNetForMaskedLM": {},
        "ModernBertForMaskedLM": {},
        "XLMRobertaForTokenClassification": {},
        "CamembertForMaskedLM": {},
        "FNetForMaskedLM": {},
        "ConvBertForMaskedLM": {},
        "SqueezeBertForMaskedLM": {},
        "MobileBertForMaskedLM": {},
        "XLNetLMHeadModel": {},
        "EsmForMaskedLM": {
            "vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "hidden_size": 1280, "num_attention_heads": 20,
            "intermediate_size": 5120,
        },
        "LayoutLMForMaskedLM": {},
    },
    "decoder": {
        "GPT2LMHeadModel": {},
        "LlamaForCausalLM": {**_LLAMA_CONFIG, "vocab_size": 128256},
        "MistralForCausalLM": {},
        "Qwen2ForCausalLM": {
            "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
        },
        "Qwen3ForCausalLM": {
            "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
        },
        "GemmaForCausalLM": {},
        "Gemma2ForCausalLM": {},
        "Gemma3ForCausalLM": {},
        "PhiForCausalLM": {},
        "Phi3ForCausalLM": {},
        "OPTForCausalLM": {},
        "GPTNeoXForCausalLM": {},
        "GPTJForCausalLM": {},
        "BloomForCausalLM": {"hidden_size": 1024, "n_head": 16},
        "FalconForCausalLM": {},
        "StableLmForCausalLM": {},
        "Starcoder2ForCausalLM": {},
        "OlmoForCausalLM": {},
        "Olmo2ForCausalLM": {},
        "CohereForCausalLM": {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32},
        "GraniteForCausalLM": {},
        "SmolLM3ForCausalLM": {},
        "MptForCausalLM": {},
        "GPTBigCodeForCausalLM": {},
    },
    "mixture": {
        "MixtralForCausalLM": {},
        "Qwen2MoeForCausalLM": {},
        "Qwen3MoeForCausalLM": {},
        "OlmoeForCausalLM": {},
        "GptOssForCausalLM": {},
        "DeepseekV3ForCausalLM": {"n_routed_experts": 32, "n_group": 4, "topk_group": 2},
        "GraniteMoeForCausalLM": {"num_local_experts": 32, "num_experts_per_tok": 8},
    },
    "encoder-decoder": {
        "T5ForConditionalGeneration": {},
        "MT5ForConditionalGeneration": {},
        "BartForConditionalGeneration": {},
        "PegasusForConditionalGeneration": {},
        "MarianMTModel": {},
        "M2M100ForConditionalGeneration": {},
        "BlenderbotForConditionalGeneration": {},
    },
    "state-space": {
        "MambaForCausalLM": {}, "Mamba2ForCausalLM": {}, "FalconMambaForCausalLM": {}, "RwkvForCausalLM": {},
    },
    "vision": {
        "ViTForImageClassification": {},
        "DeiTForImageClassification": {},
        "BeitForImageClassification": {},
        "SwinForImageClassification": {},
        "Dinov2ForImageClassification": {},
        "SegformerForImageClassification": {},
        "ViTMAEForPreTraining": {},
        "PvtForImageClassification": {},
        "ConvNextForImageClassification": {},
        "MobileViTForImageClassification": {},
        "DPTForDepthEstimation": {},
    },
    "audio": {
        "WhisperForConditionalGeneration": {},
        "Wav2Vec2ForCTC": {},
        "HubertForCTC": {},
        "WavLMForCTC": {},
        "ASTForAudioClassification": {},
        "EncodecModel": {},
    },
    "multimodal": {
        "CLIPModel": {},
        "SiglipModel": {},
        "BlipForImageTextRetrieval": {},
        "ViltModel": {"max_position_embeddings": 64},
        "ChineseCLIPModel": {},
    },
}  # fmt: skip
_TIMM_ARCHITECTURES: dict[str, list[str]] = {
    "convolution": [
        "resnet50", "resnext50_32x4d", "efficientnet_b0", "mobilenetv3_large_100", "convnext_tiny", "densenet121",
        "regnety_032", "repvgg_a2", "mixer_b16_224", "swin_tiny_patch4_window7_224", "vit_base_patch16_224",
        "maxvit_tiny_tf_224", "coatnet_0_rw_224", "nfnet_l0", "ghostnet_100",
    ],
}  # fmt: skip
_TORCHVISION_ARCHITECTURES: dict[str, list[str]] = {
    "convolution": [
        "resnet18",
        "vgg16",
        "googlenet",
        "inception_v3",
        "squeezenet1_1",
        "shufflenet_v2_x1_0",
        "deeplabv3_resnet50",
    ],
    "detection": ["ssdlite320_mobilenet_v3_large", "fasterrcnn_resnet50_fpn", "retinanet_resnet50_fpn"],
}
_IMAGES = {"inception_v3": 299}
_DTYPES = {"FNetForMaskedLM": "f32", "XLNetLMHeadModel": "f32"}


def architectures() -> list[Architecture]:
    """Return all architectures of the suite."""
    all_architectures = [
        Architecture(Target("hf", name), family, changes, dtype=_DTYPES.get(name))
        for family, names in _HF_ARCHITECTURES.items()
        for name, changes in names.items()
    ]
    for library, lists in (("timm", _TIMM_ARCHITECTURES), ("torchvision", _TORCHVISION_ARCHITECTURES)):
        all_architectures += [
            Architecture(Target(library, name), family, image=_IMAGES.get(name))
            for family, names in lists.items()
            for name in names
        ]
    return all_architectures


def runs(device: str, *, fake: bool = False) -> list[TracedRun]:
    """Return every run of every architecture."""
    return [
        TracedRun(architecture.target, way, settings)
        for architecture in architectures()
        for way, settings in architecture.runs(device, fake=fake)
    ]
