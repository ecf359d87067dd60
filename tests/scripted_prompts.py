"""What the scripted engine tells of prompts: -position / 8 as log-probability of each token but the first, and an embedding of four."""

from __future__ import annotations

from array import array

from headrace.request import Embedding, PromptLogprobs, PromptTold, Submit


def scores_of(submit: Submit) -> list[tuple[int, PromptTold]]:
    """Log-probabilities come in two pieces. In each place the best are the next ids, the last of them the token itself."""
    best = submit.params.prompt_logprobs
    prompt = array("i", submit.prompt)
    middle = 1 + len(prompt) // 2
    if submit.params.embed:
        return [(submit.request_id, Embedding(array("f", [len(prompt), prompt[0], prompt[-1], 0.5]).tobytes()))]
    found: list[tuple[int, PromptTold]] = []
    for first, stop in ((1, middle), (middle, len(prompt))) if best >= 0 else ():
        positions = range(first, stop)
        values = array("f", [-position / 8 for position in positions])
        ranks = array("i", [max(best, 1) for _ in positions])
        ids = array("i", [prompt[position] + best - 1 - i for position in positions for i in range(best)])
        tops = array("f", [(best - 1 - i - position) / 8 for position in positions for i in range(best)])
        told = PromptLogprobs(first, values.tobytes(), ranks.tobytes(), ids.tobytes(), tops.tobytes())
        found.append((submit.request_id, told))
    return found
