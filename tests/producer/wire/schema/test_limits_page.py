"""docs/limits.md has the values of the code."""

from __future__ import annotations

import re

from pagemill.common import sampling_fields as sampling
from pagemill.common import structured_outputs as structures
from pagemill.engine.config import MAX_SERVED_NAMES, EngineConfig
from pagemill.engine.images.child import CALL_S, MEMORY_MIB
from pagemill.engine.images.processor import CACHE_BYTES, MAX_PROMPT_BYTES
from pagemill.engine.structured_output.choice import MAX_CHOICE_TOKENS, MAX_LABEL_TOKENS
from pagemill.engine.structured_output.server import TOKEN_LIMIT_S
from pagemill.engine.text.input_processor import MAX_BAD_WORD_TOKENS
from pagemill.producer.dataset.labels.cascade import MAX_STAGES
from pagemill.producer.dataset.steps.chain import MAX_STEPS
from pagemill.producer.dataset.steps.recipe_file import MAX_BYTES, MAX_EXAMPLES
from pagemill.producer.dataset.tables.rows import MAX_LINE_BYTES
from pagemill.producer.dataset.template import MAX_RENDERED_CHARACTERS
from pagemill.producer.dataset.work import WINDOW, WINDOW_BYTES
from pagemill.producer.gateway.config import GatewayConfig
from pagemill.producer.gateway.guard.limits import MAX_HELD_BYTES
from pagemill.producer.openai.formats import MAX_PROMPTS
from pagemill.producer.wire.calls import memory, submissions
from pagemill.producer.wire.schema import dependencies, images, job, webhook_url
from pagemill.producer.wire.schema.text import chat
from pagemill.producer.wire.store.store import MAX_STORED_BYTES
from pagemill.producer.wire.webhooks.delivery import MAX_REDIRECTS, TIMEOUT_S
from pagemill.worker.config import WorkerConfig
from pagemill.worker.jobs.images import MAX_FETCH_S
from pagemill.worker.jobs.running_job import MAX_LOGPROBS, MAX_RESULT_BYTES
from pagemill.worker.webhooks.sender import MAX_TRIES
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
GATEWAY = GatewayConfig()
ENGINE = {name: field.default for name, field in EngineConfig.__dataclass_fields__.items()}
WORKER = {name: field.default for name, field in WorkerConfig.model_fields.items()}
KIB, MIB, DAY_S = 1 << 10, 1 << 20, 86_400

