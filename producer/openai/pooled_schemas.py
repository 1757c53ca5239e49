"""The fields of the requests and responses of /v1/embeddings, /v1/rerank, /v1/score and /v1/classify."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pagemill.common.sampling_fields import MAX_TOKEN_ID
from pagemill.producer.wire.schema.job import MAX_INPUTS, MAX_KEY
from pagemill.producer.wire.schema.keys import MODEL_PATTERN

EMBEDDINGS_URL, SCORE_URL, CLASSIFY_URL = "/v1/embeddings", "/v1/score", "/v1/classify"
RERANK_URLS = ("/v1/rerank", "/v2/rerank")

_Text = Annotated[str, Field(min_length=1)]
_Ids = Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]], Field(min_length=1)]
_Texts = Annotated[list[_Text], Field(min_length=1, max_length=MAX_INPUTS)]
_Input = _Text | _Ids | Annotated[list[_Text | _Ids], Field(min_length=1, max_length=MAX_INPUTS)]


class _PooledRequest(BaseModel):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, None]
    model: Annotated[str, Field(pattern=f"^{MODEL_PATTERN.pattern}$")]
    truncate: bool | None = None
    user: str | None = None


class EmbeddingRequest(_PooledRequest):
    input: _Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    prompt_name: Annotated[str, Field(min_length=1, max_length=MAX_KEY)] | None = None


class _Document(BaseModel):
    text: _Text


class RerankRequest(_PooledRequest):
    query: _Text
    documents: Annotated[list[_Text | _Document], Field(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None


class ScoreRequest(_PooledRequest):
    text_1: _Text
    text_2: _Text | _Texts
    encoding_format: Literal["float"] | None = None


class ClassifyRequest(_PooledRequest):
    input: _Input


class _Usage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class _PooledAnswer(BaseModel):
    model: str
    usage: _Usage


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(_PooledAnswer):
    object: Literal["list"]
    data: list[Embedding]


class Ranked(BaseModel):
    index: int
    relevance_score: float


class RerankAnswer(_PooledAnswer):
    id: str
    results: list[Ranked]
    meta: dict[str, Any]


class Score(BaseModel):
    object: Literal["score"]
    index: int
    score: float


class ScoreList(_PooledAnswer):
    id: str
    object: Literal["list"]
    created: int
    data: list[Score]


class Classification(BaseModel):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(_PooledAnswer):
    id: str
    object: Literal["list"]
    created: int
    data: list[Classification]


POOLED_OPERATIONS: dict[str, tuple[type[BaseModel], type[BaseModel]]] = {
    EMBEDDINGS_URL: (EmbeddingRequest, EmbeddingList),
    **dict.fromkeys(RERANK_URLS, (RerankRequest, RerankAnswer)),
    SCORE_URL: (ScoreRequest, ScoreList),
    CLASSIFY_URL: (ClassifyRequest, ClassificationList),
}
"""The request's and the response's model, by URL."""
