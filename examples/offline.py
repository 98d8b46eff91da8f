"""Generate without a server."""

from mambalign.engine import LLM, SamplingParams

llm = LLM(spec_tokens=3)  # options are the command line's, with underscores
prompts = ["def read_lines(path):", "class Point:\n    def __init__(self, x, y):"]
for result in llm.generate(prompts, SamplingParams(max_tokens=40, temperature=0)):
    choice = result.outputs[0]
    print(f"{choice.text}\n# {len(choice.token_ids)} tokens, {choice.num_accepted_tokens} of them accepted drafts\n")
llm.shutdown()
