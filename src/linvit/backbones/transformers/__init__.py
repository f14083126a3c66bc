"""Hugging Face's vision transformers with any attention of linvit."""
