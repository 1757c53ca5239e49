"""What a gateway counts: the only module of the producer that imports monitoring, and with it prometheus_client."""

from __future__ import annotations

from pagemill.monitoring.metrics.gateway import GatewayMetrics
from pagemill.monitoring.metrics.metric import CONTENT_TYPE

__all__ = ["CONTENT_TYPE", "GatewayMetrics"]
