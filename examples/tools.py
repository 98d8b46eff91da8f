"""A tool call and its answer. Start the server with `--chat-template examples/tools.jinja`: the template of the model
that ships knows no tools. `tool_choice="required"` holds the model to a grammar, so that even a small one calls."""

import json
import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")
parameters = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "integer", "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
tools = [{"type": "function", "function": {"name": "add", "description": "a + b", "parameters": parameters}}]
messages = [{"role": "user", "content": "What is 2 + 3?"}]
answer = client.chat.completions.create(
    model="default", messages=messages, tools=tools, tool_choice="required", parallel_tool_calls=False,
    max_tokens=100, temperature=0,
)  # fmt: skip
call = answer.choices[0].message.tool_calls[0]
arguments = json.loads(call.function.arguments)
total = arguments["a"] + arguments["b"]
print(f"{call.function.name}({arguments['a']}, {arguments['b']}) = {total}, ended by {answer.choices[0].finish_reason}")
messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": str(total)}]
answer = client.chat.completions.create(
    model="default", messages=messages, tools=tools, tool_choice="none", max_tokens=20, temperature=0
)
print(answer.choices[0].message.content)  # a large model says what the sum is; the small one repeats what it has seen
