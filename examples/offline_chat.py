"""A conversation without a server: three choices for an answer, then a second turn that the prefix cache shortens."""

from mambalign.engine import LLM, SamplingParams

with LLM(spec_tokens=3, mamba_block_size=32) as llm:  # a block of 32 tokens finds the beginnings of short talks
    talk = [
        {"role": "system", "content": "Write Python for a program that reads files, counts words and prints tables."},
        {"role": "user", "content": "Write a function that counts the words of a text."},
    ]
    (result,) = llm.chat(talk, SamplingParams(max_tokens=48, n=3, seed=1))
    for choice in result.outputs:
        print(f"--- choice {choice.index}\n{choice.text}")
    talk += [
        {"role": "assistant", "content": result.outputs[0].text},
        {"role": "user", "content": "Now one that counts its lines."},
    ]
    (result,) = llm.chat(talk, SamplingParams(max_tokens=48, temperature=0))
    print(f"--- second turn\n{result.outputs[0].text}")
    print(f"--- {result.num_cached_tokens} of {len(result.prompt_token_ids)} prompt tokens were cached")
