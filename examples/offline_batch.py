"""Complete a batch of prompts without a server."""

from mambalign.engine import LLM, SamplingParams

prompts = ["def read_lines(path):", "class Point:\n    def __init__(self, x, y):", "import json\n\nwith open("]
with LLM(spec_tokens=3) as llm:  # options are the command line's, with underscores
    results = llm.generate(prompts, SamplingParams(max_tokens=40, temperature=0), use_tqdm=True)
for result in results:
    choice = result.outputs[0]
    print(f"{result.prompt}{choice.text}")
    print(f"# {len(choice.token_ids)} tokens, {choice.num_accepted_tokens} of them accepted drafts\n")
