#!/usr/bin/env python3
"""How many drafts of the model that ships are kept: taken from its head in fp8, and from the head itself.

Greedy texts behind the beginnings of source files that its training held out. A draft that is not kept costs time,
never a token: the texts must be the same. The last line is one JSON object. Needs a GPU that multiplies fp8.
"""

import argparse
import json
import sys
from typing import Any

from train_corpus import collect

from mambalign.engine import LLM, SamplingParams

HEADS = ("fp8", "model")
MOST_CHARACTERS = 16  # of a token on average, in any text


def held_out_prompts(tokenizer: Any, num_prompts: int, num_tokens: int) -> list[list[int]]:
    """The first tokens of each held-out file that has so many; fewer prompts where this machine has fewer files."""
    texts = [file.text[: MOST_CHARACTERS * num_tokens] for file in collect(seed=0)[0] if file.held_out]
    encoded = (tokenizer.encode(text) for text in texts)
    return [token_ids[:num_tokens] for token_ids in encoded if len(token_ids) >= num_tokens][:num_prompts]


def measure(head: str, args: argparse.Namespace) -> tuple[dict[str, float], list[list[int]]]:
    """Mean of tokens that a step keeps and its parts, and the texts."""
    with LLM(
        spec_tokens=args.spec_tokens, spec_method="mtp", draft_head_dtype=head, max_num_seqs=args.prompts,
        max_model_len=args.prompt_tokens + args.output_tokens, cache_memory=2 << 30,
    ) as llm:  # fmt: skip
        prompts = held_out_prompts(llm.core.tokenizer, args.prompts, args.prompt_tokens)
        params = SamplingParams(max_tokens=args.output_tokens, temperature=0.0, ignore_eos=True)
        texts = [result.outputs[0].token_ids for result in llm.generate(prompts, params)]
        stats = llm.core.stats()
    steps, accepted = stats.spec_decode_num_drafts_total, stats.spec_decode_num_accepted_tokens_total
    by_position = [round(count / steps, 4) for count in stats.spec_decode_accepted_per_position]
    figures = {"tokens_a_step": round(1 + accepted / steps, 4), "steps": steps, "accepted_by_position": by_position}
    return figures | {"prompts": len(prompts)}, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--spec-tokens", type=int, default=3)
    args = parser.parse_args()
    figures, texts = {}, {}
    for head in HEADS:
        figures[head], texts[head] = measure(head, args)
    is_same = texts["fp8"] == texts["model"]
    print(json.dumps({**figures, "same_text": is_same}))
    sys.exit(0 if is_same else 1)


if __name__ == "__main__":
    main()
