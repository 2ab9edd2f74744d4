"""Everything that is replaced in vLLM-Omni, one file for each of its modules."""
