"""Show an answer as it comes. A piece holds several tokens where drafts were accepted."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")
stream = client.chat.completions.create(
    model="default",
    messages=[{"role": "user", "content": "Write a class for a point."}],
    max_tokens=60,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},  # the last chunk then has it
)
num_pieces = 0
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        num_pieces += 1
        print(chunk.choices[0].delta.content, end="", flush=True)
    if chunk.usage:
        print(f"\n# {chunk.usage.completion_tokens} tokens in {num_pieces} pieces")
