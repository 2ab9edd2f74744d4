"""Digests that every implementation of the content hash must give; see make.py."""
