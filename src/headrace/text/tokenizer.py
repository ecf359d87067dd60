"""Text to token ids and back: one interface over GGUF metadata and Hugging Face folders."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from headrace.errors import InvalidRequest, ModelError
from headrace.text.chat import trusted_spans
from headrace.text.chat_template import ChatTemplate, Message
from headrace.text.detokenizer import Detokenizer, PieceTexts
from headrace.text.literals import literal_pattern
from headrace.text.tools import choose_format, plain_tool_messages
from headrace.text.vocabulary import Vocabulary

# The library would start a pool of threads at the first batch; ours is the only pool here, and encoding runs on the caller's thread.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

Span = tuple[int, int, int]  # [start, stop) of a control token in a text, and its id


class Encoder(Protocol):
    """Encodes text that holds no control token. Releases the interpreter's lock for long text where it can."""

    def encode(self, text: str, at_start: bool) -> list[int]:
        """`at_start`: nothing comes before; otherwise a control token does."""


class Tokenizer:
    """A model's vocabulary with everything that turns text into ids and ids into text. Safe to use from several threads."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        encoder: Encoder,
        *,
        bos_id: int | None,
        eos_ids: tuple[int, ...],
        prefix_ids: tuple[int, ...] = (),
        suffix_ids: tuple[int, ...] = (),
        leading_space: bool = False,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self.vocabulary = vocabulary
        self.encoder = encoder
        self.vocab_size = vocabulary.size
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        self.prefix_ids = prefix_ids  # what the model expects before plain text: the beginning-of-text token, or nothing
        self.suffix_ids = suffix_ids
        self.leading_space = leading_space  # encoding puts a space in front of text, so decoding from the start takes one away
        self.chat_template = chat_template
        self.control_ids = frozenset(vocabulary.control.values())
        self._control_pattern = literal_pattern(vocabulary.control)
        self.pieces = _Pieces(vocabulary)
        self._showing: dict[frozenset[int], PieceTexts] = {}
        self._texts = PieceTexts(self.pieces, self.control_ids, vocabulary.size)
        sources, takes_tools = (chat_template.sources, chat_template.takes_tools) if chat_template is not None else ((), False)
        self.tool_format = choose_format(sources, takes_tools)  # how this model writes calls of functions
        self._texts_with_control = PieceTexts(self.pieces, frozenset(), vocabulary.size)

    @property
    def add_bos(self) -> bool:
        """Whether plain text is to begin with the beginning-of-text token."""
        return bool(self.prefix_ids)

    def encode(self, text: str, *, special: bool = False, add_special: bool = False) -> list[int]:
        """Token ids of a text. With `special`, control tokens spelled in the text become control tokens: for trusted text only.

        `add_special` puts what the model expects around plain text (its beginning-of-text token), never doubling what is there.
        Raises InvalidRequest when the text is not Unicode text (a lone surrogate).
        """
        _check_unicode(text)
        ids = self.encode_spans(text, self.find_control(text) if special else ())
        if add_special:
            if self.prefix_ids and tuple(ids[: len(self.prefix_ids)]) != self.prefix_ids:
                ids = [*self.prefix_ids, *ids]
            if self.suffix_ids and tuple(ids[-len(self.suffix_ids) :]) != self.suffix_ids:
                ids = [*ids, *self.suffix_ids]
        return ids

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> list[int]:
        """Token ids of a conversation as the model's template lays it out, beginning-of-text token included if the template writes one.

        The template's own control tokens become control tokens; the same spelling in anything the client wrote stays text.
        Raises InvalidRequest: no template, an error the template raises, or text that cannot be told from the template's.
        """
        if self.chat_template is None:
            raise InvalidRequest("this model has no chat template; use completions with a prompt instead", param="messages")
        template = self.chat_template
        if not template.takes_tools and (tools or any(message.get("tool_calls") for message in messages)):
            knows_calls = "tool_calls" in template.words
            messages = plain_tool_messages(self.tool_format, messages, tools, knows_calls=knows_calls, takes_system=template.takes_system)
            tools = None
        text, spans = trusted_spans(
            template,
            self.find_control,
            self.vocabulary.control,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
            now=now,
        )
        return self.encode_spans(text, spans)

    def find_control(self, text: str) -> list[Span]:
        """Where control tokens are spelled in a text, leftmost longest first; with the white space a token swallows."""
        if self._control_pattern is None:
            return []
        control, stripped = self.vocabulary.control, self.vocabulary.stripped
        spans = []
        for match in self._control_pattern.finditer(text):
            start, stop = match.span()
            token = match.group()
            if token in stripped:
                while stop < len(text) and text[stop].isspace():
                    stop += 1
            spans.append((start, stop, control[token]))
        return spans

    def encode_spans(self, text: str, spans: Iterable[Span]) -> list[int]:
        """Encode a text in which exactly `spans` are control tokens."""
        ids: list[int] = []
        position = 0
        for start, stop, token_id in spans:
            if start > position:
                ids += self.encoder.encode(text[position:start], position == 0)
            ids.append(token_id)
            position = stop
        if position < len(text):
            ids += self.encoder.encode(text[position:] if position else text, position == 0)
        return ids

    def min_tokens(self, text: str) -> int:
        """A lower bound of a text's tokens, without tokenizing it: to refuse what is far too long before working on it."""
        return -(-len(text) // self.vocabulary.longest)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of ids from the start of a text. Bytes that are not UTF-8 become U+FFFD."""
        detokenizer = self.detokenizer(skip_special=skip_special, strip_space=True)
        return detokenizer.add(ids) + detokenizer.finish()

    def detokenizer(
        self,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        strip_space: bool = False,
        record: bool = False,
        shown: tuple[str, ...] = (),
    ) -> Detokenizer:
        """For one sample. `strip_space`: this is the beginning of a text (a chat answer), not the continuation of one (a completion): the
        space which SentencePiece puts in front of text is taken away. `record` keeps a TokenText for each token. `shown` are control
        tokens that are text all the same."""
        texts = self._texts if skip_special else self._texts_with_control
        if shown_ids := frozenset(self.control[token] for token in shown if token in self.control):
            texts = self._texts_showing(shown_ids)
        strip_space = strip_space and self.leading_space
        return Detokenizer(texts, stop=stop, include_stop=include_stop, strip_space=strip_space, record=record)

    def _texts_showing(self, ids: frozenset[int]) -> PieceTexts:
        if ids not in self._showing:  # one set for each format of calls
            self._showing[ids] = PieceTexts(self.pieces, self.control_ids - ids, self.vocab_size)
        return self._showing[ids]

    @property
    def control(self) -> Mapping[str, int]:
        """The control tokens, by their spelling."""
        return self.vocabulary.control

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of a token; none for ids beyond the vocabulary. Raises ValueError for a negative id."""
        return self.pieces[token_id]

    def piece(self, token_id: int) -> tuple[str, bytes]:
        """A token as text (bytes that are no whole character as U+FFFD) and as bytes, the way log-probabilities show it."""
        data = self.pieces[token_id]
        return data.decode("utf-8", "replace"), data

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the file spells it."""
        return self.vocabulary.token(token_id) if token_id >= 0 else None

    def token_to_id(self, token: str) -> int | None:
        return self.vocabulary.token_id(token)


class _Pieces(dict[int, bytes]):
    """Bytes of tokens, worked out when first asked for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self._vocabulary = vocabulary

    def __missing__(self, token_id: int) -> bytes:
        if token_id < 0:
            raise ValueError(f"[token_bytes] token_id: expected 0 or more, got {token_id}")
        data = self._vocabulary.token_bytes(token_id)
        if token_id < self._vocabulary.size:  # others are not kept: the table stays bounded
            self[token_id] = data
        return data


def _check_unicode(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text is not valid Unicode: a lone surrogate at character {error.start}") from None


def load_tokenizer(source: str | Path | Mapping[str, Any], *, file: object = None) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, of a GGUF file (a vocabulary-only one will do), or of GGUF metadata already read.

    `file` names the metadata's file in errors. Raises ModelError naming file and field, UnsupportedModel for what is not known here.
    """
    # Imported here: each loader needs what the other does not.
    if isinstance(source, Mapping):
        from headrace.text.from_gguf import tokenizer_from_metadata

        return tokenizer_from_metadata(source, file or "GGUF metadata")
    path = Path(source)
    if path.is_dir():
        from headrace.text.from_folder import tokenizer_from_folder

        return tokenizer_from_folder(path)
    if not path.exists():
        raise ModelError(path, "", "no such file or folder")
    from headrace.models.gguf import GGUFFile
    from headrace.text.from_gguf import tokenizer_from_metadata

    with GGUFFile(path) as opened:
        return tokenizer_from_metadata(opened.metadata, path)


def tokenize_text(model_path: str | Path, text: str) -> list[int]:
    """What `headrace tokenize` prints: the ids of a text alone, special tokens in it left as text, nothing added around it."""
    return load_tokenizer(model_path).encode(text)
