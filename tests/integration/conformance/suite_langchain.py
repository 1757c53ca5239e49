"""langchain's standard tests of chat models, on the gateway; run in a separate environment."""

from __future__ import annotations

import os
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestGateway(ChatModelIntegrationTests):
    """The suite, unchanged."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "smollm2",
            "base_url": os.environ["GATEWAY_URL"],
            "api_key": "none",
            "temperature": 0.0,
            "frequency_penalty": 1.0,  # otherwise the model repeats itself until the end
            "max_tokens": 200,
            "stream_usage": True,
            "max_retries": 0,
        }

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_image_inputs(self) -> bool:
        return False
