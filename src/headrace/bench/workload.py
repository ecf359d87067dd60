"""What is asked, request by request: a number gives the same request whenever it is made, from the seed alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.bench.lengths import Lengths
from headrace.bench.prompts import Conversation, Message, Ruler, hashed_text, shared_text
from headrace.errors import UsageError
from headrace.plan.traffic import HASH_TOKENS, Traffic


@dataclass(frozen=True, slots=True)
class Job:
    """A conversation, of one turn mostly, with the tokens its prompt should have (0: as it is) and its answers may have."""

    conversation: Conversation
    aimed: int
    wanted: int


Jobs = Callable[[int], Job]  # the job of a number from 0


@dataclass(frozen=True, slots=True)
class Asking:
    """What is the same in all requests."""

    model: str
    endpoint: str = "chat"
    ignore_eos: bool = True
    temperature: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)  # further fields, and those that replace ours

    def body(self, messages: Sequence[Message], wanted: int) -> bytes:
        """JSON of one request."""
        told: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        told |= {"messages": list(messages)} if self.endpoint == "chat" else {"prompt": messages[-1]["content"]}
        told |= {"max_tokens": wanted, "temperature": self.temperature}
        if self.ignore_eos:
            told["ignore_eos"] = True
        return json.dumps(told | self.extra, separators=(",", ":")).encode()


def _asked(content: str, aimed: int, wanted: int) -> Job:
    return Job(Conversation((), ({"role": "user", "content": content},)), aimed, wanted)


def drawn(prompts: Lengths, answers: Lengths, shared: float, ruler: Ruler, seed: int) -> Jobs:
    """Made-up texts; a share `shared` of each prompt's words begins all of them alike."""

    def job(number: int) -> Job:
        draw = random.Random(f"{seed}/lengths/{number}")
        (aimed,), (wanted,) = prompts.draw(1, draw), answers.draw(1, draw)
        return _asked(shared_text(ruler.words(aimed), shared, f"{seed}/text/{number}", f"{seed}/common"), aimed, wanted)

    return job


def from_trace(traffic: Traffic, ruler: Ruler, seed: int) -> Jobs:
    """The requests of a trace in its order, over and over. Equal hash ids are equal texts; in a later round they are others."""
    rounds = 1 + max((max(names, default=0) for names in traffic.hashes), default=0) if traffic.hashes else 0

    def job(number: int) -> Job:
        turn, row = divmod(number, len(traffic))
        aimed = traffic.prompts[row]
        if traffic.hashes is None:
            content = shared_text(ruler.words(aimed), 0.0, f"{seed}/text/{number}", "")
        else:
            content = hashed_text(aimed, tuple(name + turn * rounds for name in traffic.hashes[row]), HASH_TOKENS, ruler, str(seed))
        return _asked(content, aimed, traffic.answers[row])

    return job


def lengths_of(traffic: Traffic, shared: float, ruler: Ruler, seed: int) -> Jobs:
    """Prompt and answer of rows drawn at random from a trace: its lengths, as they come together, without its order."""

    def job(number: int) -> Job:
        row = random.Random(f"{seed}/lengths/{number}").randrange(len(traffic))
        words = ruler.words(traffic.prompts[row])
        content = shared_text(words, shared, f"{seed}/text/{number}", f"{seed}/common")
        return _asked(content, traffic.prompts[row], traffic.answers[row])

    return job


def from_file(conversations: Sequence[Conversation], answers: Lengths, seed: int) -> Jobs:
    """The prompts of a file in its order, over and over; answers as long as it says, else drawn."""

    def job(number: int) -> Job:
        conversation = conversations[number % len(conversations)]
        (drawn,) = answers.draw(1, random.Random(f"{seed}/lengths/{number}"))
        return Job(conversation, 0, conversation.max_tokens or drawn)

    return job


def check_endpoint(conversations: Sequence[Conversation], endpoint: str) -> None:
    """Raises UsageError for what only a chat can be."""
    if endpoint == "completions" and any(conversation.history or len(conversation.turns) > 1 for conversation in conversations):
        raise UsageError("--prompts: messages and turns need --endpoint chat")
