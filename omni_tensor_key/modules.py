"""The modules of vLLM-Omni that this package has a part in, by name: they are never imported from here."""

CACHE = "vllm_omni.diffusion.cache.prompt_embed_cache"
LORA = "vllm_omni.diffusion.lora.manager"
WORKER = "vllm_omni.diffusion.worker.diffusion_worker"
