"""One question to a server (`scripts/serve.sh --spec-tokens 3`). Needs the `openai` package, like its neighbours."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")
model = client.models.list().data[0].id
answer = client.chat.completions.create(
    model=model,
    messages=[
        {"role": "system", "content": "Write Python."},
        {"role": "user", "content": "Read a file and return its lines."},
    ],
    max_tokens=60,
    temperature=0,
)
print(answer.choices[0].message.content)
print(f"# {answer.model}: {answer.usage.completion_tokens} tokens, ended by {answer.choices[0].finish_reason}")
