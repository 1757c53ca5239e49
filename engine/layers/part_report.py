"""Reports which parts of a model are compiled, fused, or unmodified."""

from __future__ import annotations

from collections import Counter

from torch import nn

from pagemill.engine.layers.converted_products import ConvertedProduct
from pagemill.engine.layers.cuda_fusion import PreNormLayer
from pagemill.engine.layers.decoder_layer import FusedDecoderLayer
from pagemill.engine.layers.fusion import MergedAttention, RMSNorm, SiluGatedMLP
from pagemill.engine.layers.linear import Linear, OneDNNProduct, PackedProduct

_WAYS = _COMPILED, _FUSED, _OWN = ("compiled", "fused", "transformers' own")


def describe_parts(module: nn.Module, *, is_direct: bool) -> str:
    """Return a log line about a model rewritten for its device.

    Args:
        is_direct: transformers' forward pass is not used.
    """
    modules = [*module.modules()]

    def way(*kinds: type[nn.Module]) -> str:
        return _FUSED if any(isinstance(part, kinds) for part in modules) else _OWN

    layers = _COMPILED if way(FusedDecoderLayer) == _FUSED else way(PreNormLayer)
    ways = {"forward pass": _COMPILED if is_direct else _OWN, "decoder layers": layers}
    for name, kind in (("attention", MergedAttention), ("MLP", SiluGatedMLP), ("norms", RMSNorm)):
        ways[name] = layers if layers == _COMPILED else way(kind)
    products = [part.product for part in modules if isinstance(part, Linear)]
    ways["linear layers"] = _OWN if all(isinstance(product, nn.Linear) for product in products) else _FUSED
    parts = {one: ", ".join(name for name in ways if ways[name] == one) or "nothing" for one in _WAYS}
    described = "; ".join(f"{one}: {names}" for one, names in parts.items())
    if any(isinstance(product, OneDNNProduct) for product in products):
        described += "; matmuls: oneDNN"
    elif any(isinstance(product, PackedProduct | ConvertedProduct) for product in products):
        described += "; matmuls: own"
    kept = Counter(part.kept_as for part in modules if isinstance(part, Linear) and part.kept_as)
    if not kept:
        return described
    forms = ", ".join(f"{count} linear layers as {form}" for form, count in kept.most_common())
    return f"{described}; quantized weights: {forms}"
