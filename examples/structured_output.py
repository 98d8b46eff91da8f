"""JSON that fits a schema, whatever the model would rather say; then one of a few words, and a text of a pattern."""

import json
import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")
schema = {
    "type": "object",
    "properties": {
        "language": {"enum": ["Python", "C", "Rust"]},
        "name": {"type": "string", "maxLength": 20},
        "num_lines": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["language", "name", "num_lines"],
    "additionalProperties": False,
}
ask = {"model": "default", "messages": [{"role": "user", "content": "Describe a file."}], "max_tokens": 200}
answer = client.chat.completions.create(
    **ask, response_format={"type": "json_schema", "json_schema": {"name": "file", "schema": schema}}
)
print("json:", json.loads(answer.choices[0].message.content))
for form in ({"choice": ["short", "long"]}, {"regex": r"def [a-z_]{3,12}\(\):"}):
    answer = client.chat.completions.create(**ask, extra_body={"structured_outputs": form})
    print(f"{next(iter(form))}:", answer.choices[0].message.content)
