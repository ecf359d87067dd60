"""/v1/embeddings: prompts as vectors. To the engine each is a prompt with an answer of one token, which nobody is told."""

from __future__ import annotations

from array import array
from base64 import b64encode
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.errors import EngineFailed
from headrace.server import protocol
from headrace.server.answer import JSON_HEADERS, Answer, Part
from headrace.server.formats import Format, encode
from headrace.server.sample import Sample

REFUSED: dict[str, tuple[Any, ...]] = {"dimensions": ()}


class EmbeddingsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    input: str | list[str | int | list[int]]
    model: protocol.Short | None = None
    encoding_format: Literal["float", "base64"] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    service_tier: Literal["auto", "default", "flex", "batch"] | None = None
    deadline_ms: Annotated[float, Meta(gt=0, le=86_400_000)] | None = None


_decoder = msgspec.json.Decoder(protocol.with_other_fields(EmbeddingsRequest, REFUSED))


def parse_embeddings(body: bytes) -> tuple[protocol.CompletionRequest, bool]:
    """The same as a completion, and whether its vectors are wanted in base64. Raises InvalidRequest or UnsupportedParameter."""
    asked: EmbeddingsRequest = protocol.decode_request(_decoder, body, REFUSED)
    completion = protocol.CompletionRequest(
        prompt=asked.input,
        model=asked.model,
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        truncate_prompt_tokens=asked.truncate_prompt_tokens,
        priority=asked.priority,
        service_tier=asked.service_tier,
        deadline_ms=asked.deadline_ms,
    )
    return completion, asked.encoding_format == "base64"


class EmbeddingsFormat(Format):
    endpoint = "embeddings"
    prefix = "embd-"
    object = "list"
    as_base64 = False

    def vector(self, index: int, vector: bytes) -> dict[str, Any]:
        """One entry of the list. `vector`: float32."""
        shown = b64encode(vector).decode() if self.as_base64 else array("f", vector).tolist()
        return {"object": "embedding", "index": index, "embedding": shown}

    def listed(self, data: list[dict[str, Any]], usage: dict[str, Any], **more: Any) -> bytes:
        """The whole body."""
        del usage["completion_tokens"], usage["prompt_tokens_details"]
        return encode({"object": self.object, "data": data, "model": self.model, "usage": usage} | more)


class EmbeddingsAnswer(Answer):
    """One JSON body at the end, with a vector for each prompt."""

    format: EmbeddingsFormat

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for part in self.parts:
            for sample in part.samples:
                sample.finish = "length"  # nothing of it counts

    def next_token(self, sample: Sample) -> None:
        """Nothing: the one token is no answer."""

    def flush(self, part: Part) -> bool:
        if any(sample.reason is None for sample in part.samples):
            return False
        if part.vector is None:
            self.fail(EngineFailed("the engine ended the request"))
        elif all(other.done or other is part for other in self.parts):
            part.done = True
            self._complete()
            data = [self.format.vector(i, each.vector or b"") for i, each in enumerate(self.parts)]
            self.wire.respond(200, JSON_HEADERS + self.headers(), self.format.listed(data, self.usage(), timings=self.timings()))
        return True

    def _content(self) -> tuple[list[str], list[str]]:
        prompts, _ = super()._content()
        return prompts, []
