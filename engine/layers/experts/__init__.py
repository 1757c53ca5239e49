"""Mixtures of experts: routers, experts as grouped products, and what replaces transformers' own modules."""
