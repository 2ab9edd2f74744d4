"""Tests against the real vLLM-Omni."""
