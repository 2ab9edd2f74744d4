"""The parts of a pipeline that encode text, small, without weights to download, and with a count of their runs."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Qwen2Tokenizer, Qwen2VLImageProcessor
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.clip.modeling_clip import CLIPTextModelOutput

VOCABULARY = 30522


@cache
def tokenizer() -> Any:
    """A byte-level tokenizer: one token for each byte."""
    from tokenizers import pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Qwen2Tokenizer(vocab=vocabulary, merges=[])
    made.bos_token = made.eos_token  # LTX asks for a token that begins a text, under this name
    return made


@cache
def processor() -> Any:
    """Qwen's image processor, which has no weights."""
    return SimpleNamespace(image_processor=Qwen2VLImageProcessor())


class TextEncoder(torch.nn.Module):  # type: ignore[misc]
    """What an encoder's output depends on, its output depends on: IDs, order, mask, images.

    Each token's state is a sum over the tokens up to it. Two instances compute the same.
    """

    def __init__(self, width: int = 16, clip: bool = False) -> None:
        super().__init__()
        table = torch.randn(VOCABULARY, width, generator=torch.Generator().manual_seed(width))
        self.table = torch.nn.Parameter(table.to(torch.bfloat16))
        self.clip = clip
        self.runs = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **extras: Any
    ) -> BaseModelOutput | CLIPTextModelOutput:
        self.runs += 1
        state = torch.nn.functional.embedding(input_ids, self.table)
        if attention_mask is not None:
            state = state * attention_mask.to(state.dtype).unsqueeze(-1)
        if (pixels := extras.get("pixel_values")) is not None:
            state = state + pixels.to(state.dtype).mean()
        state = state.cumsum(1)
        states = (state / 2, state)
        if self.clip:
            return CLIPTextModelOutput(text_embeds=state[:, -1], last_hidden_state=state, hidden_states=states)
        return BaseModelOutput(last_hidden_state=state, hidden_states=states)

    def load_to_device(self) -> None:
        """MiniMax H3's encoder has one."""

    def encode_ids(self, input_ids: torch.Tensor, **vision: Any) -> torch.Tensor:
        """How MiniMax H3 calls its encoder: one row of IDs."""
        return self(input_ids.unsqueeze(0)).last_hidden_state[0]


def runs(pipeline: torch.nn.Module) -> int:
    """How often the pipeline's text encoders have run."""
    return sum(module.runs for module in pipeline.modules() if isinstance(module, TextEncoder))
