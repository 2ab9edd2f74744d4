"""A rollout adapter as RL trainers write them: token IDs arrive as lists and are tensors before encode_prompt()."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from vllm_omni.diffusion.models.qwen_image import QwenImagePipeline

Tokens = tuple[torch.Tensor, torch.Tensor]  # token IDs and attention mask of one prompt, int64 [length]


class EarlyTensorPipeline(QwenImagePipeline):
    """vLLM-Omni's Qwen-Image, whose prompts are token IDs."""

    def _tokens(self, prompt: Any) -> Tokens:
        given = {"prompt": prompt} if isinstance(prompt, str) else prompt
        ids = given.get("prompt_token_ids")
        if ids is None:  # the engine's own warm-up sends a text
            ids = self.tokenizer(self.prompt_template_encode.format(given["prompt"])).input_ids
        tensor = torch.tensor(ids, device=self.device)
        return tensor, torch.ones_like(tensor)

    def _extract_prompts(self, prompts: list[Any]) -> tuple[list[Tokens], None]:
        return [self._tokens(prompt) for prompt in prompts], None

    def encode_prompt(
        self,
        prompt: list[Tokens],
        num_images_per_prompt: int = 1,
        prompt_embeds: torch.Tensor | None = None,
        prompt_embeds_mask: torch.Tensor | None = None,
        max_sequence_length: int = 1024,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if prompt_embeds is None:
            ids, mask = (pad_sequence(rows, batch_first=True) for rows in zip(*prompt, strict=True))
            encoded = self.text_encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True)
            start = self.prompt_template_encode_start_idx
            prompt_embeds_mask = mask[:, start:]
            prompt_embeds = encoded.hidden_states[-1][:, start:] * prompt_embeds_mask.unsqueeze(-1)
        return super().encode_prompt("", num_images_per_prompt, prompt_embeds, prompt_embeds_mask, max_sequence_length)
