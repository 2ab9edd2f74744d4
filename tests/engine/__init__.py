"""Requests that go into vLLM-Omni's own engine and come out of it, on a CPU."""
