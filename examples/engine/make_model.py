"""Write a tiny Qwen-Image with random weights, in the layout that vLLM-Omni loads: 19 MB, some seconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

WIDTH = 256  # of the text encoder


def make(folder: Path) -> None:
    """Write the model to *folder*; two calls write the same weights."""
    from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel

    torch.manual_seed(0)
    _tokenizer().save_pretrained(folder / "tokenizer")
    _text_encoder().save_pretrained(folder / "text_encoder")
    QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(8, 12, 12),
    ).save_pretrained(folder / "transformer")
    AutoencoderKLQwenImage(base_dim=16, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1).save_pretrained(
        folder / "vae"
    )
    FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    ).save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "QwenImagePipeline",
        "_diffusers_version": "0.40.0",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "QwenImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLQwenImage"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=1))


def _tokenizer() -> Any:
    """One token for each byte, and Qwen's special tokens."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], additional_special_tokens=["<|im_start|>", "<|im_end|>"])


def _text_encoder() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "vocab_size": 512,
        "hidden_size": WIDTH,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [4, 6, 6]},
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 32,
        "out_hidden_size": WIDTH,
        "fullatt_block_indexes": [0],
    }
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision)).eval()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
