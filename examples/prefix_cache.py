"""Ask twice for the same long prompt: the second time most of it comes from the prefix cache, the text is the same.

Start a server (`scripts/serve.sh --spec-tokens 3`), then run this. Needs the `openai` package.
"""

import inspect
import os
import textwrap

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")
prompt = inspect.getsource(textwrap)[:1500]
texts = []
for attempt in ("cold", "warm"):
    answer = client.completions.create(model="default", prompt=prompt, max_tokens=80, temperature=0)
    usage = answer.usage
    cached = usage.prompt_tokens_details.cached_tokens
    accepted = usage.completion_tokens_details.accepted_prediction_tokens
    print(f"{attempt}: {usage.prompt_tokens} prompt tokens, {cached} of them cached;", end=" ")
    print(f"{usage.completion_tokens} tokens generated, {accepted} of them drafts that were right")
    texts.append(answer.choices[0].text)
print("the texts are", "the same" if texts[0] == texts[1] else "DIFFERENT")
