"""Mixtures of experts: routers, experts as grouped matmuls, and the replacement of transformers' modules."""
