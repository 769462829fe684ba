"""Train, sample and evaluate ViT-5 as the backbone of SiT. Importing has no effect."""

__version__ = "0.1.0"
