"""What an installation looks like from outside: its findings, its documents, its archives."""
