"""LoRA adapters: contents of their folders, their layers in a model, and those in memory."""