LIMITS: dict[str, tuple[str, ...]] = {
    "Job (envelope)": (f"{job.MAX_PAYLOAD_BYTES // MIB} MiB", f"{MAX_STORED_BYTES // MIB} MiB"),
    "Metadata": (f"{job.MAX_METADATA_BYTES // KIB} KiB", f"{job.MAX_METADATA_DEPTH} levels"),
    "Idempotency key": (f"{job.MAX_KEY} characters",),
    "Messages per job": (f"{job.MAX_MESSAGES:,}",),
    "Images per job": (str(images.MAX_IMAGES), f"{images.MAX_IMAGE_BYTES // MIB} MiB"),
    "Address of an image": (f"{images.MAX_IMAGE_URL:,} characters",),
    "Texts per": (f"{job.MAX_INPUTS:,}",),
    "Prompts per gateway request": (str(MAX_PROMPTS),),
    "`n`": (str(sampling.MAX_N),),
    "`logprobs`": (str(sampling.MAX_LOGPROBS),),
    "`stop` strings": (str(sampling.MAX_STOP_STRINGS),),
    "`stop_token_ids`": (f"{sampling.MAX_STOP_TOKEN_IDS:,}", f"{sampling.MAX_LOGIT_BIAS:,}"),
    "`bad_words`": (str(sampling.MAX_BAD_WORDS), f"{MAX_BAD_WORD_TOKENS:,} tokens"),
    "`allowed_token_ids`": (f"{sampling.MAX_ALLOWED_TOKEN_IDS:,}",),
    "Stop string": (f"{structures.MAX_STRING:,} characters",),
    "Choices": (f"{structures.MAX_CHOICES:,}", f"{MAX_LABEL_TOKENS:,} tokens", f"{MAX_CHOICE_TOKENS:,}"),
    "Regex": (f"{structures.MAX_SCHEMA:,} characters",),
    "JSON schema": (
        f"{structures.MAX_JSON_SCHEMA:,} characters",
        f"{structures.MAX_SCHEMA_DEPTH} levels",
        f"{TOKEN_LIMIT_S:.0f} s to verify",
    ),
    "Tools": (str(chat.MAX_TOOLS),),
    "`chat_template_kwargs`": (f"{chat.MAX_TEMPLATE_BYTES // KIB} KiB",),
    "Jobs in `after`": (str(dependencies.MAX_PARENTS),),
    "`delay`": (f"{job.MAX_SECONDS / DAY_S:.0f} days",),
    "Webhook URL": (f"{webhook_url.MAX_URL:,}",),
    "Attempts": (str(job.DEFAULT_MAX_ATTEMPTS),),
    "Result": (f"{MAX_RESULT_BYTES // MIB} MiB", f"{MAX_LOGPROBS:,}"),
    "File of the gateway": (f"{GATEWAY.file_ttl_s / DAY_S:.0f} days",),
    "Waiting jobs": (f"{submissions.DEFAULT_QUEUE_LIMIT:,}",),
    "Share of `maxmemory`": (str(memory.DEFAULT_SHARE),),
    "Lease": (f"{WORKER['lease_s']:.0f} s", f"{WORKER['renew_s']:.0f} s"),
    "Takeover": (f"{WORKER['lease_s'] + WORKER['renew_s']:.0f} s",),
    "Stalled engine": (f"{WORKER['engine_stall_s']:.0f} s",),
    "Results held": (f"{WORKER['max_held_results']:,}", f"{WORKER['max_held_bytes'] // MIB} MiB"),
    "Shutdown": (f"{WORKER['drain_grace_s']:.0f} s", f"{WORKER['shutdown_s']:.0f} s"),
    "Adapters": tuple(str(ENGINE[name]) for name in ("max_adapters", "adapter_slots", "max_adapter_rank")),
    "Names of a model": (str(MAX_SERVED_NAMES),),
    "Webhooks": (f"{MAX_TRIES} attempts",),
    "Image before it is decoded": (f"{ENGINE['max_image_pixels']:,} pixels",),
    "Decoding of an image": (f"{CALL_S:.0f} s", f"{MEMORY_MIB // KIB} GiB"),
    "Images of a job": (f"{MAX_PROMPT_BYTES // MIB} MiB",),
    "Cache of decoded images": (f"{CACHE_BYTES // MIB} MiB",),
    "Fetching of images": (
        f"{TIMEOUT_S:.0f} s per exchange",
        f"{MAX_REDIRECTS} redirects",
        f"{MAX_FETCH_S:.0f} s per",
    ),
    "Body": (f"{GATEWAY.max_body_bytes // MIB} MiB", f"{GATEWAY.max_file_bytes // MIB} MiB"),
    "Chat with images": (
        f"{GATEWAY.max_image_body_bytes // MIB} MiB",
        f"{GATEWAY.max_body_bytes // MIB} MiB",
    ),
    "All bodies": (f"{MAX_HELD_BYTES // MIB} MiB",),
    "Stored bytes": (f"{GATEWAY.max_stored_bytes // MIB} MiB",),
    "Concurrent requests": (f"{GATEWAY.max_in_flight:,}",),
    "Connections": (f"{GATEWAY.max_connections:,}",),
    "Slow body": (f"{GATEWAY.body_timeout_s:.0f} s", f"{GATEWAY.min_body_rate // KIB} KiB/s"),
    "Concurrent uploads": (str(GATEWAY.max_uploads), str(GATEWAY.max_key_uploads)),
    "Client that": (f"{GATEWAY.send_timeout_s:.0f} s",),
    "Files per tenant": (f"{GATEWAY.max_tenant_files:,}",),
    "Batch": (f"{GATEWAY.max_batch_requests:,}", f"{GATEWAY.max_tenant_batches} open"),
    "Request duration": (f"{GATEWAY.timeout_s:.0f} s",),
    "Jobs in the queue": (f"{WINDOW:,}", f"{WINDOW_BYTES // (1 << 30)} GiB"),
    "Line of": (f"{MAX_LINE_BYTES // MIB} MiB",),
    "Rendered prompt": (f"{MAX_RENDERED_CHARACTERS:,}",),
    "Steps": (str(MAX_STEPS),),
    "Recipe file": (f"{MAX_BYTES // MIB} MiB", str(MAX_EXAMPLES)),
    "Stages": (str(MAX_STAGES),),
}
"""The beginning of a row, and the required content of its value."""


def test_the_rows_have_the_values_of_the_code() -> None:
    wrong = []
    for name, texts in LIMITS.items():
        rows = re.findall(rf"^\| {re.escape(name)}(?!\w).*? \| (.+) \|$", PAGE, re.MULTILINE)
        wrong += [(name, text) for text in texts if not rows or text not in rows[0]]
    assert wrong == []
