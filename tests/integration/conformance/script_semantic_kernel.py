"""Two of semantic-kernel's named agents, alone and in a group chat. Runs in an environment with semantic-kernel.

Its arguments are the gateway's URL and the model; it prints the speakers, with their numbers of characters.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI
from semantic_kernel import agents
from semantic_kernel.agents.runtime import InProcessRuntime
from semantic_kernel.connectors.ai import open_ai
from semantic_kernel.functions import KernelArguments

URL, MODEL = sys.argv[1:]


def named(name: str) -> Any:
    service = open_ai.OpenAIChatCompletion(
        ai_model_id=MODEL, async_client=AsyncOpenAI(base_url=URL, api_key="none")
    )
    settings = open_ai.OpenAIChatPromptExecutionSettings(max_tokens=8, temperature=0.0)
    return agents.ChatCompletionAgent(
        service=service, name=name, description=f"A {name}.", instructions=f"You are the {name}.",
        arguments=KernelArguments(settings=settings),
    )  # fmt: skip


async def main() -> None:
    writer, critic = named("writer"), named("critic")
    spoken: list[tuple[str, int]] = []

    def note(message: Any) -> None:
        spoken.append((message.name, len(str(message))))

    first = await writer.get_response("Name a color.")
    note(first)
    note(await writer.get_response("Name another one.", thread=first.thread))
    runtime = InProcessRuntime()
    runtime.start()
    manager = agents.RoundRobinGroupChatManager(max_rounds=3)
    chat = agents.GroupChatOrchestration([writer, critic], manager=manager, agent_response_callback=note)
    result = await chat.invoke("Agree on a color.", runtime=runtime)
    await result.get(timeout=300)
    await runtime.stop_when_idle()
    sys.stdout.write(json.dumps(spoken))


asyncio.run(main())
