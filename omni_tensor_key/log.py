"""The package's logger."""

import logging

# Below "vllm_omni", so that the lines come out of vLLM's handlers, in its format and with its process prefix: a logger
# of our own name would have no handler in an engine process.
logger = logging.getLogger("vllm_omni.omni_tensor_key")
