"""Readers of Hugging Face configurations, one file per family of architectures."""
