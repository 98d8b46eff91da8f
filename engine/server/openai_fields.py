"""Every field of OpenAI's request types, per endpoint: honoured, or refused with what to do instead.

A test walks the installed openai package's types, so a field that a new client can send is never met unprepared.
Honoured fields are those of the endpoint's body (`protocol.py`, `response_body.py`).
"""

from typing import Any, NamedTuple


class Refused(NamedTuple):
    """A field that is not served. `neutral` values ask for nothing and are taken as "not given"; so is null."""

    instead: str  # what to do, in words that follow "NAME is not supported by this server: "
    neutral: tuple[Any, ...] = ()


HONOURED = None
FieldTable = dict[str, Refused | None]

LEAVE_OUT = "leave it out"
NOT_STORED = "nothing is stored here; keep the conversation and send it with every request"
ONE_CACHE = "prefixes are kept as long as there is room; use cache_salt to keep yours apart"
TEXT_ONLY = "this server takes and gives text only"
NO_TOOLS_HERE = "built-in tools cannot be run here"

SAMPLING: FieldTable = dict.fromkeys(("temperature", "top_p", "stream", "stream_options", "user", "model"), HONOURED)
CHOICES: FieldTable = dict.fromkeys(
    ("frequency_penalty", "presence_penalty", "logit_bias", "logprobs", "max_tokens", "n", "seed", "stop"), HONOURED
)
SHARED: FieldTable = {  # of chat completions and responses
    "moderation": Refused("nothing is moderated here; " + LEAVE_OUT),
    "prompt_cache_key": HONOURED,
    "prompt_cache_options": Refused(ONE_CACHE),
    "prompt_cache_retention": Refused(ONE_CACHE, ("in_memory",)),
    "safety_identifier": HONOURED,
    "service_tier": Refused("there is one tier of service; " + LEAVE_OUT, ("auto", "default")),
    "store": Refused(NOT_STORED, (False,)),
    "top_logprobs": HONOURED,
}

COMPLETION: FieldTable = {
    **SAMPLING,
    **CHOICES,
    "prompt": HONOURED,
    "best_of": HONOURED,
    "echo": HONOURED,
    "suffix": Refused("the models served continue a text, they do not fill a gap; put both sides into prompt", ("",)),
}
CHAT: FieldTable = {
    **SAMPLING,
    **CHOICES,
    **SHARED,
    "messages": HONOURED,
    "max_completion_tokens": HONOURED,
    "audio": Refused(TEXT_ONLY),
    "function_call": Refused("use tool_choice", ("none", "auto")),
    "functions": Refused("use tools", ([],)),
    "metadata": Refused(NOT_STORED, ({},)),
    "modalities": Refused(TEXT_ONLY, (["text"],)),
    "prediction": Refused("drafts come from --spec-method and cost nothing to ask for; " + LEAVE_OUT),
    "reasoning_effort": HONOURED,
    "response_format": HONOURED,
    "parallel_tool_calls": HONOURED,
    "tool_choice": HONOURED,
    "tools": HONOURED,
    "verbosity": Refused("ask for a short or long answer in the prompt", ("medium",)),
    "web_search_options": Refused(NO_TOOLS_HERE),
}
RESPONSE: FieldTable = {
    **SAMPLING,
    **SHARED,
    "input": HONOURED,
    "instructions": HONOURED,
    "max_output_tokens": HONOURED,
    "include": HONOURED,
    "text": HONOURED,
    "truncation": HONOURED,
    "access_programs": Refused("there are no such programs here; " + LEAVE_OUT),
    "background": Refused("answers come on the request's own connection; use stream", (False,)),
    "background_options": Refused("answers come on the request's own connection; use stream"),
    "context_management": Refused("send the part of the conversation that the model is to see", ([],)),
    "conversation": Refused(NOT_STORED),
    "image": Refused(TEXT_ONLY),
    "max_tool_calls": Refused(NO_TOOLS_HERE),
    "metadata": HONOURED,
    "previous_response_id": Refused(NOT_STORED),
    "prompt": Refused("prompt templates are not stored here; send the text as input"),
    "reasoning": HONOURED,
    "parallel_tool_calls": HONOURED,
    "tool_choice": HONOURED,
    "tools": HONOURED,
}
MESSAGE: FieldTable = {  # of a chat's messages; parts of an answer that clients send back are taken when empty
    "role": HONOURED,
    "content": HONOURED,
    "name": HONOURED,
    "annotations": Refused(TEXT_ONLY, ([],)),
    "audio": Refused(TEXT_ONLY),
    "function_call": Refused("use tool_calls"),
    "reasoning": HONOURED,
    "reasoning_content": HONOURED,
    "refusal": Refused("write it into content"),
    "tool_call_id": HONOURED,
    "tool_calls": HONOURED,
}
