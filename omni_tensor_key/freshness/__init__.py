"""What keeps cached prompt embeddings fresh: guards of pipelines, private copies of outputs, torch's state."""
